"""Builds the wheel: source, edits, compiler, stamp, cache. The environment is not touched here."""

from __future__ import annotations

import base64
import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

import hvdkit
from hvdkit.errors import BuildError
from hvdkit.horovod_build import cache, diagnose, edits, gpu, probe, source
from hvdkit.horovod_build.process import stream
from hvdkit.horovod_build.progress import Progress, percent_of
from hvdkit.horovod_build.recipe import Plan
from hvdkit.horovod_build.stamp import STAMP_FILE, Stamp

# Runs setuptools' own build back end, as pip would without isolation. Its standard input closes when hvdkit dies,
# even by SIGKILL; then the whole session, compilers included, ends too.
DRIVER = """
import os, sys, threading
watched = os.dup(0)
os.set_inheritable(watched, False)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
def watch():
    if not os.read(watched, 1):
        os.killpg(0, 9)
threading.Thread(target=watch, daemon=True).start()
from setuptools import build_meta
build_meta.__legacy__.build_wheel(sys.argv[1])
"""


def obtain(plan: Plan, folder: Path, progress: Progress, *, force: bool) -> Path:
    """A copy in ``folder`` of the wheel for ``plan``, from the cache or built now.

    Safe to call from several processes at once; the copy is nobody else's.
    """
    with cache.locked(
        cache.lock_file(plan.key), lambda: progress.phase("another process builds the same wheel; waiting for it")
    ):
        found = plan.wheel
        if found is not None and not force:
            progress.phase(f"wheel from the cache: {found}")
        else:
            with cache.work_folder(plan.key) as work:
                _build(plan, work, progress)
            found = plan.wheel
        assert found is not None
        return Path(shutil.copy2(found, folder))


def _build(plan: Plan, work: Path, progress: Progress) -> None:
    progress.phase("fetching the source")
    root = source.unpack(source.fetch(work), work)
    edits.apply(root, plan.edits)
    finished = work / "finished"
    finished.mkdir()
    compile_wheel(plan, root, finished, progress)
    built = next(iter(finished.glob("*.whl")), None)
    if built is None:
        raise BuildError(f"the build ended well but left no wheel; log: {cache.log_file(plan.key)}")
    add_file(built, f"horovod/{STAMP_FILE}", make_stamp(plan).to_json())
    cache.publish(finished, plan.key)


def compile_wheel(plan: Plan, root: Path, target: Path, progress: Progress) -> None:
    """Run the build in ``root``; the wheel goes to ``target``. Raises ``BuildError`` with the first real error."""
    log = cache.log_file(plan.key)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = plan.environment()
    if "HOROVOD_NCCL_HOME" in environment:
        home = Path(environment["HOROVOD_NCCL_HOME"])
        environment["HOROVOD_NCCL_HOME"] = str(gpu.link_nccl(home, root.parent / "nccl"))
    progress.phase("configuring")
    with log.open("w", buffering=1) as file:
        compiling = False

        def on_line(line: str) -> None:
            nonlocal compiling
            file.write(line + "\n")
            done = percent_of(line)
            if done is not None:
                if not compiling:
                    progress.phase(f"compiling with {plan.jobs} job{'s' if plan.jobs > 1 else ''}")
                    compiling = True
                progress.percent(done)

        code = stream([sys.executable, "-c", DRIVER, str(target)], env=environment, cwd=root, on_line=on_line)
    if code != 0:
        raise build_failure(log, code)


def build_failure(log: Path, code: int) -> BuildError:
    """The error of a failed build: the first real error in its log, what to do about it, and where the log is."""
    error = diagnose.first_error(log.read_text(errors="replace").splitlines())
    advice = diagnose.hint(error)
    lines = [f"building Horovod failed (exit code {code}); the environment is as it was. First error:"]
    lines += [f"  {line}" for line in error]
    lines += [f"  fix: {advice}"] if advice else []
    return BuildError("\n".join([*lines, f"  full log: {log}"]))


def make_stamp(plan: Plan) -> Stamp:
    """What the wheel was built against."""
    f = plan.facts
    assert f.compiler and f.cmake
    platform = probe.platform_facts()
    left_out = [e.name for e in plan.edits if e.name == "tensorflow-without-xla"] + ([] if f.mpi else ["mpi"])
    return Stamp(
        horovod=edits.HOROVOD_VERSION,
        key=plan.key,
        **platform,
        frameworks={x.name: x.version for x in f.frameworks},
        compiler=f.compiler.version,
        cmake=f.cmake.version,
        mpi_family=f.mpi.family if f.mpi else "",
        mpi_version=f.mpi.version if f.mpi else "",
        mpicxx=str(f.mpi.mpicxx) if f.mpi else "",
        gpu=f.gpu.mode,
        controllers=plan.controllers,
        edits=tuple(edit.name for edit in plan.edits),
        left_out=tuple(left_out),
        recipe=edits.digest(edits.EDITS),
        hvdkit=hvdkit.__version__,
    )


def read_stamp(wheel: Path) -> Stamp:
    """The stamp in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Stamp.from_json(archive.read(f"horovod/{STAMP_FILE}").decode())


def add_file(wheel: Path, name: str, text: str) -> None:
    """Add one file to a wheel, RECORD included. The wheel is written anew beside itself and then replaced."""
    data = text.encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    half = wheel.with_suffix(".half")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(half, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            content = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                new.writestr(name, data)
                content += f"{name},sha256={digest},{len(data)}\n".encode()
            new.writestr(item, content, zipfile.ZIP_DEFLATED)
    half.replace(wheel)
