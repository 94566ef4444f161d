"""Arrays that samples are taken from."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.errors import UsageError


def as_array(value: Any) -> Any:
    """``value`` with numpy's indexing, not copied if it has it already (memory-mapped arrays stay on disk)."""
    return value if isinstance(value, np.ndarray) else np.asarray(value)


def common_length(arrays: Any) -> int:
    """The number of samples of ``(x, y, sample_weight)``, each an array or a structure of arrays.

    Raises:
        UsageError: one of them is a single number, or has another number of samples.
    """
    lengths = [(path, a.shape[0] if a.ndim else None) for path, a in _flat(arrays)]
    for path, length in lengths:
        if length is None:
            raise UsageError(f"{path} is a single number; an array with samples along axis 0 was expected.")
        if length != lengths[0][1]:
            raise UsageError(
                f"{lengths[0][0]} has {lengths[0][1]} samples and {path} has {length}; all need the same number."
            )
    return int(lengths[0][1] or 0)


def _flat(arrays: Any) -> list[tuple[str, Any]]:
    names = ("x", "y", "sample_weight")
    flat = []
    for name, part in zip(names, arrays, strict=False):
        leaves = tf.nest.flatten(part)
        flat += [(name if len(leaves) == 1 else f"{name}[{i}]", leaf) for i, leaf in enumerate(leaves)]
    return flat
