"""The handwritten digits of scikit-learn in Keras, on any number of processes.

    python examples/tf/digits.py
    hvdkit run --hostfile hostfiles/localhost -- python examples/tf/digits.py

The same script for one process is plain_digits.py beside it; `diff` the two to see what it costs.
"""

import argparse
import json
import time
from pathlib import Path

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.tf.keras as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--checkpoints", help="folder to save to after each epoch and to go on from")
parser.add_argument("--report", help="write what was measured to this JSON file")
args = parser.parse_args()

world = hvd.init(seed=1)
images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)

model = keras.Sequential(
    [keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10, "softmax")]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), lr_scale="linear", base_batch=32)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
data = hvd.dataset(x_train, y_train, batch_per_rank=32, seed=1)
test_data = hvd.dataset(x_test, y_test, batch_per_rank=128, train=False)
start = time.perf_counter()
history = model.fit(
    data,
    epochs=args.epochs,
    validation_data=test_data,
    callbacks=hvd.callbacks.standard(args.checkpoints, warmup_epochs=2),
    verbose=2,
).history
seconds = time.perf_counter() - start

hvd.check_in_sync(model)
if args.report and world.is_main:
    curves = [{"loss": a, "accuracy": b} for a, b in zip(history["loss"], history["val_accuracy"], strict=True)]
    report = {"ranks": world.size, "seconds": seconds, "samples": len(x_train) * len(curves), "history": curves}
    Path(args.report).write_text(json.dumps(report))
