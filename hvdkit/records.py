"""Records with random access in files made for streaming: TFRecord files and webdataset-style tars.

Opening them reads the headers only and notes where each record lies. After that they are datasets with a length and an
index, so a :class:`~hvdkit.sharding.ShardPlan` over them is exact: one shuffle of all records, no matter how many files
there are, each record once per epoch, and a resume that reads nothing of what is skipped.
"""

from __future__ import annotations

import os
import struct
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvdkit.arguments import whole
from hvdkit.errors import UsageError
from hvdkit.files import list_files

_Spans = list[tuple[int, int]]  # (first byte, number of bytes)


class _IndexedFiles:
    """Files in sorted order. Each read opens its file: nothing is shared between loader workers or threads."""

    def __init__(self, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        self.files = list_files(files)

    def _read(self, file: int, first: int, size: int) -> bytes:
        with Path(self.files[file]).open("rb") as stream:
            stream.seek(first)
            content = stream.read(size)
        if len(content) != size:
            raise UsageError(f"{self.files[file]} ends before byte {first + size}: it changed since it was indexed.")
        return content


class TFRecordFiles(_IndexedFiles):
    """All records of some TFRecord files, by number: sorted files, then the order within each.

    ``files[i]`` is the payload as bytes, usually a serialized ``tf.train.Example``. The checksums inside the format are
    not compared; cut-off files are found.

    Args:
        files: paths and glob patterns of uncompressed TFRecord files.

    Raises:
        UsageError: no such file, or one that is cut off or not a TFRecord file.
    """

    def __init__(self, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        super().__init__(files)
        spans = [np.array(_tfrecord_spans(path), np.int64).reshape(-1, 2) for path in self.files]
        self._spans: npt.NDArray[np.int64] = np.concatenate([np.empty((0, 2), np.int64), *spans])
        self._ends = np.cumsum([len(part) for part in spans])

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, number: int) -> bytes:
        number = whole("record", number, 0, len(self) - 1)
        file = int(np.searchsorted(self._ends, number, side="right"))
        first, size = self._spans[number].tolist()
        return self._read(file, first, size)

    def __iter__(self) -> Iterator[bytes]:
        return (self[number] for number in range(len(self)))


class TarFiles(_IndexedFiles):
    """All samples of some webdataset-style tars, by number: sorted files, then the order within each.

    Members that follow each other and have the same name up to the first dot of its last part are one sample:
    ``{"__key__": "train/0001", "jpg": b"…", "cls": b"3"}``.

    Args:
        files: paths and glob patterns of uncompressed tars.

    Raises:
        UsageError: no such file, one that is compressed or no tar, a sample with two members of one kind.
    """

    def __init__(self, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        super().__init__(files)
        self._samples = [sample for number, path in enumerate(self.files) for sample in _tar_samples(number, path)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> dict[str, str | bytes]:
        file, key, members = self._samples[whole("sample", number, 0, len(self) - 1)]
        return {"__key__": key, **{kind: self._read(file, *span) for kind, span in members.items()}}

    def __iter__(self) -> Iterator[dict[str, str | bytes]]:
        return (self[number] for number in range(len(self)))


def _tfrecord_spans(path: str) -> _Spans:
    """Where the payloads lie. A record is: length (uint64), its CRC (4 bytes), payload, its CRC (4 bytes)."""
    spans, place, end = _Spans(), 0, Path(path).stat().st_size
    with Path(path).open("rb") as stream:
        while place < end:
            stream.seek(place)
            header = stream.read(12)
            size = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else end
            if place + 16 + size > end:
                raise UsageError(
                    f"{path} is cut off, compressed or no TFRecord file: the record at byte {place} passes its end."
                )
            spans.append((place + 12, size))
            place += 16 + size
    return spans


def _tar_samples(number: int, path: str) -> list[tuple[int, str, dict[str, tuple[int, int]]]]:
    samples: list[tuple[int, str, dict[str, tuple[int, int]]]] = []
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, _, kind = name.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if not member.isfile() or not kind or not stem:
                    continue  # folders, links, and names without an extension are no part of a sample
                if not samples or samples[-1][1] != key:
                    samples.append((number, key, {}))
                if kind in samples[-1][2]:
                    raise UsageError(
                        f"{path} has {member.name!r} twice in a row; one member of each kind was expected."
                    )
                samples[-1][2][kind] = (member.offset_data, member.size)
    except tarfile.TarError as error:
        raise UsageError(
            f"{path} cannot be read as an uncompressed tar ({error}); unpack it with gunzip or the like."
        ) from error
    return samples
