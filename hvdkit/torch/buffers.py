"""Buffers, such as the moving statistics of batch normalisation, are local to each rank until they are averaged."""

from __future__ import annotations

from typing import Any

import horovod.torch as _hvd
import torch
from horovod.torch.mpi_ops import global_process_set

from hvdkit.torch.collectives import broadcast_tensors, gather_digests
from hvdkit.torch.sync import require_equal, tensor_digest, tensor_facts


@torch.no_grad()
def average_buffers(model: torch.nn.Module, *, process_set: Any = global_process_set) -> None:
    """Make buffers equal on all ranks: before evaluation and before saving. All ranks must call this.

    The rule: floating-point buffers become the mean over ranks, computed in float64; others (counters, masks) those of
    the first rank. Buffers that are equal already keep their bits.
    """
    if process_set.size() == 1:
        return
    named = list(model.named_buffers())
    require_equal(tensor_facts(named), "average_buffers", process_set=process_set)
    if not named:
        return
    rows = gather_digests(b"".join(tensor_digest(b) for _, b in named), "buffers", process_set=process_set)
    differing = [b for i, (_, b) in enumerate(named) if len({row[16 * i : 16 * i + 16] for row in rows}) > 1]
    floating = [b for b in differing if b.is_floating_point()]
    if floating:
        packed = torch.cat([b.detach().double().reshape(-1) for b in floating])
        mean = _hvd.allreduce(packed, name="hvdkit.buffers", op=_hvd.Average, process_set=process_set)
        for buffer, part in zip(floating, mean.split([b.numel() for b in floating]), strict=True):
            buffer.copy_(part.reshape(buffer.shape))
    root = 0 if process_set.ranks is None else process_set.ranks[0]
    broadcast_tensors([b for b in differing if not b.is_floating_point()], root, process_set=process_set)
