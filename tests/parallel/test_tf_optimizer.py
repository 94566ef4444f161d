"""DistributedOptimizer: every way in, every setting, the meaning that one process gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tf.keras as hvd
from hvdkit.errors import UsageError

BUILT_IN = [
    "SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion", "Lamb",
    "Muon",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def world() -> Any:
    return hvd.init()


class Halving(keras.optimizers.SGD):  # type: ignore[misc]
    """A user's own optimizer, with a setting of its own."""

    def __init__(self, learning_rate: float = 0.1, part: float = 0.5, **kwargs: Any) -> None:
        super().__init__(learning_rate, **kwargs)
        self.part = part

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.part, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "part": self.part}


def variable(value: Any = ((1.0, 2.0), (3.0, 4.0)), name: str = "w") -> Any:
    return keras.Variable(np.asarray(value, np.float32), name=name)


def gradients(step: int = 0) -> tuple[Any, Any]:
    """This rank's gradient, and the mean over ranks."""
    all_of_them = [np.float32([[1, -2], [3, r]]) * (r + 1 + step) for r in range(hvd.size())]
    return tf.constant(all_of_them[hvd.rank()]), tf.constant(np.mean(all_of_them, axis=0))


def compare(plain: Any, distributed: Any, steps: int = 3) -> None:
    """The same steps with the mean in one process, and with parts on all ranks."""
    v, w = variable(), variable()
    for step in range(steps):
        mine, mean = gradients(step)
        plain.apply([mean], [v])
        distributed.apply([mine], [w])
    np.testing.assert_allclose(w.numpy(), v.numpy(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in BUILT_IN if hasattr(keras.optimizers, n)])
def test_every_built_in_optimizer_reduces(name: str) -> None:
    make = getattr(keras.optimizers, name)
    compare(make(learning_rate=0.1), hvd.DistributedOptimizer(make(learning_rate=0.1)), steps=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"clipnorm": 0.5},
        {"clipvalue": 0.5},
        {"global_clipnorm": 0.5},
        {"weight_decay": 0.1},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"gradient_accumulation_steps": 2},
        {"loss_scale_factor": 8.0},
    ],
    ids=lambda s: next(iter(s)),
)
def test_settings_keep_their_meaning(settings: dict[str, Any]) -> None:
    make = lambda: keras.optimizers.SGD(0.1, momentum=0.9, **settings)  # noqa: E731
    compare(make(), hvd.DistributedOptimizer(make()), steps=4)


def test_user_subclass_and_config_round_trip() -> None:
    compare(Halving(part=0.25), hvd.DistributedOptimizer(Halving(part=0.25)))
    wrapped = hvd.DistributedOptimizer(Halving(part=0.25))
    assert type(wrapped).__name__ == "Halving" and isinstance(wrapped, Halving)
    assert wrapped.get_config() == Halving(part=0.25, name=wrapped.name).get_config()
    json.dumps(wrapped.get_config())
    compare(Halving(part=0.25), type(wrapped).from_config(wrapped.get_config()))


def test_apply_gradients_and_tf_function() -> None:
    v, w = variable(), variable()
    plain, wrapped = keras.optimizers.Adam(0.1), hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    traces = []

    @tf.function
    def step(gradient: Any) -> None:
        traces.append(1)
        wrapped.apply_gradients([(gradient, w)])

    for i in range(4):
        mine, mean = gradients(i)
        plain.apply_gradients([(mean, v)])
        step(mine)
    np.testing.assert_allclose(w.numpy(), v.numpy(), rtol=2e-5)
    assert int(wrapped.iterations) == 4
    assert len(traces) <= 2  # E8; Keras may trace a first time to make its variables


def test_train_on_batch() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.train_on_batch(np.full((4, 2), hvd.rank() + 1.0), np.zeros((4, 1)))
    hvd.check_in_sync(model)
    kernel = model.get_weights()[0]
    expected = 1 - 0.1 * np.mean([2 * 2 * (r + 1) ** 2 for r in range(hvd.size())])
    np.testing.assert_allclose(kernel, expected, rtol=1e-5)


def test_the_optimizer_passed_in_is_not_modified() -> None:
    optimizer = keras.optimizers.Adam(0.1)
    before = (type(optimizer), optimizer.get_config(), dict(optimizer.__dict__))
    hvd.DistributedOptimizer(optimizer, lr_scale="linear", base_batch=1, global_batch=8).apply(
        [gradients()[0]], [variable()]
    )
    assert (type(optimizer), optimizer.get_config(), dict(optimizer.__dict__)) == before


def test_d3_state_is_kept_when_wrapping() -> None:
    v = variable()
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.apply([tf.ones((2, 2))], [v])
    wrapped = hvd.DistributedOptimizer(optimizer)
    assert int(wrapped.iterations) == 1
    for mine, theirs in zip(wrapped.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_horovods_own_arguments() -> None:
    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    compare(keras.optimizers.SGD(0.1 * hvd.size()), hvd.DistributedOptimizer(sgd(), op=hvd.Sum))
    compare(sgd(), hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=2.0))
    compare(sgd(), hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16), steps=1)
    compare(sgd(), hvd.DistributedOptimizer(sgd(), groups=1))
    compare(sgd(), hvd.DistributedOptimizer(sgd(), num_groups=3))
    assert hvd.DistributedOptimizer(sgd(), name="mine").name == "mine"


@pytest.mark.parametrize("average", [True, False])
def test_backward_passes_per_step(average: bool) -> None:
    wrapped = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    w, start = variable(), variable().numpy()
    means = []
    for step in range(2):
        mine, mean = gradients(step)
        wrapped.apply([mine], [w])
        means.append(mean.numpy())
    np.testing.assert_allclose(w.numpy(), start - 0.1 * (np.mean if average else np.sum)(means, axis=0), rtol=1e-5)


def test_two_optimizers_over_parts_of_a_model() -> None:
    a, b = variable(name="same"), variable(name="same")
    first, second = (hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in range(2))

    @tf.function
    def step(gradient: Any) -> None:
        first.apply([gradient], [a])
        second.apply([2 * gradient], [b])

    mine, mean = gradients()
    step(mine)
    np.testing.assert_allclose(a.numpy(), variable().numpy() - 0.1 * mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(b.numpy(), variable().numpy() - 0.2 * mean.numpy(), rtol=1e-5)


def test_absent_gradients() -> None:
    v, w = variable(), variable()
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    wrapped.apply([None, gradients()[0]], [v, w])
    np.testing.assert_array_equal(v.numpy(), variable().numpy())
    np.testing.assert_allclose(w.numpy(), variable().numpy() - 0.1 * gradients()[1].numpy(), rtol=1e-5)


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad"])
def test_d10_sparse_gradients_equal_dense_ones(kind: str, as_dense: bool) -> None:
    """Rank 0 touches rows 0 and 1 (0 twice), rank 1 none, rank 2 row 3."""
    rows = {0: [0, 1, 0], 1: []}.get(hvd.rank(), [3])
    make = getattr(keras.optimizers, kind)
    start = np.ones((4, 2), np.float32)
    v, w = variable(start), variable(start)
    wrapped = hvd.DistributedOptimizer(make(0.1), sparse_as_dense=as_dense)
    plain = make(0.1)
    everyone = [{0: [0, 1, 0], 1: []}.get(r, [3]) for r in range(hvd.size())]
    dense = sum((np.bincount(r, minlength=4)[:, None] for r in everyone if r), np.zeros((4, 1))) / hvd.size()

    @tf.function(reduce_retracing=True)
    def step(values: Any, indices: Any) -> None:
        wrapped.apply([tf.IndexedSlices(values, indices, tf.constant([4, 2], tf.int64))], [w])

    for _ in range(2):
        step(tf.ones((len(rows), 2)), tf.constant(rows, tf.int64))
        plain.apply([tf.constant(np.repeat(dense, 2, axis=1), tf.float32)], [v])
    np.testing.assert_allclose(w.numpy(), v.numpy(), rtol=2e-5, atol=1e-6)


def test_d7_an_infinity_on_one_rank_makes_all_skip() -> None:
    w = variable()
    wrapped = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    )
    last = hvd.size() - 1
    for step in range(3):
        bad = step == 1 and hvd.rank() == last
        scaled = wrapped.scale_loss(tf.constant(1.0))
        wrapped.apply([tf.fill((2, 2), np.float32(np.inf) if bad else scaled)], [w])
    np.testing.assert_allclose(w.numpy(), variable().numpy() - 0.2, rtol=1e-5)
    assert float(wrapped.dynamic_scale) == 4.0
    hvd.check_in_sync(wrapped)


def test_a_loss_scale_around_it_is_refused() -> None:
    outer = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    w = variable()
    with pytest.raises(UsageError, match="Wrap the other way round"):
        tf.function(lambda g: outer.apply([g], [w]), autograph=False)(tf.ones((2, 2)))


def test_local_variables_keep_their_own_gradient() -> None:
    v, w = variable(name="v"), variable(name="w")
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    wrapped.register_local_var(v)
    mine, mean = gradients()
    wrapped.apply([mine, mine], [v, w])
    np.testing.assert_allclose(v.numpy(), variable().numpy() - 0.1 * mine.numpy() / hvd.size(), rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), variable().numpy() - 0.1 * mean.numpy(), rtol=1e-5)


@pytest.mark.parametrize("jit", [True, "auto", False])
def test_e5_jit_compile_is_safe(jit: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    with pytest.warns(UserWarning) if jit is True else _nothing():
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=jit)
    assert model.jit_compile is False
    if jit is True and hvd.rank() == 0:
        assert capfd.readouterr().err.count("XLA cannot compile Horovod's collectives") >= 1
    for _ in range(3):
        model.train_on_batch(np.ones((2, 2)), np.zeros((2, 1)))
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse", jit_compile=True)
    assert plain.jit_compile is True  # nobody else's business


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def trained(optimizer: object) -> keras.Model:
    """A model after one update, on data that differ by rank."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, keras.losses.MeanSquaredError())
    model.train_on_batch(np.ones((4, 2)) * (hvd.rank() + 1), np.zeros((4, 1)))
    return model


@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
def test_saved_models_open_in_plain_keras_and_back(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / f"{hvd.rank()}-{name}")
    trained(keras.optimizers.Adam(0.1)).save(path)
    kept_by_keras = len(keras.models.load_model(path).optimizer.variables)
    assert kept_by_keras == 6 or name == "model.h5"  # Keras 3.15 itself leaves the slots out of .h5 files
    model = trained(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    model.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.Adam and int(plain.optimizer.iterations) == 1
    saved = {v.path: v.numpy() for v in plain.optimizer.variables}
    assert len(saved) == kept_by_keras
    for v in model.optimizer.variables:
        np.testing.assert_array_equal(saved.get(v.path, v.numpy()), v.numpy())
    plain.save(path)
    again = hvd.load_model(path)
    for ours, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if len(saved) == 6:
        for one in (again, model):
            one.train_on_batch(np.ones((4, 2)) * (hvd.rank() + 1), np.zeros((4, 1)))
        np.testing.assert_allclose(again.get_weights()[0], model.get_weights()[0], rtol=1e-6)
    hvd.check_in_sync(again)


def test_load_model_with_ones_own_optimizer(tmp_path: Path) -> None:
    path = str(tmp_path / f"{hvd.rank()}.keras")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(Halving(part=0.25)), "mse")
    model.save(path)
    again = hvd.load_model(path, custom_optimizers=[Halving])
    assert isinstance(again.optimizer, Halving) and again.optimizer.part == 0.25
    with pytest.raises(UsageError, match="legacy"):
        hvd.load_model(path, legacy_opts=True)


def test_d9_the_rate_is_scaled_once(capfd: pytest.CaptureFixture[str]) -> None:
    data = hvd.dataset(np.zeros((64, 2), np.float32), np.zeros((64, 1), np.float32), batch_per_rank=8)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), lr_scale="linear", base_batch=4), "mse")
    for _ in range(2):
        model.fit(data, epochs=1, verbose=0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 * 2 * hvd.size())
    if hvd.rank() == 0:
        lines = capfd.readouterr().err
        assert lines.count(f"lr 0.1 x {2 * hvd.size()} (linear: global batch {8 * hvd.size()} / base 4)") == 1


def test_bad_arguments() -> None:
    sgd = keras.optimizers.SGD(0.1)
    with pytest.raises(UsageError, match="'sqrt'"):
        hvd.DistributedOptimizer(sgd, lr_scale="cubic")
    with pytest.raises(UsageError, match="base_batch"):
        hvd.DistributedOptimizer(sgd, lr_scale="linear")
    with pytest.raises(UsageError, match="distributed already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd))
    with pytest.raises(UsageError, match=r"keras\.optimizers"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(UsageError, match="Average or"):
        hvd.DistributedOptimizer(sgd, op=2)
    with pytest.raises(UsageError, match="schedule"):
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
        hvd.DistributedOptimizer(keras.optimizers.SGD(schedule), lr_scale="linear", base_batch=1, global_batch=2)
    unknown = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), lr_scale="linear", base_batch=1)
    with pytest.raises(UsageError, match="needs the global batch"):
        unknown.apply([tf.ones((2, 2))], [variable()])
