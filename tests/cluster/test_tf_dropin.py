"""Scripts in the manner of Horovod's own TensorFlow 2 examples, with hvdkit's import line: a Keras fit and a loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# The rates of the loop are given per rank, as examples scale them, so that every number of ranks ends with one rate.
SCRIPT = """
import json
import os
import sys
import numpy as np
import tensorflow as tf
import hvdkit.tf as hvd
import hvdkit.tf.keras as khvd

out, rate = sys.argv[1], float(sys.argv[2])
hvd.init()
tf.keras.utils.set_random_seed(5 + hvd.rank())  # ranks start apart, so a broadcast that does nothing shows
numbers = np.random.default_rng(0)
x = numbers.normal(size=(64, 6, 6, 1)).astype("float32")
y = (x.mean((1, 2, 3)) > 0).astype("int64")
report = {"rank": hvd.rank(), "size": hvd.size()}


def make(dropout):
    return tf.keras.Sequential([
        tf.keras.layers.Conv2D(3, [3, 3], activation="relu"), tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(dropout), tf.keras.layers.Flatten(), tf.keras.layers.Dense(2, activation="softmax")])


def plain(model):
    return [v.flatten().tolist() for v in model.get_weights()]


# A loop, each rank on its share of every batch of 16.
share = 16 // hvd.size()
place = np.arange(len(x)).reshape(-1, hvd.size(), share)[:, hvd.rank()].ravel()
batches = tf.data.Dataset.from_tensor_slices((x[place], y[place])).repeat().batch(share)
model = make(0.0)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.SGD(rate * hvd.size(), momentum=0.5)
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)
model.build((None, 6, 6, 1))
if hvd.rank() == 0:  # the start of rank 0 is that of every run, and no other rank's
    model.set_weights([np.random.default_rng(i).normal(size=w.shape) * 0.3 for i, w in enumerate(model.get_weights())])
hvd.broadcast_variables(model.variables, root_rank=0)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.none)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


for batch, (images, labels) in enumerate(batches.take(10)):
    loss_value = training_step(images, labels, batch == 0)
report["loop"] = plain(model)
report["loop optimizer"] = [v.numpy().flatten().tolist() for v in opt.variables]
if hvd.rank() == 0:
    checkpoint.save(out + "-loop")

# The same loop for a model that is built inside the first step, as examples build theirs.
model = make(0.0)
opt = tf.optimizers.Adam(0.01)
late_step = tf.function(training_step.python_function)
for batch, (images, labels) in enumerate(batches.take(4)):
    late_step(images, labels, batch == 0)
report["late loop"] = plain(model)
report["late loop optimizer"] = [v.numpy().flatten().tolist() for v in opt.variables]

# A fit, each rank on an order of its own.
data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(64).batch(8)
model = make(0.25)
opt = khvd.DistributedOptimizer(tf.optimizers.Adam(0.01 * khvd.size()), backward_passes_per_step=1,
                                average_aggregated_gradients=True, compression=khvd.Compression.none)
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
callbacks = [
    khvd.callbacks.BroadcastGlobalVariablesCallback(0),
    khvd.callbacks.MetricAverageCallback(),
    khvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * khvd.size(), warmup_epochs=2, verbose=1),
]
if khvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(out + "-{epoch}.keras"))
verbose = 1 if khvd.rank() == 0 else 0
history = model.fit(data, steps_per_epoch=8 // khvd.size(), callbacks=callbacks, epochs=3, verbose=verbose)
report["fit"] = plain(model)
report["history"] = history.history
if khvd.rank() == 0:
    report["saved"] = plain(khvd.load_model(out + "-3.keras"))
with open(out + str(hvd.rank()), "w") as file:
    json.dump(report, file)
"""


@pytest.fixture(scope="module")
def reports(hvdkit_run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every rank wrote down, for one process and for two."""
    found = {}
    for ranks, rate in ((1, "0.1"), (2, "0.05")):
        folder: Path = tmp_path_factory.mktemp(f"ranks{ranks}-")
        (folder / "script.py").write_text(SCRIPT)
        words = ["-np", str(ranks), "--", "python", str(folder / "script.py"), str(folder / "report"), rate]
        done = hvdkit_run(*words, timeout_s=300)
        assert done.returncode == 0, done.stdout + done.stderr
        found[ranks] = [json.loads((folder / f"report{rank}").read_text()) for rank in range(ranks)]
    return found


@pytest.mark.parametrize("training", ["loop", "loop optimizer", "late loop", "late loop optimizer", "fit", "history"])
def test_ranks_agree(reports: Any, training: str) -> None:
    first, second = reports[2]
    assert (first["size"], second["rank"]) == (2, 1)
    assert first[training] == second[training]


@pytest.mark.parametrize("training", ["loop", "loop optimizer"])
def test_loop_on_two_ranks_ends_as_on_one(reports: Any, training: str) -> None:
    for one, two in zip(reports[1][0][training], reports[2][0][training], strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)


def test_warmup_ends_at_the_scaled_rate(reports: Any) -> None:
    for ranks, told in reports.items():
        rates = told[0]["history"]["lr"]
        assert rates[1:] == pytest.approx([0.01 * ranks] * 2)
        assert rates[0] == pytest.approx(0.01 * (ranks + 1) / 2)


def test_rank_0_saved_the_weights_that_all_have(reports: Any) -> None:
    for told in reports.values():
        assert told[0]["saved"] == told[-1]["fit"]
