"""The proof of the global batch: N ranks give what one process gives on the same global batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tf.keras as hvd
from hvdkit import ShardPlan
from hvdkit.tf import DistributedGradientTape, broadcast_variables

SAMPLES, BATCH, EPOCHS = 1797, 50, 2  # the size of scikit-learn's digits; 50 divides nothing evenly
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(scope="module", autouse=True)
def world() -> Any:
    return hvd.init()


@pytest.fixture(scope="module")
def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    y = rng.integers(0, 10, SAMPLES)
    x = rng.normal(size=(10, 64))[y] + rng.normal(size=(SAMPLES, 64))
    return x.astype(np.float32), y


def net() -> Any:
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])


def common_net() -> Any:
    """Equal weights on all ranks, by their own means."""
    model, rng = net(), np.random.default_rng(1)
    model.set_weights([rng.normal(0, 0.2, w.shape).astype(np.float32) for w in model.get_weights()])
    return model


def optimizer() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


@pytest.fixture(scope="module")
def reference(data: Any) -> Any:
    """A loop of plain Keras in this process alone: weights after each epoch, and the loss of each global batch."""
    model, opt = common_net(), optimizer()
    plan = ShardPlan(length=SAMPLES, size=1, rank=0, global_batch=BATCH, seed=1)

    @tf.function(reduce_retracing=True)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = LOSS(y, model(x, training=True))
        opt.apply_gradients(
            zip(tape.gradient(value, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return value

    losses, weights = [], []
    for epoch in range(EPOCHS):
        for k in range(plan.steps):
            ids = plan.ids(epoch, k)
            losses.append(float(step(data[0][ids], data[1][ids])))
        weights.append(model.get_weights())
    return losses, weights


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_e1_fit_equals_one_process(data: Any, reference: Any) -> None:
    model = net()  # other weights on each rank; rank 0's are broadcast
    if hvd.rank() == 0:
        model.set_weights(common_net().get_weights())
    model.compile(hvd.DistributedOptimizer(optimizer()), LOSS, metrics=["accuracy"])
    batches = hvd.dataset(*data, global_batch=BATCH, seed=1)
    history = model.fit(batches, epochs=EPOCHS, verbose=0, callbacks=hvd.callbacks.standard())
    assert_close(model.get_weights(), reference[1][-1])
    steps = len(batches)
    sizes = [BATCH] * (steps - 1) + [SAMPLES - BATCH * (steps - 1)]
    for epoch in range(EPOCHS):
        expected = np.average(reference[0][epoch * steps : (epoch + 1) * steps], weights=sizes)
        assert history.history["loss"][epoch] == pytest.approx(expected, rel=1e-5)
    assert batches.epoch == EPOCHS and batches.position == EPOCHS * SAMPLES


def test_fit_without_callbacks_starts_equal(data: Any, reference: Any) -> None:
    model = net()
    if hvd.rank() == 0:
        model.set_weights(common_net().get_weights())
    model.compile(hvd.DistributedOptimizer(optimizer()), LOSS)
    model.fit(hvd.dataset(*data, global_batch=BATCH, seed=1), epochs=1, verbose=0, steps_per_epoch=None)
    assert_close(model.get_weights(), reference[1][0])


def test_custom_loop_equals_one_process(data: Any, reference: Any) -> None:
    model, opt = common_net(), optimizer()
    opt.build(model.trainable_variables)
    broadcast_variables(model.variables, root_rank=0)
    traces = []

    @tf.function
    def step(x: Any, y: Any) -> Any:
        traces.append(1)
        with tf.GradientTape() as tape:
            value = LOSS(y, model(x, training=True))
        gradients = DistributedGradientTape(tape).gradient(value, model.trainable_variables)
        opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    batches = hvd.dataset(*data, global_batch=BATCH, seed=1)
    for epoch in range(EPOCHS):
        losses = []
        for x, y in batches:
            losses.append((float(step(x, y)) * len(y), len(y)))
        mean = hvd.reduce_metrics(tuple(np.sum(losses, axis=0)))
        expected = reference[0][epoch * len(batches) : (epoch + 1) * len(batches)]
        sizes = [BATCH] * (len(batches) - 1) + [SAMPLES - BATCH * (len(batches) - 1)]
        assert mean == pytest.approx(np.average(expected, weights=sizes), rel=1e-5)
        if epoch == 0:
            first_epoch = len(traces)
    assert_close(model.get_weights(), reference[1][-1])
    # E8: the shape of batches is open along axis 0, so the short last one is no news
    assert len(traces) == first_epoch
    hvd.check_in_sync(model)


def test_custom_train_step_and_steps_per_execution(data: Any, reference: Any) -> None:
    class Model(keras.Model):  # type: ignore[misc]
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    inner = common_net()
    model = Model(inner.inputs, inner.outputs)
    model.compile(hvd.DistributedOptimizer(optimizer()), LOSS, steps_per_execution=5)
    model.fit(hvd.dataset(*data, global_batch=BATCH, seed=1), epochs=1, verbose=0)
    assert_close(model.get_weights(), reference[1][0])


def test_eager_fit(data: Any, reference: Any) -> None:
    model = common_net()
    model.compile(hvd.DistributedOptimizer(optimizer()), LOSS, run_eagerly=True)
    model.fit(hvd.dataset(*data, global_batch=BATCH, seed=1), epochs=1, verbose=0)
    assert_close(model.get_weights(), reference[1][0])


def test_map_keeps_the_weights_of_batches(data: Any, reference: Any) -> None:
    model = common_net()
    model.compile(hvd.DistributedOptimizer(optimizer()), LOSS)
    batches = hvd.dataset(data[0] * 2, data[1], global_batch=BATCH, seed=1).map(lambda x, y: (x / 2, y)).prefetch(1)
    model.fit(batches, epochs=1, verbose=0, class_weight=dict.fromkeys(range(10), 1.0))
    assert_close(model.get_weights(), reference[1][0])
