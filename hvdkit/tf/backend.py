"""Which Keras is in use; what hvdkit cannot serve is refused before a collective could hang or, worse, be left out."""

from __future__ import annotations

import os
import sys

from hvdkit.errors import UsageError


def require_tensorflow_keras() -> None:
    """Refuse Keras on another backend than TensorFlow.

    Raises:
        UsageError: ``KERAS_BACKEND``, or the Keras that is already imported, names another backend.
    """
    wanted = os.environ.get("KERAS_BACKEND", "tensorflow")
    keras = sys.modules.get("keras")
    actual = keras.backend.backend() if keras is not None and hasattr(keras, "backend") else wanted
    for found, source in ((wanted, "KERAS_BACKEND"), (actual, "~/.keras/keras.json")):
        if found != "tensorflow":
            raise UsageError(
                f"Keras runs on the {found!r} backend ({source}); hvdkit.tf reduces with TensorFlow's ops and would "
                "leave gradients unreduced there. Set KERAS_BACKEND=tensorflow, or write the loop in torch with "
                "hvdkit.torch."
            )


def require_keras_3() -> None:
    """Refuse tf-keras 2, which ``TF_USE_LEGACY_KERAS`` puts behind ``tf.keras``.

    Raises:
        UsageError: ``TF_USE_LEGACY_KERAS`` is set.
    """
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise UsageError(
            f"TF_USE_LEGACY_KERAS={os.environ['TF_USE_LEGACY_KERAS']} is set; hvdkit.tf.keras works with Keras 3. "
            "Unset it, or write the loop with hvdkit.tf.DistributedGradientTape, which works with tf-keras 2 as well."
        )
