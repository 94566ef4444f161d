"""Exchanges of plain Python values and of whole tensors, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]  # Horovod depends on it
import horovod.torch as _hvd
import numpy as np
import torch
from horovod.torch.mpi_ops import global_process_set

from hvdkit.errors import HvdkitError

T = TypeVar("T")
_CHUNK_BYTES = 64 * 2**20  # one broadcast of this size is at full bandwidth and costs little memory


def gather_objects(value: T, *, process_set: Any = global_process_set) -> list[T]:
    """Every rank's ``value``, in rank order, on every rank. Values may differ in type and length.

    Meant for trusted peers of one job: values travel pickled.
    """
    data = torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8)
    lengths = _hvd.allgather(torch.tensor([data.numel()]), name="hvdkit.gather.lengths", process_set=process_set)
    joined = _hvd.allgather(data, name="hvdkit.gather.bytes", process_set=process_set)
    return [cloudpickle.loads(part.numpy().tobytes()) for part in joined.split(lengths.tolist())]


def gather_digests(digest: bytes, name: str, *, process_set: Any = global_process_set) -> list[bytes]:
    """Every rank's ``digest`` (of equal length), in rank order: the one small exchange that a check costs."""
    row = torch.frombuffer(bytearray(digest), dtype=torch.uint8).unsqueeze(0)
    rows = _hvd.allgather(row, name=f"hvdkit.digest.{name}", process_set=process_set)
    return [bytes(r) for r in rows.numpy()]


def broadcast_bytes(data: bytes, root_rank: int = 0) -> bytes:
    """``data`` of ``root_rank`` on every rank; what the others give is ignored."""
    length = _hvd.broadcast(torch.tensor([len(data)]), root_rank, name="hvdkit.bytes.length")
    buffer = torch.empty(int(length.item()), dtype=torch.uint8)
    if _hvd.rank() == root_rank:
        buffer.copy_(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))
    broadcast_tensors([buffer], root_rank)
    return buffer.numpy().tobytes()


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor], root_rank: int = 0, *, process_set: Any = global_process_set
) -> None:
    """Overwrite ``tensors`` in place with those of ``root_rank``, bit for bit, any dtype and memory layout.

    The list must have the same shapes and dtypes everywhere. They travel as bytes, many at a time: types that
    Horovod cannot send (bfloat16, complex, ...) and tensors that are not contiguous need no case of their own.
    """
    for number, chunk in enumerate(_chunks(tensors)):
        packed = torch.cat([_as_bytes(t) for t in chunk])
        _hvd.broadcast_(packed, root_rank, f"hvdkit.broadcast.{number}", process_set=process_set)
        if _hvd.rank() != root_rank:
            for tensor, part in zip(chunk, torch.split(packed, [t.nbytes for t in chunk]), strict=True):
                # A split part need not be aligned for its dtype, so it is copied before the view.
                tensor.detach().copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))


def on_rank0(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 only and give its result to all; an hvdkit error there is raised on all.

    The result must be made of plain values. Every rank must call this.
    """
    outcome: Any = None
    if _hvd.rank() == 0:
        try:
            outcome = (action(), None)
        except (HvdkitError, OSError) as error:
            outcome = (None, error)
    outcome = _hvd.broadcast_object(outcome, 0, name="hvdkit.on_rank0")
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    """Non-empty tensors in groups of one device and about 64 MiB."""
    chunk: list[torch.Tensor] = []
    total = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        if chunk and (total + tensor.nbytes > _CHUNK_BYTES or tensor.device != chunk[0].device):
            yield chunk
            chunk, total = [], 0
        chunk.append(tensor)
        total += tensor.nbytes
    if chunk:
        yield chunk
