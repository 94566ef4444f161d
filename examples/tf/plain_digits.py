"""The handwritten digits of scikit-learn in plain Keras, one process.

    python examples/tf/plain_digits.py

The same script on any number of processes is digits.py beside it; `diff` the two to see what it costs.
"""

import argparse

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()

keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)

model = keras.Sequential(
    [keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10, "softmax")]
)
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=32, epochs=args.epochs, validation_data=(x_test, y_test), verbose=2)
