"""Gradients become those of the global batch: Horovod's hooks, with what they lack around them.

Horovod's ``DistributedOptimizer`` starts an allreduce when a gradient is ready. Here it wraps *carriers*, SGD
optimizers that never step and only hold the parameters, so the user's optimizer stays the object it is. Around it:

- Each gradient is multiplied by the rank's share of the global batch before it is accumulated.
- The reduction is finished at the end of ``backward()``, as in torch's DDP. So ``p.grad`` is final when the script goes
  on: clipping, unscaling, skipping a step or logging norms work as with one process.
- Ranks agree, by one number that travels with the gradients, on parameters that did not get a gradient. Unused
  everywhere: untouched. Used on some ranks: averaged over all, sparse ones too.

A gradient reduced twice (two backward passes before a step) is right: averages of averages plus averages add up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import horovod.torch as _hvd
import torch
from horovod.torch.mpi_ops import global_process_set
from torch.utils.weak import WeakTensorKeyDictionary

from hvdkit.torch.batch import Batch

Named = Sequence[tuple[str, torch.Tensor]]
_NONE, _DENSE, _SPARSE = 0, 1, 2
_SENDABLE = (torch.float32, torch.float64, torch.float16)  # what Horovod can reduce as it is
_owners = WeakTensorKeyDictionary()  # parameter -> the reducer that it belongs to: the newest one
_ending: dict[int, Reducer] = {}  # by number: those that got gradients in the backward pass that is running


@dataclass(frozen=True)
class ReduceOptions:
    """The arguments of Horovod's ``DistributedOptimizer`` that concern the reduction."""

    compression: Any = _hvd.Compression.none
    backward_passes_per_step: int = 1
    op: Any = _hvd.Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    sparse_as_dense: bool = False
    process_set: Any = global_process_set

    @property
    def active(self) -> bool:
        """Whether this process has anything to reduce: with one process training is plain torch."""
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        return bool(self.process_set.included()) and (self.process_set.size() > 1 or elastic)


class Reducer:
    """Reduces the gradients of the parameters given to :meth:`add`. Collective calls must be made by all ranks.

    ``batch`` gives the batch that gradients come from, or None if they are not to be weighted. ``number`` tells the
    optimizers of the job apart, in the same way on every rank.
    """

    def __init__(self, options: ReduceOptions, batch: Callable[[], Batch | None], number: int) -> None:
        self._options, self._batch, self._number = options, batch, number
        self.prefix = f"{number}." if number else ""  # of the names of collectives; the only optimizer needs none
        self._carriers: list[Any] = []
        self._params: list[torch.Tensor] = []  # in the same order on every rank
        self._expected: set[torch.Tensor] = set()  # agreed: those that get a gradient in a pass
        self._fired: set[torch.Tensor] = set()  # those that got one since the last reduction
        self._nodes: dict[torch.Tensor, Any] = {}  # keeps AccumulateGrad nodes, and with them the hooks, alive
        self._passes = 0
        self._weight_now = 1.0  # of the backward pass that is running
        self._differing = torch.zeros(1)
        self.is_done = False  # True from the end of a reduction to the next gradient or step

    def add(self, named: Named) -> None:
        """Take over parameters: from now on their gradients are reduced, here and by no earlier optimizer."""
        for _, parameter in named:
            if (owner := _owners.get(parameter)) is not None:  # type: ignore[no-untyped-call]
                owner.release(parameter)
            _owners[parameter] = self
        options = vars(self._options)
        if not all(p.dtype in _SENDABLE and p.is_contiguous() for _, p in named):
            options = options | {"compression": Portable(self._options.compression)}
        carrier = torch.optim.SGD([p for _, p in named], lr=0.0)
        names = [(self.prefix + name, p) for name, p in named]
        self._carriers.append(_hvd.DistributedOptimizer(carrier, names, **options))
        for _, parameter in named:
            self._params.append(parameter)
            self._expected.add(parameter)
            if parameter.grad is not None:
                self._fired.add(parameter)
                self.is_done = False
            node = _accumulation_node(parameter)
            node.register_prehook(self._before_accumulation(parameter))
            self._nodes[parameter] = node

    def release(self, parameter: torch.Tensor) -> None:
        """Leave a parameter to another optimizer. Its hooks go with the last reference to its node."""
        self._params = [p for p in self._params if p is not parameter]
        self._expected.discard(parameter)
        self._fired.discard(parameter)
        del self._nodes[parameter]
        for carrier in self._carriers:
            members = carrier.param_groups[0]["params"]
            place = next((i for i, p in enumerate(members) if p is parameter), None)
            if place is not None:
                del members[place], carrier._grad_accs[place]
                carrier._requires_update.discard(parameter)
                carrier._handles.pop(parameter, None)

    def reduce(self) -> None:
        """Wait until every gradient is the average over ranks; all ranks get the same ones, bit for bit."""
        self._differing.fill_(len(self._fired ^ self._expected))
        if self._exchange(self._differing, _hvd.Sum, "differing").item() > 0:
            self._agree()
        for carrier in self._carriers:
            carrier.synchronize()
            carrier._synchronized = False
        self._forget()
        self.is_done = True

    def finish(self) -> None:
        """Before a step: reduce what has not been, also gradients that were set by hand instead of by ``backward``."""
        if not self.is_done:
            if not self._fired:
                self._fired.update(p for p in self._params if p.grad is not None)
            self.reduce()

    def discard(self) -> None:
        """Forget gradients that were not reduced: before they are zeroed, and after a step."""
        if self._fired:
            for carrier in self._carriers:
                for handle, _ in carrier._handles.values():
                    if handle is not None:  # in flight on all ranks alike
                        handle() if callable(handle) else _hvd.synchronize(handle)
                carrier._handles.clear()
                carrier._group_counts = dict.fromkeys(carrier._group_counts, 0)
                carrier.set_backward_passes_per_step(self._options.backward_passes_per_step)
        self._forget()
        self.is_done = False

    def set_passes(self, passes: int) -> ReduceOptions:
        """Reduce after this many backward passes from now on; returns the options as they are now."""
        self._options = replace(self._options, backward_passes_per_step=passes)
        for carrier in self._carriers:
            carrier.set_backward_passes_per_step(passes)
        return self._options

    def _forget(self) -> None:
        self._fired.clear()
        self._passes = 0
        _ending.pop(self._number, None)

    def _before_accumulation(self, parameter: torch.Tensor) -> Callable[..., Any]:
        def weigh(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor] | None:
            self._fired.add(parameter)
            self.is_done = False
            if self._number not in _ending:
                _ending[self._number] = self
                self._weight_now = self._weight()
                torch.autograd.Variable._execution_engine.queue_callback(_end_backward)
            gradient = gradients[0]
            if gradient is None or (self._weight_now == 1.0 and not gradient.is_sparse):
                return None
            return (_weighed(gradient, self._weight_now),)

        return weigh

    def _weight(self) -> float:
        batch = self._batch()
        if batch is None:
            return 1.0
        # A user's Sum is a sum over whatever the loss sums; only fillers must not count in it.
        return batch.weight if self._options.op == _hvd.Average else float(batch.count > 0)

    def backward_ended(self) -> None:
        """Reduce if this was the last backward pass of a step."""
        self._passes += 1
        batch = self._batch()
        # An accumulation window usually ends with the epoch. If it does not, the average so far is added to.
        ends_early = batch is not None and batch.is_last and self._options.op == _hvd.Average
        if ends_early or self._passes >= self._options.backward_passes_per_step:
            self.reduce()

    def _agree(self) -> None:
        """Find out which parameters got a gradient on any rank, and stand in for those that lack it here."""
        kinds = torch.tensor([self._kind(p) for p in self._params], dtype=torch.int32)
        agreed = self._exchange(kinds, _hvd.Max, "kinds").tolist()
        self._expected = {p for p, kind in zip(self._params, agreed, strict=True) if kind != _NONE}
        for carrier in self._carriers:
            # Horovod's word for those that synchronize() reduces even if they got no gradient here
            carrier._requires_update = self._expected.intersection(carrier.param_groups[0]["params"])
        for parameter, kind in zip(self._params, agreed, strict=True):
            # Horovod itself puts dense zeros in, which stalls where others send indices and values.
            if kind == _SPARSE and parameter.grad is None:
                parameter.grad = _sparse_zero(parameter)

    def _kind(self, parameter: torch.Tensor) -> int:
        if parameter not in self._fired or parameter.grad is None:
            return _NONE
        return _SPARSE if parameter.grad.is_sparse else _DENSE

    def _exchange(self, tensor: torch.Tensor, op: Any, name: str) -> torch.Tensor:
        handle = _hvd.allreduce_async_(
            tensor, op=op, name=f"hvdkit.{self.prefix}{name}", process_set=self._options.process_set
        )
        result: torch.Tensor = _hvd.synchronize(handle)
        return result


class Portable:
    """A Horovod compressor that first brings a gradient into a form that Horovod can send, then uses ``inner``."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send and what :meth:`decompress` needs."""
        dtype = tensor.dtype
        if dtype.is_complex:
            tensor = torch.view_as_real(tensor)
        elif dtype == torch.bfloat16:  # Horovod 0.28.1 has no reduction for it
            tensor = tensor.float()
        sent, context = self._inner.compress(tensor.contiguous())
        return sent, (dtype, context)

    def decompress(self, tensor: torch.Tensor, context: tuple[torch.dtype, Any] | None) -> torch.Tensor:
        """The gradient in its own dtype."""
        if context is None:  # sparse gradients travel as they are
            return tensor
        dtype, inner_context = context
        tensor = self._inner.decompress(tensor, inner_context)
        return torch.view_as_complex(tensor) if dtype.is_complex else tensor.to(dtype)


def _end_backward() -> None:
    """End a backward pass for the optimizers it reached, in one order on all ranks: otherwise ranks wait crosswise."""
    while _ending:
        _ending.pop(min(_ending)).backward_ended()


def _accumulation_node(parameter: torch.Tensor) -> Any:
    """The node of the autograd graph that adds to ``parameter.grad``; the same one for as long as someone holds it."""
    function: Any = parameter.expand_as(parameter).grad_fn
    return function.next_functions[0][0]


def _weighed(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    if gradient.is_sparse:
        gradient = gradient.coalesce()  # repeated indices would be sent one by one
    if weight == 1.0:
        return gradient
    # A filler's gradient may be NaN, which times 0 is NaN.
    return gradient * weight if weight else torch.zeros_like(gradient)


def _sparse_zero(parameter: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without rows, as an embedding gives: one sparse dimension, the rest dense."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
