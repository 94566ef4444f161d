"""A script in the manner of Horovod's own torch examples: only its import line decides whether it is hvdkit's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

IMPORTS = ["horovod.torch", "hvdkit.torch"]

# Two trainings. The first has the calls of a small example, the second those of a long run: gradients summed over
# sub-batches (the last window of an epoch is short), a rate set in every group, clipping between synchronize() and
# step(), and a restart from a file that only rank 0 reads.
SCRIPT = """
import json
import sys
import torch
import torch.nn.functional as F
import torch.utils.data.distributed
import {module} as hvd

out = sys.argv[1]


def make(hidden):
    return torch.nn.Sequential(torch.nn.Linear(5, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.ReLU(),
                               torch.nn.Linear(hidden, 3))


def average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


hvd.init()
torch.manual_seed(42 + hvd.rank())  # ranks start apart, so a broadcast that does nothing shows
torch.set_num_threads(1)
numbers = torch.Generator().manual_seed(0)
x = torch.randn(46, 5, generator=numbers)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
data = torch.utils.data.TensorDataset(x, y)
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
report = {{"rank": hvd.rank(), "size": hvd.size()}}


def record(name, model):
    report[name] = [p.detach().flatten().tolist() for p in model.parameters()]


def short_training(name, seed, **settings):
    torch.manual_seed(seed)
    model = make(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **settings)
    for epoch in range(1, 4):
        model.train()
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
    model.eval()
    report[name + " loss"] = average(F.cross_entropy(model(x), y).item(), "avg_loss")
    record(name, model)


short_training("average", 42 + hvd.rank(), compression=hvd.Compression.none, op=hvd.Average,
               gradient_predivide_factor=1.0)
short_training("fp16", 7 + hvd.rank(), compression=hvd.Compression.fp16, op=hvd.Average, gradient_predivide_factor=2.0)
short_training("adasum", 9 + hvd.rank(), op=hvd.Adasum)

start = hvd.broadcast(torch.tensor(2 if hvd.rank() == 0 else 0), root_rank=0, name="resume_from_epoch").item()
report["start"] = start
model = make(6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                     compression=hvd.Compression.none, backward_passes_per_step=2, op=hvd.Average)
if hvd.rank() == 0:
    saved = make(6)
    other = torch.optim.SGD(saved.parameters(), lr=0.07, momentum=0.9, weight_decay=1e-3)
    F.cross_entropy(saved(x), y).backward()
    other.step()
    torch.save({{"model": saved.state_dict(), "optimizer": other.state_dict()}}, out + ".start")
    state = torch.load(out + ".start")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
report["restored momentum"] = sorted(
    round(v["momentum_buffer"].sum().item(), 6) for v in optimizer.state_dict()["state"].values())
report["rate"] = optimizer.param_groups[0]["lr"]
for epoch in range(start, 5):
    sampler.set_epoch(epoch)
    for step, (inputs, target) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * hvd.size() * (epoch + (step + 1) / len(loader)) / 5
        optimizer.zero_grad()
        for i in range(0, len(inputs), 4):
            loss = F.cross_entropy(model(inputs[i:i + 4]), target[i:i + 4])
            loss.div_(2)
            loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
record("long", model)
everywhere = hvd.allgather(torch.tensor([[float(hvd.rank())]]), name="ranks")
report["gathered"] = everywhere.flatten().tolist()
with open(out + str(hvd.rank()), "w") as file:
    json.dump(report, file)
"""


@pytest.fixture(scope="module")
def reports(hvdkit_run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks wrote down, for each import line."""
    found = {}
    for module in IMPORTS:
        folder: Path = tmp_path_factory.mktemp(module.replace(".", "_"))
        (folder / "script.py").write_text(SCRIPT.format(module=module))
        words = ["-np", "2", "--", "python", str(folder / "script.py"), str(folder / "report")]
        done = hvdkit_run(*words, timeout_s=240)
        assert done.returncode == 0, done.stdout + done.stderr
        found[module] = [json.loads((folder / f"report{rank}").read_text()) for rank in range(2)]
    return found


@pytest.mark.parametrize("training", ["average", "fp16", "adasum", "long"])
def test_import_line_does_not_change_the_weights(reports: Any, training: str) -> None:
    before, after = (reports[module] for module in IMPORTS)
    assert after[0][training] == after[1][training], "hvdkit's ranks must agree, bit for bit"
    for old, new in zip(before[0][training], after[0][training], strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fact", ["size", "start", "restored momentum", "rate", "gathered"])
def test_what_ranks_see_is_the_same(reports: Any, fact: str) -> None:
    values = [report[fact] for module in IMPORTS for report in reports[module]]
    assert all(value == values[0] for value in values), values
    assert reports["hvdkit.torch"][1]["size"] == 2 and reports["hvdkit.torch"][1]["start"] == 2


def test_averaged_metric_is_the_same(reports: Any) -> None:
    before, after = (reports[module] for module in IMPORTS)
    for name in ("average loss", "fp16 loss", "adasum loss"):
        assert after[0][name] == after[1][name]
        assert abs(after[0][name] - before[0][name]) < 1e-6
