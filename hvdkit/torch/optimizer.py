"""``DistributedOptimizer``: the optimizer that was passed in, now stepping on the gradient of the global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import horovod.torch as _hvd
import torch
from horovod.torch.mpi_ops import global_process_set

from hvdkit.arguments import whole
from hvdkit.errors import UsageError
from hvdkit.torch.adasum import adasum_step, check_adasum
from hvdkit.torch.collectives import broadcast_tensors
from hvdkit.torch.distribution import Distribution
from hvdkit.torch.initial_state import broadcast_model, broadcast_optimizer_state
from hvdkit.torch.rates import RateScaling
from hvdkit.torch.reduction import ReduceOptions
from hvdkit.torch.sync import require_equal, tensor_facts


def DistributedOptimizer(  # noqa: N802  Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = _hvd.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = _hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
    *,
    model: torch.nn.Module | None = None,
    lr_scale: str = "none",
    base_batch: int | None = None,
    global_batch: int | None = None,
    loader: Any = None,
    weighted: bool = True,
    check_every: int = 100,
) -> Any:
    """Make ``optimizer`` step on the gradient of the global batch, and return it.

    It is the same object: its state, its class and the schedulers made for it stay. After ``loss.backward()`` (after
    the last of ``backward_passes_per_step``) gradients are reduced, so clipping, GradScaler and closures need nothing
    special; ``synchronize()`` and ``skip_synchronize()`` work as in Horovod. With one process it is plain torch.

    Args:
        optimizer ... process_set: as in ``horovod.torch.DistributedOptimizer``. With accumulation, gradients of the
            passes are added up as torch does: divide the loss by the number of passes for their mean. A window that
            ends early is reduced by ``step()``.
        model: rank 0's weights, buffers and optimizer state are given to all ranks, bit for bit; names for messages.
        lr_scale: ``"none"``, ``"linear"`` or ``"sqrt"``: how the rates follow the global batch; applied once.
        base_batch: the global batch that the optimizer's rates were chosen for; needed by the rules.
        global_batch: samples per backward pass over all ranks, where no hvdkit loader says so.
        loader: the hvdkit loader that feeds this optimizer; default: the one that handed out a batch last.
        weighted: count each rank's gradient by its samples in the batch (exact for a short last batch).
        check_every: compare a quick digest of the weights over ranks every so many steps; 0 for never.

    Raises:
        UsageError: an argument is out of range, or the optimizer is wrapped already.
        OutOfSyncError: ranks differ in parameters, optimizer or settings; on every rank, before anything is reduced.
    """
    _check_kind(optimizer)
    passes = whole("backward_passes_per_step", backward_passes_per_step, 1)
    if gradient_predivide_factor != 1.0 and op != _hvd.Average:
        raise UsageError("gradient_predivide_factor was given with an op other than Average, which ignores it.")
    options = ReduceOptions(
        compression, passes, op, gradient_predivide_factor, groups or num_groups or None, sparse_as_dense, process_set
    )
    check_adasum(options)
    part = Distribution(
        optimizer, named_parameters, model, options, whole("check_every", check_every), loader, weighted
    )
    part.rates = RateScaling(optimizer, lr_scale, base_batch, passes)
    part.check_signature()
    if model is not None and options.active:
        broadcast_model(model, process_set=process_set)
        broadcast_optimizer_state(optimizer, part.root, process_set=process_set)
    _become_distributed(optimizer, part)
    part.discover(optimizer)
    known = global_batch or (loader.global_batch if loader is not None else None)
    if known is not None:
        part.rates.resolve(whole("global_batch", known, 1))
    return optimizer


class Distributed(torch.optim.Optimizer):
    """What a distributed optimizer's class has in front of the class it was made with."""

    _distribution: Distribution

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Reduce what has not been reduced yet, then the optimizer's own step."""
        part = self._distribution
        self._opt_called = True  # what schedulers look at
        if closure is None:
            part.before_step(self)
            if part.is_adasum:
                result = adasum_step(self, super().step, part.options, part.batch())
            else:
                result = super().step(**options)
        else:
            if part.is_adasum:
                raise UsageError("a closure was given with op=Adasum, which reduces steps and not gradients.")
            result = super().step(self._with_reduction(closure), **options)
        part.after_step(self)
        return result

    # Both marks tell torch that hooks and the call count are taken care of, so it leaves this method as it is.
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Gradients that were not reduced, such as a dropped accumulation window, are forgotten."""
        self._distribution.discover(self)
        self._distribution.reducer.discard()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Wait until gradients are reduced. All ranks must call it; needed only for gradients set by hand."""
        if self._distribution.reduces:
            self._distribution.reducer.finish()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step()`` takes the gradients as they are."""
        self._distribution.synchronizes = False
        try:
            yield
        finally:
            self._distribution.synchronizes = True

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes before gradients are reduced."""
        return self._distribution.options.backward_passes_per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes before gradients are reduced; the same on all ranks."""
        part = self._distribution
        part.options = part.reducer.set_passes(whole("backward_passes_per_step", passes, 1))

    @property
    def process_set(self) -> Any:
        """The ranks that gradients are reduced over."""
        return self._distribution.options.process_set

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the new parameters are reduced too, and start from rank 0's values if ``model`` was given."""
        super().add_param_group(param_group)
        part = self.__dict__.get("_distribution")
        if part is None:
            return
        new = part.discover(self)
        if part.options.active and part.model is not None:
            facts = tensor_facts((part.name_of(p), p) for p in new)
            require_equal(facts, "the added parameter group", process_set=part.options.process_set)
            broadcast_tensors(new, part.root, process_set=part.options.process_set)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; rates that were scaled for another global batch are brought to this one."""
        super().load_state_dict(state_dict)
        self._distribution.rates.reapply()

    def __getstate__(self) -> dict[str, Any]:
        # torch's own state only: hooks and handles belong to this process
        return super().__getstate__()

    def _with_reduction(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        part = self._distribution

        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure()
            part.before_step(self)
            return part.mean_over_ranks(loss) if part.reduces else loss

        return reduced


def _become_distributed(optimizer: torch.optim.Optimizer, part: Distribution) -> None:
    """Put :class:`Distributed` in front of the object's class, and remove what a scheduler put on the object."""
    patched = optimizer.__dict__.get("step")
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        raise UsageError("optimizer.step was replaced on this object; call DistributedOptimizer before replacing it.")
    optimizer.__dict__.pop("step", None)
    kind = type(optimizer)
    optimizer.__class__ = type(
        kind.__name__, (Distributed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )
    optimizer._distribution = part  # type: ignore[attr-defined]


def _check_kind(optimizer: Any) -> None:
    if isinstance(optimizer, Distributed):
        raise UsageError("this optimizer is distributed already; DistributedOptimizer is called once for it.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer={type(optimizer).__name__} was given; a torch.optim.Optimizer was expected.")
