"""Callbacks, checkpoints, comparisons of ranks, tapes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import horovod.tensorflow as horovod
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tf.keras as hvd
from hvdkit.errors import OutOfSyncError, UsageError
from hvdkit.metrics import Mean
from hvdkit.tf import DistributedGradientTape, PartialDistributedGradientTape


@pytest.fixture(scope="module", autouse=True)
def world() -> Any:
    return hvd.init(seed=11)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """One empty folder for all ranks."""
    folder = Path(horovod.broadcast_object(str(tmp_path), 0, name="folder")) / "shared"
    if hvd.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    horovod.broadcast_object(None, 0, name="made")
    return folder


RNG = np.random.default_rng(0)
X = RNG.normal(size=(23, 4)).astype(np.float32)
Y = (X @ RNG.normal(size=(4, 1))).astype(np.float32)


def net(dropout: bool = False) -> Any:
    layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh")]
    layers += [keras.layers.Dropout(0.5)] if dropout else []
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    return model


def compiled(optimizer: Any, **kwargs: Any) -> Any:
    model = net(**kwargs)
    model.compile(hvd.DistributedOptimizer(optimizer), "mse", metrics=["mae"])
    return model


def data(**settings: Any) -> Any:
    return hvd.dataset(X, Y, **{"global_batch": 4, "seed": 1, **settings})


class Spy(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def test_e3_all_callbacks_see_averaged_values() -> None:
    model, first, last = compiled(keras.optimizers.SGD(0.01)), Spy(), Spy()
    history = model.fit(
        data(),
        epochs=2,
        verbose=0,
        callbacks=[first, hvd.callbacks.MetricAverageCallback(), last],
        validation_data=hvd.dataset(X, Y, batch_per_rank=3, train=False),
    )
    assert first.logs == last.logs
    assert all(logs == first.logs for logs in horovod.allgather_object(first.logs, name="logs"))
    # The same model on all of the data, in this process alone: mean over samples, any split.
    alone = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert history.history["val_loss"][-1] == pytest.approx(alone["loss"], rel=1e-5)
    assert history.history["val_mae"][-1] == pytest.approx(alone["mae"], rel=1e-5)


def test_g1_evaluation_of_fewer_samples_than_ranks() -> None:
    model = compiled(keras.optimizers.SGD(0.01))
    one = hvd.dataset(X[:1], Y[:1], batch_per_rank=2, train=False)
    logs = model.evaluate(one, verbose=0, return_dict=True, callbacks=[hvd.callbacks.MetricAverageCallback()])
    alone = model.evaluate(X[:1], Y[:1], verbose=0, return_dict=True)
    assert logs["loss"] == pytest.approx(alone["loss"], rel=1e-5)


def test_g1_reduce_metrics_by_sums() -> None:
    mean, counted = Mean(), keras.metrics.MeanSquaredError()
    for i in range(hvd.rank(), 5, hvd.size()):
        mean.update(float(i))
        counted.update_state([float(i)], [0.0])
    reduced = hvd.reduce_metrics({"mean": mean, "mse": counted, "pair": (hvd.rank() + 1.0, 1)})
    assert reduced["mean"] == pytest.approx(2.0)
    assert reduced["mse"] == pytest.approx(6.0)
    assert reduced["pair"] == pytest.approx((hvd.size() + 1) / 2)
    with pytest.raises(UsageError, match=r"metric of hvdkit\.metrics or of Keras"):
        hvd.reduce_metrics(3.0)


def test_broadcast_callback_and_local_variables() -> None:
    model = compiled(keras.optimizers.Adam(0.01))
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    local = model.trainable_variables[1]
    model.fit(data(), epochs=1, steps_per_epoch=1, verbose=0, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)
    ])  # fmt: skip
    hvd.check_in_sync([v for v in model.trainable_variables if v is not local])
    if hvd.size() > 1:
        with pytest.raises(OutOfSyncError, match="bias"):
            hvd.check_in_sync([local])


def test_horovods_warmup_and_schedule() -> None:
    model, spy = compiled(keras.optimizers.SGD(0.4, momentum=0.9)), Spy()
    steps = len(data())
    model.fit(data(), epochs=3, verbose=0, callbacks=[
        hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, start_epoch=2),
        spy,
    ])  # fmt: skip
    size = hvd.size()
    expected = [0.4 / size * ((e + (b + 1) / steps) * (size - 1) / 2 + 1) for e in range(2) for b in range(steps)]
    np.testing.assert_allclose(spy.rates, expected + [0.4] * steps, rtol=1e-5)
    assert spy.logs[-1]["lr"] == pytest.approx(0.4)
    hvd.check_in_sync(model)
    with pytest.raises(UsageError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.5)


def test_d9_rates_fresh_and_resumed(shared: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(epochs: int, folder: Path) -> list[float]:
        model, spy = net(), Spy()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), lr_scale="linear", base_batch=2)
        model.compile(optimizer, "mse")
        standard = hvd.callbacks.standard(folder, warmup_epochs=2, decay="cosine", epochs=5)
        model.fit(data(), epochs=epochs, verbose=0, callbacks=[*standard, spy])
        return spy.rates

    whole = run(5, shared / "whole")
    steps = len(data())
    assert whole[0] == pytest.approx(0.1) and whole[2 * steps] == pytest.approx(0.2) and len(whole) == 5 * steps
    parts = run(3, shared / "parts") + run(5, shared / "parts")
    np.testing.assert_allclose(parts, whole, rtol=1e-6)
    if hvd.rank() == 0:
        text = "lr 0.1 x 2 (linear: global batch 4 / base 2), warm-up 2 epochs, cosine decay over 5 epochs"
        assert capfd.readouterr().err.count(text) == 3


@pytest.mark.timeout(300, method="thread")
def test_e7_two_epochs_and_three_equal_five(shared: Path) -> None:
    def run(epochs: int, folder: Path) -> Any:
        hvd.init(seed=4)
        model = compiled(keras.optimizers.Adam(0.05), dropout=True)
        model.fit(data(global_batch=8), epochs=epochs, verbose=0, callbacks=hvd.callbacks.standard(folder))
        return model

    whole = run(5, shared / "whole")
    run(2, shared / "parts")
    resumed = run(5, shared / "parts")
    assert int(resumed.optimizer.iterations) == int(whole.optimizer.iterations) == 5 * 3
    for a, b in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    hvd.check_in_sync(resumed)


def test_the_sketch_of_the_design_with_an_unbuilt_model(shared: Path) -> None:
    world = hvd.init()
    assert (world.rank, world.size, world.is_main) == (hvd.rank(), hvd.size(), hvd.rank() == 0)
    model = keras.Sequential([keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), lr_scale="linear", base_batch=8), "mse")
    standard = hvd.callbacks.standard(shared / "checkpoints", warmup_epochs=1)
    history = model.fit(hvd.dataset(X, Y, batch_per_rank=8, seed=1), epochs=3, callbacks=standard)
    assert len(history.history["loss"]) == 3
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01 * hvd.size())
    hvd.check_in_sync(model)
    assert horovod.broadcast_object(sorted(p.suffix for p in (shared / "checkpoints").iterdir()), 0).count(".ckpt") == 3


def loop(model: Any, run: Any, batches: Any, stop: int = 10**9) -> int:
    done = 0
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        done += 1
        if done == stop:
            run.save()
            break
    return done


def test_c6_training_state_resumes_inside_an_epoch(shared: Path) -> None:
    whole = compiled(keras.optimizers.Adam(0.05))
    run = hvd.TrainingState(shared / "whole", model=whole, loader=(batches := data()))
    for _ in run.epochs(2):
        loop(whole, run, batches)
    part = compiled(keras.optimizers.Adam(0.05))
    run = hvd.TrainingState(shared / "part", model=part, loader=(batches := data()))
    loop(part, run, batches)
    loop(part, run, batches, stop=2)
    resumed = compiled(keras.optimizers.Adam(0.05))
    run = hvd.TrainingState(shared / "part", model=resumed, loader=(batches := data()))
    assert run.restore() and (run.epoch, run.step) == (1, len(data()) + 2)
    assert [loop(resumed, run, batches) for _ in run.epochs(2)] == [len(data()) - 2]
    for a, b in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_f5_f7_broken_newest_and_rank0_decides(shared: Path, tmp_path: Path) -> None:
    """Each rank has a folder of its own; only rank 0's is looked at, and its newest checkpoint is broken."""
    folder = (shared if hvd.rank() == 0 else tmp_path) / "own"
    model = compiled(keras.optimizers.SGD(0.1))
    run = hvd.TrainingState(folder, model=model)
    assert run.restore() is False
    run.save()
    saved = [w.copy() for w in model.get_weights()]
    model.optimizer.apply([tf.ones_like(v) for v in model.trainable_variables], model.trainable_variables)
    newest = run.save()
    if hvd.rank() == 0:
        newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    horovod.broadcast_object(None, 0, name="broken")
    fresh = hvd.TrainingState(folder, model=model)
    assert fresh.restore() and fresh.step == 0
    for a, b in zip(model.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(a, b)


def test_f3_other_shapes_are_found_first() -> None:
    last = hvd.size() - 1
    width = 4 if hvd.rank() == last else 3
    variables = [keras.Variable(np.zeros((2, 2)), name="a"), keras.Variable(np.zeros((2, width)), name="b")]
    if hvd.size() == 1:
        hvd.check_in_sync(variables)
        return
    with pytest.raises(OutOfSyncError, match=r"tensor 1 differs.*weight b \(2, 3\).*weight b \(2, 4\)"):
        hvd.check_in_sync(variables)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(OutOfSyncError, match=rf"rank {last}: weight b \(2, 4\)"):
        optimizer.apply([tf.zeros(v.shape) for v in variables], variables)


def test_check_in_sync_names_the_tensor_and_the_ranks() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
    model.set_weights([np.ones(w.shape) for w in model.get_weights()])
    hvd.check_in_sync(model)
    if hvd.size() == 1:
        return
    if hvd.rank() == 1:
        model.layers[1].moving_mean.assign([2.0])
    with pytest.raises(OutOfSyncError, match=r"non-trainable weight '.*moving_mean'.*rank 1"):
        hvd.check_in_sync(model)
    with pytest.raises(UsageError, match="was expected"):
        hvd.check_in_sync(3)


def test_g7_moving_statistics_are_averaged() -> None:
    x = np.full((6 * hvd.size(), 2), 10.0 * hvd.rank(), np.float32) + RNG.normal(size=(1, 2)).astype(np.float32)
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.001)), "mse")
    model.fit(x, np.zeros((len(x), 1)), epochs=1, verbose=0, callbacks=hvd.callbacks.standard())
    hvd.check_in_sync(model)


def test_dropout_differs_by_rank_and_weights_do_not() -> None:
    hvd.init(seed=3)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    masks = horovod.allgather_object(np.asarray(model.layers[-1](np.ones((1, 64)), training=True)).tobytes(), name="m")
    assert len(set(masks)) == hvd.size()


def test_only_rank_0_shows_progress(capfd: pytest.CaptureFixture[str]) -> None:
    compiled(keras.optimizers.SGD(0.01)).fit(data(), epochs=2, verbose=2, callbacks=hvd.callbacks.standard())
    assert ("Epoch 1/2" in capfd.readouterr().out) == (hvd.rank() == 0)


def test_tape_weighs_samples_in_a_graph_and_keeps_structure() -> None:
    v = {"a": tf.Variable(1.0), "b": [tf.Variable(2.0)]}

    @tf.function(reduce_retracing=True)
    def gradient(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(x) * v["a"] * v["b"][0]
        tape = DistributedGradientTape(tape)
        return tape.gradient(loss, v), tape.gradient(loss, v["a"])

    for x, expected in zip(
        hvd.dataset(np.arange(5.0, dtype=np.float32), global_batch=3, shuffle=False), [1.0, 3.5], strict=True
    ):
        both, single = gradient(x)
        assert float(both["a"]) == pytest.approx(2 * expected) and float(both["b"][0]) == pytest.approx(expected)
        assert float(single) == pytest.approx(2 * expected)


def test_partial_tape_leaves_local_layers() -> None:
    layer, other = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    for one in (layer, other):
        one.build((None, 1))
        one.set_weights([np.ones((1, 1))])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other(layer(tf.fill((1, 1), float(hvd.rank() + 1)))))
    tape = PartialDistributedGradientTape(tape, local_layers=layer)
    local, mean = tape.gradient(loss, [layer.kernel, other.kernel])
    assert float(local[0, 0]) == pytest.approx((hvd.rank() + 1) / hvd.size())
    assert float(mean[0, 0]) == pytest.approx((hvd.size() + 1) / 2)


def test_sync_batch_normalization_equals_one_process() -> None:
    from hvdkit.tf import SyncBatchNormalization

    def build(kind: Any) -> Any:
        model = keras.Sequential([keras.Input((4,)), kind(), keras.layers.Dense(1)])
        rng = np.random.default_rng(2)
        model.set_weights([1 + 0.1 * rng.normal(size=w.shape) for w in model.get_weights()])
        return model

    plain, synced = build(keras.layers.BatchNormalization), build(SyncBatchNormalization)
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    synced.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x = 100 + X  # the mean is large beside the deviation
    plain.fit(x, Y, batch_size=10, shuffle=False, epochs=2, verbose=0)
    synced.fit(hvd.dataset(x, Y, global_batch=10, shuffle=False), epochs=2, verbose=0)
    for a, b in zip(synced.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
    with pytest.raises(UsageError, match="fused"):
        SyncBatchNormalization(fused=True)


def test_f3_tapes_compare_first() -> None:
    if hvd.size() == 1:
        return
    v = tf.Variable(tf.zeros(3 + (hvd.rank() == 0)), name="other")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v)
    with pytest.raises(OutOfSyncError, match=r"rank 0: weight other \(4,\)"):
        DistributedGradientTape(tape).gradient(loss, [v])


def test_lr_schedule_shares_the_factors() -> None:
    schedule = hvd.LRSchedule(0.1, data(), lr_scale="linear", base_batch=1, warmup_epochs=1, decay="cosine", epochs=4)
    steps = np.arange(4 * len(data()))
    found = [float(schedule(tf.constant(s))) for s in steps]
    np.testing.assert_allclose(found, 0.1 * schedule.schedule.factor(steps), rtol=1e-6)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))
    assert again.get_config() == schedule.get_config()
    with pytest.raises(UsageError, match="steps_per_epoch"):
        hvd.LRSchedule(0.1)
