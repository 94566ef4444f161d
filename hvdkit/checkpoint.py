"""Checkpoints that survive a kill: written aside, synced, checksummed, renamed; the newest good one is found.

A checkpoint is two files: ``step-000000000042-1a2b3c4d.ckpt``, the payload as it was given (so the framework's own
loader opens it), and the same name with ``.json``, which holds step, size, SHA-256 and metric. The digest in the name
keeps a second save of one step from touching the first. The payload is renamed last, so where it stands, all stands.
``latest`` is a file with the newest name, for people and scripts; hvdkit itself looks at the checkpoints.
One process writes into a folder at a time (rank 0); any number may read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdkit.arguments import one_of, real, whole
from hvdkit.errors import CheckpointError, UsageError
from hvdkit.log import get_logger
from hvdkit.payload import pack, unpack

__all__ = ["CheckpointFolder", "CheckpointInfo", "pack", "unpack"]

_NAME = re.compile(r"step-\d{12,}-[0-9a-f]{8}\.ckpt")
_ASIDE = ".aside-"  # prefix of files being written; what a killed run left is removed by the next write
_log = get_logger("hvdkit.checkpoint")


@dataclass(frozen=True)
class CheckpointInfo:
    """What the ``.json`` file says: ``bytes`` and ``sha256`` of the payload, ``written`` in seconds since 1970."""

    step: int
    bytes: int
    sha256: str
    metric: float | None
    written: float


class CheckpointFolder:
    """A folder of checkpoints, of which the newest ``keep`` stay.

    Args:
        path: the folder; made by the first :meth:`write`.
        keep: how many of the newest to keep; None keeps all.
        best: ``"max"`` or ``"min"`` keeps the one with the best ``metric`` as well.

    Raises:
        UsageError: ``keep`` is not a whole number of at least 1, ``best`` is another word.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int | None = 3, best: str | None = None) -> None:
        self.path = Path(path)
        self.keep = None if keep is None else whole("keep", keep, 1)
        self.best_is = None if best is None else one_of("best", best, ("max", "min"))

    def write(self, step: int, payload: bytes, metric: float | None = None) -> Path:
        """Save ``payload`` as the checkpoint of ``step``; returns its path. Older ones beyond ``keep`` are removed.

        Raises:
            UsageError: ``step`` is not a whole number of at least 0, ``metric`` not finite, or ``payload`` not bytes.
            CheckpointError: the folder or the files cannot be written; what was there before is untouched.
        """
        step = whole("step", step)
        metric = None if metric is None else real("metric", metric)
        if not isinstance(payload, bytes):
            raise UsageError(f"a payload of type {type(payload).__name__} was given; bytes were expected (see pack).")
        digest = hashlib.sha256(payload).hexdigest()
        info = CheckpointInfo(step, len(payload), digest, metric, time.time())
        target = self.path / f"step-{step:012d}-{digest[:8]}.ckpt"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._remove_litter()
            aside = self._put_aside(target.name, payload)
            self._replace(_sidecar(target), json.dumps(asdict(info)).encode())
            aside.replace(target)
            _sync_folder(self.path)
            self._replace(self.path / "latest", f"{target.name}\n".encode())
            self._prune(target)
        except OSError as error:
            with contextlib.suppress(OSError):  # the error that matters is the one being reported
                self._remove_litter()
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.path}: {error}. "
                "Free space or choose another folder; earlier checkpoints are as they were."
            ) from error
        return target

    def read(self, path: str | os.PathLike[str]) -> bytes:
        """The payload of a checkpoint, proven by size and SHA-256.

        Raises:
            CheckpointError: a file is missing or broken, with what was found and what was expected.
        """
        path = Path(path)
        info = self.info(path)
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"the checkpoint {path} cannot be read: {error}.") from error
        _prove(path, info, len(payload), hashlib.sha256(payload).hexdigest())
        return payload

    def info(self, path: str | os.PathLike[str]) -> CheckpointInfo:
        """What was written beside a checkpoint.

        Raises:
            CheckpointError: it is missing or cannot be understood.
        """
        beside = _sidecar(Path(path))
        try:
            return CheckpointInfo(**json.loads(beside.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"the checkpoint {path} has no readable {beside.name} beside it: {error}.") from error

    def steps(self) -> list[tuple[int, Path]]:
        """All checkpoints, oldest first, unproven: by step, and for one step by time of writing."""
        try:
            names = [path for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"the checkpoint folder {self.path} cannot be listed: {error}.") from error
        found = [(int(path.name.split("-")[1]), path) for path in names]
        return sorted(found, key=lambda pair: (pair[0], _written_at(pair[1]), pair[1].name))

    def newest_good(self) -> tuple[int, Path] | None:
        """Step and path of the newest checkpoint whose checksum is right; None where there is none.

        Broken ones are passed over with a warning that says what is wrong with each.
        """
        for step, path in reversed(self.steps()):
            try:
                _prove(path, self.info(path), *_size_and_digest(path))
            except CheckpointError as error:
                _log.warning("passing over a broken checkpoint: %s", error)
            else:
                return step, path
        return None

    def best(self) -> tuple[int, Path] | None:
        """Step and path of the one with the best metric (the newest of equals); None without ``best`` or metrics."""
        rated = [(info.metric, pair) for pair, info in self._complete() if info.metric is not None]
        if self.best_is is None or not rated:
            return None
        sign = 1 if self.best_is == "max" else -1
        return max(enumerate(rated), key=lambda item: (sign * item[1][0], item[0]))[1][1]

    def _complete(self) -> Iterator[tuple[tuple[int, Path], CheckpointInfo]]:
        """Checkpoints that at least have their full size, oldest first."""
        for step, path in self.steps():
            with contextlib.suppress(CheckpointError, OSError):  # a broken one neither counts nor is best
                info = self.info(path)
                if path.stat().st_size == info.bytes:
                    yield (step, path), info

    def _put_aside(self, name: str, content: bytes) -> Path:
        aside = self.path / f"{_ASIDE}{name}"
        with aside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        return aside

    def _replace(self, target: Path, content: bytes) -> None:
        self._put_aside(target.name, content).replace(target)
        _sync_folder(self.path)

    def _remove_litter(self) -> None:
        """Files that a killed write left: those put aside, and descriptions whose payload never came."""
        for path in self.path.iterdir():
            lone = (
                path.suffix == ".json"
                and _NAME.fullmatch(path.stem + ".ckpt")
                and not path.with_suffix(".ckpt").exists()
            )
            if path.name.startswith(_ASIDE) or lone:
                path.unlink(missing_ok=True)

    def _prune(self, written: Path) -> None:
        """Remove what is older than the newest ``keep``, and earlier saves of the step just written.

        Steps above the one just written belong to a course of training that was given up; they are not ours to judge.
        """
        step_now = int(written.name.split("-")[1])
        older = [(step, path) for step, path in self.steps() if step <= step_now and path != written]
        if self.keep is None:
            return
        complete = [path for (step, path), _ in self._complete() if step < step_now]
        kept = {written, *complete[len(complete) - (self.keep - 1) :]}
        best = self.best()
        for _, path in older:
            if path not in kept and (best is None or path != best[1]):
                path.unlink(missing_ok=True)  # the payload first: without it the rest is litter
                _sidecar(path).unlink(missing_ok=True)


def _written_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # removed by the writer since the folder was listed; reading it will say so
        return 0


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".json")


def _size_and_digest(path: Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as stream:
            while block := stream.read(2**20):
                digest.update(block)
                size += len(block)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}.") from error
    return size, digest.hexdigest()


def _prove(path: Path, info: CheckpointInfo, size: int, digest: str) -> None:
    if size != info.bytes:
        raise CheckpointError(f"the checkpoint {path} has {size} bytes, but {info.bytes} were written: it was cut off.")
    if digest != info.sha256:
        raise CheckpointError(
            f"the checkpoint {path} has SHA-256 {digest}, but {info.sha256} was written: it was changed."
        )


def _sync_folder(path: Path) -> None:
    """Make a rename durable: without it a power failure can bring the old folder back."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
