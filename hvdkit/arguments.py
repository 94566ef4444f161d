"""Checks of values that users give: each returns the value in its plain Python type or raises a :class:`UsageError`."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

from hvdkit.errors import UsageError


def whole(name: str, value: Any, low: int = 0, high: int | None = None) -> int:
    """``value`` as an int in ``[low, high]``. Accepts ints and numpy integers; a bool, a float or text is refused."""
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    # bool is an int for Python, but `batch_per_rank=True` is a slip and not a batch of one
    plain = None if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_") else _index(value)
    if plain is None or plain < low or (high is not None and plain > high):
        raise UsageError(f"{name}={value!r} was given; {wanted} was expected.")
    return plain


def real(name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> float:
    """``value`` as a finite float in ``[low, high]``, or in ``(low, high]`` with ``above``."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and low <= value <= high and not (above and value == low):
        return float(value)
    bounds = [f"{'above' if above else 'at least'} {low:g}"] if low > -math.inf else []
    bounds += [f"at most {high:g}"] if high < math.inf else []
    raise UsageError(
        f"{name}={value!r} was given; a finite number {' and '.join(bounds)} was expected.".replace("  ", " ")
    )


def one_of(name: str, value: Any, options: Sequence[str]) -> str:
    """``value``, which must be one of ``options``."""
    if not isinstance(value, str) or value not in options:
        raise UsageError(f"{name}={value!r} was given; expected one of {', '.join(map(repr, options))}.")
    return value


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None
