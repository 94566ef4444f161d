"""Batch normalisation over the global batch, on Keras 3, on CPU as well as on GPU."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvdkit.errors import UsageError
from hvdkit.tf.collectives import batch_share, reduce_mean, variable_name


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """``BatchNormalization`` whose mean and variance are those of all ranks' samples, not of this rank's.

    Parts of a short batch count by their samples if the batch is from ``hvd.dataset``. All ranks must call the layer in
    training. ``fused`` is accepted as in Horovod. Saved models need hvdkit to open.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise UsageError(f"fused={fused} was given; the moments of all ranks cannot be fused. Leave it out.")
        if not kwargs.get("name"):
            kwargs["name"] = "sync_batch_normalization"
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any = None) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if horovod.size() == 1:
            return mean, variance
        # In float64 the mean of squares less the square of the mean keeps what float32 would lose; these are small.
        wide = tf.cast(tf.stack([mean, variance]), tf.float64)
        sums = tf.stack([wide[0], wide[1] + wide[0] ** 2])
        means = _over_ranks(sums, f"hvdkit.moments.{variable_name(self.moving_mean)}")
        return tf.cast(means[0], mean.dtype), tf.cast(tf.maximum(means[1] - means[0] ** 2, 0.0), variance.dtype)


def _over_ranks(sums: Any, name: str) -> Any:
    """The mean over ranks, weighted by samples. Backwards it is the same: what comes out is everybody's."""
    share = batch_share().read_value()

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forward(x: Any) -> tuple[Any, Any]:
        def backward(upstream: Any) -> Any:
            return reduce_mean(upstream, share, f"{name}.gradient")

        return reduce_mean(x, share, name), backward

    return forward(sums)
