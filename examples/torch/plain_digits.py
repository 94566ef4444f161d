"""The handwritten digits of scikit-learn in plain PyTorch, one process.

    python examples/torch/plain_digits.py

The same script on any number of processes is digits.py beside it; `diff` the two to see what it costs.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()

torch.manual_seed(1)
images, labels = load_digits(return_X_y=True)
parts = train_test_split(images.astype(np.float32) / 16, labels, test_size=0.2, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = map(torch.as_tensor, parts)

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True)

for epoch in range(args.epochs):
    loss_sum, count = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        loss_sum, count = loss_sum + loss.item() * len(x), count + len(x)
    with torch.no_grad():
        right = int((model(x_test).argmax(1) == y_test).sum())
    print(f"epoch {epoch + 1:3d}  loss {loss_sum / count:.4f}  test accuracy {right / len(y_test):.4f}")
