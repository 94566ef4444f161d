"""The handwritten digits of scikit-learn in PyTorch, on any number of processes.

    python examples/torch/digits.py
    hvdkit run --hostfile hostfiles/localhost -- python examples/torch/digits.py

The same script for one process is plain_digits.py beside it; `diff` the two to see what it costs.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

import hvdkit.torch as hvd
from hvdkit.metrics import Accuracy, Mean

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--checkpoints", help="folder to save to after each epoch and to go on from")
parser.add_argument("--report", help="write what was measured to this JSON file")
args = parser.parse_args()

world = hvd.init(seed=1)
images, labels = load_digits(return_X_y=True)
parts = train_test_split(images.astype(np.float32) / 16, labels, test_size=0.2, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = (torch.as_tensor(part) for part in parts)

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(world.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = hvd.DataLoader(TensorDataset(x_train, y_train), batch_per_rank=32, seed=1)
test_loader = hvd.DataLoader(TensorDataset(x_test, y_test), batch_per_rank=128, train=False)
optimizer = hvd.DistributedOptimizer(optimizer, model=model, loader=loader, lr_scale="linear", base_batch=32)
schedule = hvd.LRSchedule(optimizer, loader, warmup_epochs=min(2, args.epochs // 2), decay="cosine", epochs=args.epochs)
run = hvd.TrainingState(args.checkpoints, model=model, optimizer=optimizer, schedule=schedule, loader=loader)
run.restore()

history, start = [], time.perf_counter()
for epoch in run.epochs(args.epochs):
    loss_mean, accuracy = Mean(), Accuracy()
    for x, y in loader:
        x, y = x.to(world.device), y.to(world.device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        loss_mean.update(loss.item(), loader.count)
    with torch.no_grad():
        for x, y in test_loader:
            accuracy.update(model(x.to(world.device)).cpu(), y)
    values = hvd.reduce_metrics({"loss": loss_mean, "accuracy": accuracy})
    history.append(values)
    hvd.print_on_rank0(f"epoch {epoch + 1:3d}  loss {values['loss']:.4f}  test accuracy {values['accuracy']:.4f}")
    run.save()
seconds = time.perf_counter() - start

hvd.check_in_sync(model)
if args.report and world.is_main:
    report = {"ranks": world.size, "seconds": seconds, "samples": len(x_train) * len(history), "history": history}
    Path(args.report).write_text(json.dumps(report))
