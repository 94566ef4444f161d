"""Are the ranks still the same? Signatures before the first collective, digests of weights afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import global_process_set

from hvdkit.errors import OutOfSyncError, UsageError
from hvdkit.torch.collectives import gather_digests, gather_objects
from hvdkit.torch.runtime import ranks_of

Facts = Sequence[tuple[str, str]]  # (what it is, its value on this rank), in order
_ABSENT = "absent"


def require_equal(facts: Facts, what: str, *, process_set: Any = global_process_set) -> None:
    """Compare ``facts`` over the ranks in one small exchange; all ranks must call this.

    Raises:
        OutOfSyncError: on every rank, with the first fact that differs, its values and who has which.
    """
    digests = gather_digests(_hash(repr(list(facts)).encode()), "facts", process_set=process_set)
    if len(set(digests)) > 1:
        raise OutOfSyncError(_first_difference(gather_objects(list(facts), process_set=process_set), what, process_set))


def check_in_sync(target: Any, what: str = "", *, process_set: Any = global_process_set) -> None:
    """Return quietly if ``target`` is the same on all ranks, bit for bit. All ranks must call this.

    Names, shapes and dtypes are compared first, then a digest of every tensor; ranks exchange 32 bytes unless
    something differs.

    Args:
        target: a module (its weights and buffers), an optimizer (its options and state), a mapping or an iterable
            of (name, tensor), or one tensor.
        what: how messages call it; default: the class's name.

    Raises:
        OutOfSyncError: on every rank; names the first tensor that differs, whether it is a weight or a buffer, and
            the ranks that disagree.
    """
    compare_tensors(*_describe(target), what or type(target).__name__, process_set)


def compare_tensors(facts: Facts, tensors: Sequence[tuple[str, torch.Tensor]], what: str, process_set: Any) -> None:
    """:func:`check_in_sync` for facts and tensors whose names already say what they are."""
    facts = [*facts, *((name, f"{tuple(t.shape)} {_short(t.dtype)}") for name, t in tensors)]
    values = [(name, tensor_digest(t).hex()) for name, t in tensors]
    digest = _hash(repr(facts).encode()) + _hash(repr(values).encode())
    digests = gather_digests(digest, "sync", process_set=process_set)
    if len(set(digests)) == 1:
        return
    ours = facts if len({d[:16] for d in digests}) > 1 else values
    raise OutOfSyncError(_first_difference(gather_objects(ours, process_set=process_set), what, process_set))


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """16 bytes that stand for the tensor's exact bits, whatever its dtype, device and memory layout."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _hash(tensor_digest(tensor.indices()) + tensor_digest(tensor.values()))
    return _hash(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def quick_digest(tensors: Iterable[torch.Tensor], numbers: Sequence[float] = ()) -> bytes:
    """16 bytes from integer sums over the bits: as fast as memory on any device; sees every drift that occurs.

    Two tensors that hold the same words in another order look equal to it, which is why :func:`check_in_sync` hashes.
    """
    sums = [_word_sum(t.detach()) for t in tensors]
    packed = torch.stack(sums).cpu().numpy().tobytes() if sums else b""
    return _hash(packed + repr(list(numbers)).encode())


def tensor_facts(tensors: Iterable[tuple[str, torch.Tensor]]) -> Facts:
    """Name -> shape, dtype and device kind, for a signature."""
    return [(name, f"{tuple(t.shape)} {_short(t.dtype)} on {t.device.type}") for name, t in tensors]


def _word_sum(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    words = flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.uint8)
    return words.sum(dtype=torch.int64)


def _describe(target: Any) -> tuple[list[tuple[str, str]], list[tuple[str, torch.Tensor]]]:
    """(plain facts, named tensors) of whatever :func:`check_in_sync` accepts."""
    if isinstance(target, torch.nn.Module):
        weights = [(f"weight {name!r}", t) for name, t in target.named_parameters()]
        return [], weights + [(f"buffer {name!r}", t) for name, t in target.named_buffers()]
    if isinstance(target, torch.optim.Optimizer):
        return _describe_optimizer(target)
    if isinstance(target, torch.Tensor):
        return [], [("tensor", target)]
    pairs = list(target.items() if isinstance(target, Mapping) else target)
    if not all(isinstance(p, tuple) and len(p) == 2 and isinstance(p[1], torch.Tensor) for p in pairs):
        raise UsageError(
            f"check_in_sync was given a {type(target).__name__}; it takes a module, an optimizer, a tensor, "
            "or (name, tensor) pairs."
        )
    return [], [(f"tensor {name!r}", t) for name, t in pairs]


def _describe_optimizer(
    optimizer: torch.optim.Optimizer,
) -> tuple[list[tuple[str, str]], list[tuple[str, torch.Tensor]]]:
    facts: list[tuple[str, str]] = []
    tensors: list[tuple[str, torch.Tensor]] = []
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                facts.append((f"number of parameters of group {g}", str(len(value))))
            elif key != "param_names":
                facts.append((f"option {key!r} of group {g}", repr(value)))
        for p, parameter in enumerate(group["params"]):
            _flatten(f"of parameter {p} of group {g}", optimizer.state.get(parameter, {}), facts, tensors)
    return facts, tensors


def _flatten(where: str, value: Any, facts: list[tuple[str, str]], tensors: list[tuple[str, torch.Tensor]]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append((f"state {where}", value))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(f"{key!r} {where}", inner, facts, tensors)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _flatten(f"[{i}] {where}", inner, facts, tensors)
    else:
        facts.append((f"state {where}", repr(value)))


def _first_difference(per_rank: Sequence[Facts], what: str, process_set: Any) -> str:
    tables = [dict(facts) for facts in per_rank]
    order = dict.fromkeys(name for facts in per_rank for name, _ in facts)
    for name in order:
        holders: dict[str, list[int]] = {}
        for rank, table in zip(ranks_of(process_set), tables, strict=True):
            holders.setdefault(table.get(name, _ABSENT), []).append(rank)
        if len(holders) > 1:
            values = "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in holders.items())
            return f"{what} differs between ranks. First difference: {name} is {values}."
    return f"{what} differs between ranks in the order of its parts: {[n for n, _ in per_rank[0]]!r} on the first rank."


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f", … ({len(ranks)} in all)" if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
