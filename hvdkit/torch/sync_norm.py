"""``SyncBatchNorm`` on every device: batch normalisation by the statistics of the global batch."""

from __future__ import annotations

import itertools
from typing import Any

import horovod.torch as _hvd
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdkit.torch.batch import current

_numbers = itertools.count()  # layers are made in the same order on every rank


class SyncBatchNorm(_hvd.SyncBatchNorm):  # type: ignore[misc]
    """Horovod's layer of this name, which takes GPU tensors only, for CPU tensors as well.

    On the CPU mean and variance are those of all samples of the global batch, each counted once whatever the sizes of
    the ranks' parts; fillers of an hvdkit loader do not count. All ranks must call it in training, with equal shapes
    but for the number of samples. The moving statistics stay equal on all ranks.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._name = f"hvdkit.norm.{next(_numbers)}"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shape ``[samples, features, ...]`` in and out; statistics over all dimensions but the features."""
        if input.is_cuda:
            return super().forward(input)  # type: ignore[no-any-return]
        self._check_input_dim(input)
        if _hvd.size() == 1 or not (self.training or self.running_mean is None):
            return _BatchNorm.forward(self, input)
        return self._over_ranks(input)

    def _over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        batch = current()
        weight = 1.0 if batch is None else batch.weight
        others = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        count = x.new_tensor([x.numel() // x.shape[1]])
        packed = _global_sum(torch.cat([x.sum(others), count]), weight, f"{self._name}.mean")
        total = packed[-1].detach()
        mean = packed[:-1] / total
        centered = x - mean.reshape(shape)
        variance = _global_sum(centered.pow(2).sum(others), weight, f"{self._name}.variance") / total
        self._track(mean.detach(), variance.detach() * total / (total - 1).clamp(min=1))
        scaled = centered * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.weight is not None:
            scaled = scaled * self.weight.reshape(shape) + self.bias.reshape(shape)
        return scaled

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, unbiased_variance: torch.Tensor) -> None:
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            part = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean, part)
            self.running_var.lerp_(unbiased_variance, part)


def _global_sum(local: torch.Tensor, weight: float, name: str) -> torch.Tensor:
    result: torch.Tensor = _GlobalSum.apply(local, weight, name)  # type: ignore[no-untyped-call]
    return result


class _GlobalSum(torch.autograd.Function):
    """The sum over ranks, differentiable for the loss of the global batch.

    That loss is the mean of the ranks' losses by their weights. The optimizer multiplies what this rank hands back by
    this rank's weight, but a sum's gradient comes from all ranks: each one is weighed first, and the result unweighed.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, weight: float, name: str) -> torch.Tensor:
        ctx.weight, ctx.name = weight, name
        # A filler's rank has weight 0 and takes part without adding to the sum.
        mine = local if weight else torch.zeros_like(local)
        result: torch.Tensor = _hvd.allreduce(mine.contiguous(), op=_hvd.Sum, name=name)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = gradients[0]
        weighed = gradient * ctx.weight if ctx.weight else torch.zeros_like(gradient)
        total = _hvd.allreduce(weighed.contiguous(), op=_hvd.Sum, name=f"{ctx.name}.gradient")
        return (total / ctx.weight if ctx.weight else torch.zeros_like(gradient)), None, None
