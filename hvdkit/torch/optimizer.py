"""``DistributedOptimizer``: the optimizer that was passed in, now stepping on the gradient of the global batch."""

from __future__ import annotations

import contextlib
import itertools
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import horovod
import horovod.torch as _hvd
import torch
from horovod.torch.mpi_ops import global_process_set

import hvdkit
from hvdkit.arguments import whole
from hvdkit.errors import OutOfSyncError, UsageError
from hvdkit.torch import batch as _batch
from hvdkit.torch.adasum import adasum_step
from hvdkit.torch.broadcast import broadcast_model, broadcast_optimizer_state
from hvdkit.torch.collectives import broadcast_tensors, gather_digests
from hvdkit.torch.rates import RateScaling
from hvdkit.torch.reduction import ReduceOptions, Reducer
from hvdkit.torch.sync import check_in_sync, quick_digest, require_equal, tensor_facts

_numbers = itertools.count()  # optimizers are made in the same order on every rank, so their numbers agree


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
    passes = whole("backward_passes_per_step", backward_passes_per_step, 1)
    if gradient_predivide_factor != 1.0 and op != _hvd.Average:
        raise UsageError("gradient_predivide_factor was given with an op other than Average, which ignores it.")
    options = ReduceOptions(
        compression, passes, op, gradient_predivide_factor, groups or num_groups or None, sparse_as_dense, process_set
    )
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


class Distribution:
    """What makes one optimizer distributed: its reducer, the names of its parameters, its rates and its checks."""

    rates: RateScaling

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None,
        model: torch.nn.Module | None, options: ReduceOptions, check_every: int, loader: Any, weighted: bool,
    ) -> None:  # fmt: skip
        if isinstance(optimizer, Distributed):
            raise UsageError("this optimizer is distributed already; DistributedOptimizer is called once for it.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer={type(optimizer).__name__} was given; a torch.optim.Optimizer was expected.")
        self.options, self.model, self.check_every, self.loader = options, model, check_every, loader
        self.names = _names(optimizer, named, model)
        prefix = f"{number}." if (number := next(_numbers)) else ""
        self.reducer = Reducer(options, self.batch if weighted else _no_batch, prefix)
        self.prefix = prefix
        self.known: set[torch.Tensor] = set()
        self.class_name = type(optimizer).__name__
        self.steps = 0
        self.synchronizes = True
        self.is_adasum = options.active and options.op == _hvd.Adasum
        self.reduces = options.active and not self.is_adasum

    @property
    def root(self) -> int:
        """The rank whose weights count: the first of the process set."""
        ranks = self.options.process_set.ranks
        return 0 if ranks is None else int(ranks[0])

    def batch(self) -> _batch.Batch | None:
        """The batch that gradients come from now."""
        found = _batch.current() if self.loader is None else self.loader.batch
        # A loader for other ranks than this optimizer reduces over does not say how they weigh.
        fits = found is not None and len(found.counts) == self.options.process_set.size()
        return found if fits else None

    def name_of(self, parameter: torch.Tensor) -> str:
        """The parameter's name; those that came later are named by the model or numbered."""
        if parameter not in self.names and self.model is not None:
            self.names |= {p: n for n, p in self.model.named_parameters() if p not in self.names}
        return self.names.setdefault(parameter, f"added.{len(self.names)}")

    def check_signature(self) -> None:
        """Compare parameters, class, settings and versions over ranks.

        Raises:
            OutOfSyncError: with the first difference; on every rank.
        """
        if not self.options.active:
            return
        versions = {
            "hvdkit": hvdkit.__version__, "horovod": horovod.__version__, "torch": torch.__version__,
            "Python": ".".join(platform.python_version_tuple()[:2]),
        }  # fmt: skip
        o = self.options
        settings = {
            "optimizer class": self.class_name, "backward_passes_per_step": o.backward_passes_per_step, "op": o.op,
            "compression": getattr(o.compression, "__name__", o.compression.__class__.__name__),
            "gradient_predivide_factor": o.gradient_predivide_factor, "sparse_as_dense": o.sparse_as_dense,
            "lr_scale": self.rates.rule, "base_batch": self.rates.base_batch, "check_every": self.check_every,
        }  # fmt: skip
        facts = [(f"the version of {name}", version) for name, version in versions.items()]
        facts += [(name, str(value)) for name, value in settings.items()]
        facts += [(f"parameter {n!r}", v) for n, v in tensor_facts((n, p) for p, n in self.names.items())]
        require_equal(facts, "the training set-up", process_set=o.process_set)

    def discover(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Take over parameters that are new or were unfrozen since; returns them."""
        new = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p not in self.known
        ]
        if new:
            self.known.update(new)
            if self.reduces:
                self.reducer.add([(self.name_of(p), p) for p in new])
        return new

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale the rates once the batch is known, and reduce what has not been."""
        if self.rates.scaling is None:
            found = self.batch()
            if found is None:
                raise UsageError(
                    f"lr_scale={self.rates.rule!r} needs the global batch before the first step: feed the model from "
                    "hvdkit's DataLoader, or give DistributedOptimizer loader= or global_batch=."
                )
            self.rates.resolve(found.global_batch)
        self.discover(optimizer)
        if self.reduces and self.synchronizes:
            self.reducer.finish()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the step's gradients, and now and then compare the weights."""
        self.reducer.discard()
        self.steps += 1
        if self.options.active and self.check_every and self.steps % self.check_every == 0:
            self.check_drift(optimizer)

    def check_drift(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare weights and rates over ranks by a quick digest.

        Raises:
            OutOfSyncError: names the first tensor that differs; on every rank.
        """
        process_set = self.options.process_set
        weights = {self.name_of(p): p for group in optimizer.param_groups for p in group["params"]}
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        digest = quick_digest(weights.values(), rates)
        if len(set(gather_digests(digest, f"{self.prefix}drift", process_set=process_set))) > 1:
            what = f"after step {self.steps}: {self.class_name}"
            check_in_sync(
                ((f"weight {n}", p) for n, p in weights.items()), f"{what}'s parameters", process_set=process_set
            )
            require_equal([("learning rates", str(rates))], what, process_set=process_set)
            raise OutOfSyncError(f"{what}: the quick digests differ between ranks, the tensors do not.")

    def mean_over_ranks(self, loss: Any) -> Any:
        """A closure's loss on the global batch, so that line searches decide the same on all ranks."""
        if not isinstance(loss, torch.Tensor | float):
            return loss
        local = torch.as_tensor(loss).detach().double().cpu()
        found = self.batch()
        weight = 1.0 if found is None else found.weight
        local = local * weight if weight else torch.zeros_like(local)
        mean = _hvd.allreduce(
            local, name=f"hvdkit.{self.prefix}loss", op=_hvd.Average, process_set=self.options.process_set
        )
        return mean.to(loss) if isinstance(loss, torch.Tensor) else mean.item()


class Distributed(torch.optim.Optimizer):
    """What a distributed optimizer's class has in front of the class it was made with."""

    _distribution: Distribution

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
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
        return super().__getstate__()  # type: ignore[no-any-return, misc]

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


def _names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None, model: torch.nn.Module | None
) -> dict[torch.Tensor, str]:
    """The names of the optimizer's parameters, in its own order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None and model is None:
        return {
            p: f"group{g}.{i}" for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
        }
    pairs = list(named) if named is not None else list(model.named_parameters())  # type: ignore[union-attr]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise UsageError("named_parameters must be (name, parameter) pairs, as model.named_parameters() gives them.")
    times = Counter(name for name, _ in pairs)
    if repeated := sorted(name for name, count in times.items() if count > 1):
        raise UsageError(f"names in named_parameters must be unique; these come more than once: {', '.join(repeated)}.")
    by_parameter = {p: name for name, p in pairs}
    if unnamed := [tuple(p.shape) for p in params if p not in by_parameter]:
        raise UsageError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, of shapes {unnamed[:5]}: "
            "name all of them, or leave named_parameters out."
        )
    return {p: by_parameter[p] for p in params}


def _no_batch() -> None:
    return None
