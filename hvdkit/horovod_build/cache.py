"""Where finished wheels lie, and the locks that let several builds run at once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdkit.errors import BuildError


def root() -> Path:
    """``$XDG_CACHE_HOME/hvdkit/horovod``, or the same under ``~/.cache``."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "hvdkit" / "horovod"


def wheel_folder(key: str) -> Path:
    """Folder of a finished wheel; it exists only when the wheel in it is whole."""
    return root() / "wheels" / key


def cached_wheel(key: str) -> Path | None:
    """The finished wheel for ``key``."""
    return next(iter(sorted(wheel_folder(key).glob("*.whl"))), None)


def log_file(key: str) -> Path:
    """Full log of the last build for ``key``."""
    return root() / "logs" / f"{key}.log"


def environment_lock() -> Path:
    """Lock file of this Python environment: one installation at a time."""
    return lock_file(f"env-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]}")


def lock_file(name: str) -> Path:
    """Lock file of a key or of an environment; the work folder of the same name belongs to its holder."""
    return root() / "locks" / name


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock. It belongs to the process, so a killed one leaves none behind.

    Calls ``waiting`` once where somebody else holds it. Raises ``BuildError`` where the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BuildError(f"cannot write to the cache {path.parent}: {error}\n  fix: set XDG_CACHE_HOME") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def work_folder(key: str) -> Iterator[Path]:
    """An empty folder for one build, gone afterwards. Hold the key's lock: what a killed build left here is removed."""
    folder = root() / "work" / key
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove the work folders that killed processes left: those whose lock nobody holds."""
    for folder in (root() / "work").glob("*"):
        try:
            with locked(lock_file(folder.name), _give_up):
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue


def _give_up() -> None:
    raise BlockingIOError


def publish(folder: Path, key: str) -> None:
    """Move a finished folder into the cache in one step, replacing what was there."""
    target = wheel_folder(key)
    target.parent.mkdir(parents=True, exist_ok=True)
    discard(key)
    folder.rename(target)


def discard(key: str) -> None:
    """Take a wheel out of the cache, in one step as well."""
    target = wheel_folder(key)
    if target.exists():
        trash = root() / "work" / f"{key}.old-{os.getpid()}"
        trash.parent.mkdir(parents=True, exist_ok=True)
        target.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)
