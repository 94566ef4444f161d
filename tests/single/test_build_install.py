"""Installing into a real environment, and the former state that comes back when the proof fails.

One small environment serves all; the wheels are made by hand and are called horovod.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import packaging
import pytest

from hvdkit.horovod_build import install, stamp

REPOSITORY = Path(install.__file__).parents[2]

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from hvdkit.errors import BuildError
from hvdkit.horovod_build import install, stamp
from hvdkit.horovod_build.stamp import Stamp
def prove():
    import importlib.metadata
    if sys.argv[3] == "fails":
        raise BuildError("the sum is 2")
    if sys.argv[3] == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    install.mark_proven(Stamp.from_json(Path(sys.argv[4]).read_text()))
try:
    print("ADDED", install.install(Path(sys.argv[1]), Path(sys.argv[2]), prove))
except BuildError as error:
    sys.exit(f"FAILED {error}")
"""


class Environment:
    """A virtual environment with pip and nothing else; the packages that hvdkit needs are lent by PYTHONPATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        lent = folder / "lent"
        lent.mkdir()
        for module in (packaging, click):
            source = Path(str(module.__file__)).parent
            (lent / source.name).symlink_to(source)
        path = os.pathsep.join([str(REPOSITORY), str(lent)])
        self.variables = {
            **os.environ,
            "PYTHONPATH": path,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(folder / "links"),
        }
        (folder / "links").mkdir()
        (self.site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
        self.pristine: set[str] = set()
        self.pristine = set(self.files())

    def run(self, *argv: object) -> subprocess.CompletedProcess[str]:
        words = [str(self.python), *map(str, argv)]
        return subprocess.run(words, env=self.variables, capture_output=True, text=True, timeout=120)

    def pip(self, *words: object) -> None:
        done = self.run("-m", "pip", *words)
        assert done.returncode == 0, done.stdout + done.stderr

    def files(self) -> dict[str, bytes]:
        """Everything that has been added to site-packages, compiled copies left out."""
        found = [p for p in self.site.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        files = {str(p.relative_to(self.site)): p.read_bytes() for p in found}
        return {name: content for name, content in files.items() if name not in self.pristine}

    def clear(self) -> None:
        for name in {Path(file).parts[0] for file in self.files()}:
            shutil.rmtree(self.site / name)


def make_wheel(folder: Path, content: str, name: str = "horovod", version: str = "0.28.1", needs: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    files = {
        f"{name}/__init__.py": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"]))
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def environment(shared: Environment) -> Iterator[Environment]:
    yield shared
    shared.clear()


def do_install(environment: Environment, wheel: Path, tmp_path: Path, mode: str) -> subprocess.CompletedProcess[str]:
    text = stamp.Stamp(
        *["0.28.1", "the-key", "", "", "", "", {"torch": "1"}, "", "", "", "", "", "none", ("gloo",), ("a",)]  # type: ignore[arg-type]
    ).to_json()
    (tmp_path / "stamp.json").write_text(text)
    return environment.run("-c", SCRIPT, wheel, tmp_path / "aside", mode, tmp_path / "stamp.json")


def test_a_proven_wheel_stays_and_its_proof_goes_with_it(environment: Environment, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "new", "new = 1\n")
    done = do_install(environment, wheel, tmp_path, "works")
    assert done.returncode == 0, done.stderr
    files = environment.files()
    assert files["horovod/__init__.py"] == b"new = 1\n"
    proof = json.loads(files["horovod-0.28.1.dist-info/hvdkit_proof.json"])
    assert (proof["key"], proof["controllers"]) == ("the-key", ["gloo"])
    environment.pip("uninstall", "-y", "horovod")
    assert environment.files() == {}


@pytest.mark.parametrize(("mode", "before"), [("fails", True), ("fails", False), ("interrupted", True)])
def test_the_former_state_comes_back(environment: Environment, tmp_path: Path, mode: str, before: bool) -> None:
    if before:
        environment.pip("install", make_wheel(tmp_path / "old", "old = 1\n", version="0.27.0"))
    state = environment.files()
    needed = make_wheel(environment.folder / "links", "", name="needed_for_test", version="2.0")
    wheel = make_wheel(tmp_path / "new", "new = 1\n", needs="needed_for_test>=1")
    done = do_install(environment, wheel, tmp_path, mode)
    needed.unlink()
    assert done.returncode != 0
    assert ("FAILED the sum is 2" if mode == "fails" else "KeyboardInterrupt") in done.stderr
    assert environment.files() == state


def test_a_dependency_that_cannot_be_had_leaves_the_environment_alone(environment: Environment, tmp_path: Path) -> None:
    environment.pip("install", make_wheel(tmp_path / "old", "old = 1\n"))
    state = environment.files()
    wheel = make_wheel(tmp_path / "new", "new = 1\n", needs="needed_for_test>=9")
    done = do_install(environment, wheel, tmp_path, "works")
    assert done.returncode == 1 and "needed_for_test>=9" in done.stderr
    assert environment.files() == state


def test_what_is_missing_is_installed(environment: Environment, tmp_path: Path) -> None:
    make_wheel(environment.folder / "links", "", name="needed_for_test", version="2.0")
    wheel = make_wheel(tmp_path / "new", "new = 1\n", needs="needed_for_test>=1")
    done = do_install(environment, wheel, tmp_path, "works")
    assert "ADDED ['needed_for_test>=1']" in done.stdout, done.stderr
    done = do_install(environment, wheel, tmp_path, "works")
    assert "ADDED []" in done.stdout, done.stderr


def test_markers_and_extras_are_left_out(tmp_path: Path) -> None:
    needs = "nothing_like_this; python_version < '3.0'\nRequires-Dist: nor_this; extra == 'spark'\nRequires-Dist: click"
    assert install.missing_requirements(make_wheel(tmp_path, "", needs=needs)) == []


@pytest.mark.parametrize("change", ["gone", "shorter"])
def test_a_damaged_installation_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    info = tmp_path / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "RECORD").write_text("horovod/__init__.py,sha256=x,6\nhorovod/__pycache__/a.pyc,,\n")
    (tmp_path / "horovod").mkdir()
    file = tmp_path / "horovod" / "__init__.py"
    file.write_text("a = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert install.is_whole()
    file.unlink() if change == "gone" else file.write_text("")
    assert not install.is_whole()
