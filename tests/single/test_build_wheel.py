"""Building, caching, interrupting: with a small source and a back end that needs no compiler.

The work is done by a process of its own, ``SCRIPT``, so that it can be killed.
"""

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvdkit.errors import BuildError
from hvdkit.horovod_build import cache, source
from hvdkit.horovod_build.process import Answer

REPOSITORY = Path(cache.__file__).parents[2]

# Stands where setuptools would be found: the driver runs in the source folder. It compiles for as long as a file says.
BACKEND = """
import os, pathlib, subprocess, sys, zipfile

class __legacy__:
    @staticmethod
    def build_wheel(target):
        print("running bdist_wheel", flush=True)
        for done in (10, 50):
            print("[%3d%%] Building CXX object a.cc.o" % done, flush=True)
        mode = os.environ["TEST_MODE"]
        if mode == "hang":
            print("hanging", flush=True)
            subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", "compiler-of-test"])
        if mode == "fail":
            print("a.cc:3:1: error: this is the first", flush=True)
            print("  3 | x", flush=True)
            sys.exit("Traceback: CalledProcessError")
        with zipfile.ZipFile(pathlib.Path(target) / "horovod-0.28.1-py3-none-any.whl", "w") as archive:
            archive.writestr("horovod/__init__.py", "made = %r" % os.environ.get("TEST_NAME", ""))
            archive.writestr("horovod-0.28.1.dist-info/RECORD", "")
"""
SCRIPT = """
import sys, tempfile
from pathlib import Path
from dataclasses import replace
sys.path.insert(0, sys.argv[2])
from hvdkit.errors import BuildError
from hvdkit.horovod_build import cache, edits, recipe, source, wheel
from hvdkit.horovod_build.frameworks import Framework
from hvdkit.horovod_build.gpu import Gpu
from hvdkit.horovod_build.probe import Facts
from hvdkit.horovod_build.progress import PlainProgress
from hvdkit.horovod_build.toolchain import Tool
tool = Tool(Path("/usr/bin/tool"), "1.0")
facts = Facts((Framework("torch", "2.13", 17),), tool, tool, tool, tool, None, Gpu("none"), 1, 2**31, (), ())
source.fetch = lambda work: Path(sys.argv[1])
plan = replace(recipe.make_plan(facts), edits=(edits.Edit("named", "a.txt", "old", "new", "why", "all"),))
try:
    with tempfile.TemporaryDirectory() as folder:
        print("BUILT", wheel.obtain(plan, Path(folder), PlainProgress(), force="--force" in sys.argv).name)
except BuildError as error:
    sys.exit(f"FAILED {error}")
"""


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    root = tmp_path / "tree" / "horovod-0.28.1"
    (root / "setuptools").mkdir(parents=True)
    (root / "setuptools" / "__init__.py").write_text("")
    (root / "setuptools" / "build_meta.py").write_text(BACKEND)
    (root / "a.txt").write_text("an old text")
    path = tmp_path / source.SDIST
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root, arcname=root.name)
    return path


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache.root()


def start(sdist: Path, mode: str, *words: str, name: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "TEST_MODE": mode, "TEST_NAME": name}
    argv = [sys.executable, "-c", SCRIPT, str(sdist), str(REPOSITORY), *words]
    return subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = child.communicate(timeout=60)
    return child.returncode, output


def wheels(kept: Path) -> list[Path]:
    return sorted(kept.glob("wheels/**/*.whl"))


def nothing_half(kept: Path) -> bool:
    """No wheel folder without a whole wheel."""
    return all(any(folder.glob("*.whl")) for folder in kept.glob("wheels/*"))


def test_build_then_cache_then_force(sdist: Path, kept: Path) -> None:
    code, output = finish(start(sdist, "work", name="first"))
    assert code == 0, output
    (wheel,) = wheels(kept)
    assert f"BUILT {wheel.name}" in output and "compiling with 1 job: 50 %" in output
    assert list((kept / "work").iterdir()) == []
    first = wheel.read_bytes()

    code, output = finish(start(sdist, "fail"))
    assert code == 0 and "wheel from the cache" in output
    assert wheel.read_bytes() == first

    code, output = finish(start(sdist, "work", "--force", name="second"))
    assert code == 0 and "from the cache" not in output
    assert wheels(kept) == [wheel] and wheel.read_bytes() != first


def test_a_failed_build_shows_the_first_error_and_leaves_no_wheel(sdist: Path, kept: Path) -> None:
    code, output = finish(start(sdist, "fail"))
    assert code == 1
    assert "FAILED building Horovod failed" in output
    assert "a.cc:3:1: error: this is the first" in output
    assert "CalledProcessError" not in output.split("FAILED")[1]
    log = Path(output.split("full log: ")[1].strip())
    assert "CalledProcessError" in log.read_text()
    assert wheels(kept) == [] and nothing_half(kept)


def test_a_failed_rebuild_keeps_the_good_wheel(sdist: Path, kept: Path) -> None:
    assert finish(start(sdist, "work"))[0] == 0
    before = wheels(kept)[0].read_bytes()
    assert finish(start(sdist, "fail", "--force"))[0] == 1
    assert wheels(kept)[0].read_bytes() == before


def test_an_edit_that_does_not_match_stops_before_the_build(sdist: Path, kept: Path) -> None:
    root = sdist.parent / "tree" / "horovod-0.28.1"
    (root / "a.txt").write_text("another text")
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(root, arcname=root.name)
    code, output = finish(start(sdist, "work"))
    assert code == 1 and "edit named must match a.txt exactly once, but matches 0 times" in output
    assert wheels(kept) == [] and not (kept / "logs").exists()


def compilers(session: int) -> list[int]:
    """Processes of the test's back end that still run. The name is in the back end's own command line."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "compiler-of-test" in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


@pytest.fixture
def hanging(sdist: Path, kept: Path) -> Iterator[subprocess.Popen[str]]:
    child = start(sdist, "hang")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not any("hanging" in p.read_text() for p in kept.glob("logs/*.log")):
        time.sleep(0.05)
    while time.monotonic() < deadline and not compilers(child.pid):
        time.sleep(0.05)
    assert compilers(child.pid)
    yield child
    if child.poll() is None:
        child.kill()
    child.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_wheel_and_no_compiler(
    hanging: subprocess.Popen[str], sdist: Path, kept: Path, number: signal.Signals
) -> None:
    os.kill(hanging.pid, number)
    hanging.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while compilers(hanging.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert compilers(hanging.pid) == []
    assert wheels(kept) == [] and nothing_half(kept)
    code, output = finish(start(sdist, "work"))
    assert code == 0, output
    assert len(wheels(kept)) == 1 and list((kept / "work").iterdir()) == []


def test_two_builds_of_one_wheel_make_one(sdist: Path, kept: Path) -> None:
    children = [start(sdist, "work", name=f"{n}") for n in range(3)]
    results = [finish(child) for child in children]
    assert [code for code, _ in results] == [0, 0, 0], results
    assert len(wheels(kept)) == 1
    assert sum("wheel from the cache" in output for _, output in results) == 2


def test_a_lock_is_waited_for_and_dies_with_its_process(tmp_path: Path) -> None:
    path, waits = tmp_path / "locks" / "a", []
    hold = "import sys, time\nsys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\n"
    hold += "from hvdkit.horovod_build import cache\nwith cache.locked(Path(sys.argv[2])):\n"
    hold += " print('held', flush=True)\n time.sleep(600)"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(REPOSITORY), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"

    def waiting() -> None:
        waits.append(1)
        holder.kill()

    with cache.locked(path, waiting):
        assert waits == [1]
    holder.communicate()
    with cache.locked(path, waiting):
        assert waits == [1]


def test_what_killed_builds_left_is_swept_and_nothing_else(kept: Path) -> None:
    for name in ("left", "in-use"):
        (kept / "work" / name / "tree").mkdir(parents=True)
    (kept / "wheels" / "left").mkdir(parents=True)
    with cache.locked(cache.lock_file("in-use")):
        cache.sweep()
        assert [p.name for p in (kept / "work").iterdir()] == ["in-use"]
    cache.sweep()
    assert list((kept / "work").iterdir()) == []
    assert (kept / "wheels" / "left").is_dir()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot write to the cache"), cache.locked(tmp_path / "file" / "lock"):
        pass


def test_a_kept_sdist_with_a_wrong_hash_is_not_used(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source.sdist_path().parent.mkdir(parents=True)
    source.sdist_path().write_text("something else")
    asked = []

    def ask(argv: list[str], timeout_s: float) -> Answer:
        asked.append(argv)
        (Path(argv[argv.index("-d") + 1]) / source.SDIST).write_text("not Horovod either")
        return Answer(0, "")

    monkeypatch.setattr(source, "ask", ask)
    with pytest.raises(BuildError, match="expected 92a43f5a"):
        source.fetch(tmp_path / "work")
    (argv,) = asked
    assert "--require-hashes" in argv and "--no-build-isolation" in argv


def test_a_download_that_fails_shows_pips_error(kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "Looking in indexes: x\nERROR: No matching distribution found for horovod==0.28.1\n[notice] new pip"
    monkeypatch.setattr(source, "ask", lambda argv, timeout_s: Answer(1, said))
    with pytest.raises(BuildError, match="ERROR: No matching distribution found") as caught:
        source.fetch(tmp_path / "work")
    assert "notice" not in str(caught.value)
    assert str(source.sdist_path()) in str(caught.value)
