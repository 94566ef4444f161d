"""Start from rank 0's state: weights, buffers and optimizer state, bit for bit and without a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import horovod.torch as _hvd
import torch
from horovod.torch.mpi_ops import global_process_set

from hvdkit.errors import UsageError
from hvdkit.torch.collectives import broadcast_tensors
from hvdkit.torch.sync import require_equal, tensor_facts


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors in place with those of ``root_rank``; same arguments as Horovod's function of this name.

    Args:
        params: a dict of tensors such as ``model.state_dict()`` (values of other kinds are left alone), or a list of
            tensors or of (name, tensor), such as ``model.named_parameters()``.
        root_rank: whose values all ranks get.

    Raises:
        OutOfSyncError: names, shapes or dtypes differ between ranks; on every rank, before anything is sent.
    """
    if isinstance(params, Mapping):
        pairs: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        pairs = [p if isinstance(p, tuple) else (f"number {i}", p) for i, p in enumerate(params)]
    else:
        raise UsageError(
            f"params of type {type(params).__name__} were given; a dict or a list of tensors was expected."
        )
    named = [(str(name), p) for name, p in pairs if isinstance(p, torch.Tensor)]
    require_equal(tensor_facts(named), "broadcast_parameters")
    broadcast_tensors([p for _, p in named], root_rank)


def broadcast_model(model: torch.nn.Module, *, process_set: Any = global_process_set) -> None:
    """Overwrite every parameter and buffer, non-persistent ones too, with those of the set's first rank."""
    tensors = [*model.parameters(), *model.buffers()]
    root = 0 if process_set.ranks is None else process_set.ranks[0]
    broadcast_tensors(tensors, root, process_set=process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    *,
    process_set: Any = global_process_set,
) -> None:
    """Give every rank the optimizer state and options of ``root_rank``, exactly; signature as Horovod's.

    Nothing is computed: state that the root lacks is removed elsewhere, state that others lack is created by its
    shape. Works for every optimizer, LBFGS included. Gradients and weights are not touched.
    ``model`` is accepted for Horovod's sake; sparse parameters need no special case here.

    Raises:
        OutOfSyncError: the optimizers differ in class, groups or parameter shapes; on every rank.
    """
    require_equal(_structure(optimizer), "broadcast_optimizer_state", process_set=process_set)
    is_root = _hvd.rank() == root_rank
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sent: list[torch.Tensor] = []
    outline = _outline(optimizer, params, sent) if is_root else None
    outline = _hvd.broadcast_object(outline, root_rank, name="hvdkit.optimizer", process_set=process_set)
    if not is_root:
        _rebuild(optimizer, params, outline, sent)
    broadcast_tensors(sent, root_rank, process_set=process_set)


@dataclass(frozen=True)
class _Hole:
    """Stands for a tensor in an outline: what to create, and whether it lies beside its parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    beside: bool


def _structure(optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    facts = [("class", type(optimizer).__name__)]
    for g, group in enumerate(optimizer.param_groups):
        facts.append((f"number of parameters of group {g}", str(len(group["params"]))))
        facts += [(f"parameter {i} of group {g}", f"{tuple(p.shape)} {p.dtype}") for i, p in enumerate(group["params"])]
    return facts


def _outline(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], sent: list[torch.Tensor]) -> Any:
    """Options and state with a hole for every tensor; the tensors go into ``sent`` in the order of the holes."""
    place = {id(p): i for i, p in enumerate(params)}
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    states = [
        (place.get(id(key), key), _dig(value, key if isinstance(key, torch.Tensor) else None, sent))
        for key, value in optimizer.state.items()
    ]
    return [_dig(o, None, sent) for o in options], states


def _dig(value: Any, parameter: torch.Tensor | None, sent: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        sent.append(value)
        beside = parameter is not None and value.device.type == parameter.device.type
        return _Hole(tuple(value.shape), value.dtype, value.stride(), beside)
    if isinstance(value, dict):
        return {k: _dig(v, parameter, sent) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_dig(v, parameter, sent) for v in value)
    return value


def _rebuild(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], outline: Any, sent: list[torch.Tensor]
) -> None:
    options, states = outline
    for group, wanted in zip(optimizer.param_groups, options, strict=True):
        for key in set(group) - set(wanted) - {"params"}:
            del group[key]
        group.update({k: _fill(v, torch.device("cpu"), sent) for k, v in wanted.items()})
    optimizer.state.clear()
    for key, value in states:
        owner = params[key] if isinstance(key, int) else key
        optimizer.state[owner] = _fill(value, owner.device if isinstance(key, int) else torch.device("cpu"), sent)


def _fill(value: Any, device: torch.device, sent: list[torch.Tensor]) -> Any:
    if isinstance(value, _Hole):
        where = device if value.beside else torch.device("cpu")
        sent.append(torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=where))
        return sent[-1]
    if isinstance(value, dict):
        return {k: _fill(v, device, sent) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fill(v, device, sent) for v in value)
    return value
