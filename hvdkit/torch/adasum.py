"""Adasum: each rank takes its own step, and the steps, not the gradients, are combined by Horovod's Adasum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as _hvd
import torch

from hvdkit.errors import UsageError
from hvdkit.torch.batch import Batch
from hvdkit.torch.reduction import Portable, ReduceOptions


def check_adasum(options: ReduceOptions) -> None:
    """Refuse ``op=Adasum`` where Horovod cannot do it.

    Raises:
        UsageError: the number of ranks is not a power of two, a process set was given, or Horovod runs without MPI.
    """
    if options.op != _hvd.Adasum or not options.active:
        return
    if _hvd.size() & (_hvd.size() - 1) or options.process_set.size() != _hvd.size():
        raise UsageError(
            f"op=Adasum was given for {options.process_set.size()} of {_hvd.size()} ranks; it works on all ranks of a "
            "job whose number is a power of two. Use op=Average."
        )
    if not _hvd.mpi_enabled():
        raise UsageError("op=Adasum was given, but this job runs on Gloo, which lacks it: start it with mpirun.")


@torch.no_grad()
def adasum_step(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], options: ReduceOptions, batch: Batch | None
) -> Any:
    """Take ``step`` from this rank's gradient, then move every weight by the Adasum of all ranks' movements.

    S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924. Like Horovod, without
    process sets. A rank whose part of the batch is empty takes part with gradients of zero.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if batch is not None and batch.count == 0:
        for p in params:
            p.grad = None if p.grad is None else torch.zeros_like(p.grad)
    starts = [p.detach().clone() for p in params]
    result = step()
    compression = Portable(options.compression)
    handles = []
    for number, (p, start) in enumerate(zip(params, starts, strict=True)):
        moved, context = compression.compress(p.detach() - start)
        handles.append((_hvd.allreduce_async_(moved, op=_hvd.Adasum, name=f"hvdkit.adasum.{number}"), context))
    for p, start, (handle, context) in zip(params, starts, handles, strict=True):
        p.copy_(start + compression.decompress(_hvd.synchronize(handle), context))
    return result
