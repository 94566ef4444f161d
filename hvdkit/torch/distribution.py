"""What makes one optimizer distributed: the state and the checks behind ``DistributedOptimizer``."""

from __future__ import annotations

import itertools
import platform
from collections import Counter
from collections.abc import Iterable
from typing import Any

import horovod
import horovod.torch as _hvd
import torch

import hvdkit
from hvdkit.errors import OutOfSyncError, UsageError
from hvdkit.torch import batch as _batch
from hvdkit.torch.collectives import gather_digests
from hvdkit.torch.rates import RateScaling
from hvdkit.torch.reduction import ReduceOptions, Reducer
from hvdkit.torch.sync import compare_tensors, quick_digest, require_equal, tensor_facts

_numbers = itertools.count()  # optimizers are made in the same order on every rank, so their numbers agree


class Distribution:
    """What makes one optimizer distributed: its reducer, the names of its parameters, its rates and its checks."""

    rates: RateScaling

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None,
        model: torch.nn.Module | None, options: ReduceOptions, check_every: int, loader: Any, weighted: bool,
    ) -> None:  # fmt: skip
        self.options, self.model, self.check_every, self.loader = options, model, check_every, loader
        self.names = _names(optimizer, named, model)
        self.reducer = Reducer(options, self.batch if weighted else _no_batch, next(_numbers))
        self.prefix = self.reducer.prefix
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
            compare_tensors([], [(f"weight {n!r}", p) for n, p in weights.items()], what, process_set)
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
