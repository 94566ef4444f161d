"""The random generators of this process as plain values, so that a resumed run draws the next number."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import tensorflow as tf


def capture_random_state(model: Any = None) -> dict[str, Any]:
    """States of Python's, numpy's and TensorFlow's generators and of the model's dropout and augmentation layers.

    TensorFlow's stateful ops (``tf.random.normal`` and its like without a generator) keep theirs out of reach.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), np.asarray(keys), int(position), int(has_gauss), float(gauss)),
        "tensorflow": tf.random.get_global_generator().state.numpy(),
        "layers": [v.numpy() for v in seed_variables(model)],
    }


def restore_random_state(state: dict[str, Any], model: Any = None) -> None:
    """Set the generators to what :func:`capture_random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys, position, has_gauss, cached))
    tf.random.get_global_generator().state.assign(state["tensorflow"])
    for variable, value in zip(seed_variables(model), state["layers"], strict=True):
        variable.assign(value)


def seed_variables(model: Any) -> list[Any]:
    """The states of a Keras model's random layers: neither weights nor metrics; a rank's own on purpose."""
    if model is None or not hasattr(model, "_flatten_layers"):
        return []
    generators = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", [])]
    return list({id(g.state): g.state for g in generators}.values())
