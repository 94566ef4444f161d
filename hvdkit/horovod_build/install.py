"""Puts a wheel into this environment, and puts the former state back where it does not work."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from email.parser import Parser
from importlib import metadata
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.horovod_build.stamp import PROOF_FILE, Stamp


def pip(*words: str) -> None:
    """Run pip in this environment, to its end even on Ctrl-C: half an installation is worse than a late stop."""
    argv = [sys.executable, "-m", "pip", *words]
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate()
    except KeyboardInterrupt:
        child.communicate()
        raise
    if child.returncode != 0:
        tail = "\n".join(f"  {line}" for line in output.strip().splitlines()[-8:])
        raise BuildError(f"pip {' '.join(words)} failed (exit code {child.returncode}):\n{tail}")


def missing_requirements(wheel: Path) -> list[str]:
    """What the wheel needs at run time (extras left out) and this environment does not have in a fitting version."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return missing_of(Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or [])


def missing_of(needed: Iterable[str]) -> list[str]:
    """Those of some requirements (with their markers) that this environment does not meet."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging"]
    missing = []
    for text in needed:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            if requirement.specifier.contains(metadata.version(requirement.name), prereleases=True):
                continue
        except metadata.PackageNotFoundError:
            pass
        missing.append(f"{requirement.name}{requirement.specifier}")
    return missing


def installed_files() -> list[Path]:
    """Files of the installed Horovod, all of them there."""
    importlib.invalidate_caches()
    try:
        files = metadata.distribution("horovod").files or []
    except metadata.PackageNotFoundError:
        return []
    paths = {Path(str(file.locate())).resolve() for file in files}
    return sorted(path for path in paths if path.is_file())


def is_whole() -> bool:
    """Whether every file that the installed Horovod recorded is there with its recorded size."""
    try:
        files = metadata.distribution("horovod").files or []
    except metadata.PackageNotFoundError:
        return False
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix != ".pyc" and not (path.is_file() and file.size in (None, path.stat().st_size)):
            return False
    return bool(files)


class FormerState:
    """What the environment held before: Horovod's files, kept aside in ``folder``, and the packages added since."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.added = folder, list[str]()
        self._files = installed_files()
        for number, path in enumerate(self._files):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, folder / str(number))

    def restore(self) -> None:
        """Put it back: what is installed now goes, the kept files return, the added packages go.

        Impatient Ctrl-Cs are not heard until it is done.
        """
        heard = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._restore()
        finally:
            for number, handler in heard.items():
                signal.signal(number, handler)

    def _restore(self) -> None:
        if installed_files():
            pip("uninstall", "--yes", "horovod")
        for number, path in enumerate(self._files):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._folder / str(number), path)
        if self.added:
            pip("uninstall", "--yes", *self.added)


def install(wheel: Path, aside: Path, prove: Callable[[], None]) -> list[str]:
    """Install ``wheel`` and what it needs, then call ``prove``. Whatever goes wrong, the former state comes back.

    ``aside`` is an empty folder for the former files. Returns the requirements that were added.
    """
    former = FormerState(aside)
    needed = missing_requirements(wheel)
    try:
        if needed:
            before = _distributions()
            try:
                pip("install", *needed)
            finally:
                former.added = sorted(_distributions() - before)
        pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
        prove()
    except BaseException:
        former.restore()
        raise
    return needed


def _distributions() -> set[str]:
    importlib.invalidate_caches()
    return {name for d in metadata.distributions() if (name := d.metadata["Name"])}


def mark_proven(stamp: Stamp) -> None:
    """Note beside the installed package that it was proven, and list the note in RECORD so that pip removes it too."""
    importlib.invalidate_caches()
    distribution = metadata.distribution("horovod")
    record = next(f for f in distribution.files or [] if f.name == "RECORD" and f.parent.suffix == ".dist-info")
    path = Path(str(record.locate()))
    proof = {"key": stamp.key, "frameworks": list(stamp.frameworks), "controllers": list(stamp.controllers)}
    proof["when"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    lines = path.read_text().splitlines()
    entry = f"{path.parent.name}/{PROOF_FILE},,"
    half = path.with_name("RECORD.half")
    half.write_text("\n".join([*(line for line in lines if line != entry), entry]) + "\n")
    half.replace(path)
    path.with_name(PROOF_FILE).write_text(json.dumps(proof) + "\n")
