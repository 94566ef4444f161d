"""Saved models, opened for going on with on several ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import keras

from hvdkit.errors import UsageError
from hvdkit.tf.optimizer import DistributedOptimizer, Reducing


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = horovod.Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved Keras model whose optimizer, with its state, is distributed; saved with hvdkit or without.

    Args:
        filepath: what ``keras.models.load_model`` takes.
        custom_optimizers: optimizer classes that Keras does not know.
        custom_objects: other classes and functions that Keras does not know, by name.
        compression: as in :func:`DistributedOptimizer`.
        legacy_opts: optimizers of tf-keras 2, which Keras 3 has not.

    Raises:
        UsageError: ``legacy_opts`` is asked for.
    """
    if legacy_opts:
        raise UsageError("legacy_opts=True was given; Keras 3 has no legacy optimizers. Leave it out.")
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(optimizer, Reducing):
        model.optimizer = DistributedOptimizer(optimizer, compression=compression)
        model.jit_compile = model.jit_compile  # asked again, now that the optimizer is distributed
    return model
