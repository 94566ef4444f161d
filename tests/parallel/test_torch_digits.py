"""The proof: an MLP on the digits, global batch 50 of 1,797 samples, equals plain torch in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import hvdkit.torch as hvd
from hvdkit.schedule import Scaling, Schedule
from hvdkit.sharding import ShardPlan

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
EPOCHS, BATCH = 2, 50
IMAGES, LABELS = load_digits(return_X_y=True)


def data(dtype: torch.dtype) -> list[tuple[torch.Tensor, int]]:
    return [(torch.from_numpy(x).to(dtype) / 16, int(y)) for x, y in zip(IMAGES, LABELS, strict=True)]


def mlp(dtype: torch.dtype) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(dtype)


def plain(dtype: torch.dtype) -> tuple[torch.nn.Module, list[float]]:
    """One process, plain torch, over the same global batches at the same rates."""
    model = mlp(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    plan = ShardPlan(length=len(LABELS), size=1, rank=0, global_batch=BATCH, seed=1)
    scaling = Scaling("linear", 25, BATCH)
    schedule = Schedule(scaling=scaling, steps_per_epoch=plan.steps, warmup_epochs=1, decay="cosine", epochs=EPOCHS)
    x, y = torch.from_numpy(IMAGES).to(dtype) / 16, torch.from_numpy(LABELS.astype(np.int64))
    losses = []
    for step in range(EPOCHS * plan.steps):
        ids = torch.from_numpy(plan.ids(*divmod(step, plan.steps)))
        optimizer.param_groups[0]["lr"] = 0.1 * schedule.factor(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[ids]), y[ids])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def distributed(dtype: torch.dtype, folder: Path, stop_at: int | None = None) -> tuple[torch.nn.Module, list[float]]:
    model = mlp(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, model=model, lr_scale="linear", base_batch=25, check_every=10)
    loader = hvd.DataLoader(data(dtype), global_batch=BATCH, seed=1)
    schedule = hvd.LRSchedule(optimizer, loader, warmup_epochs=1, decay="cosine", epochs=EPOCHS)
    run = hvd.TrainingState(folder, model=model, optimizer=optimizer, schedule=schedule, loader=loader)
    run.restore()
    sums = []
    for _ in run.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            sums.append(loss.item() * loader.batch.count)
            if run.step == stop_at:
                run.save()
                return model, []
    total = hvd.allreduce(torch.tensor(sums, dtype=torch.float64), op=hvd.Sum)
    sizes = [min(BATCH, len(LABELS) - i) for _ in range(EPOCHS) for i in range(0, len(LABELS), BATCH)]
    return model, (total / torch.tensor(sizes[-len(sums) :])).tolist()


@pytest.fixture(scope="module")
def references() -> dict[torch.dtype, tuple[torch.nn.Module, list[float]]]:
    return {dtype: plain(dtype) for dtype in (torch.float32, torch.float64)}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("stop_at", [None, 7, 36])
def test_loss_of_every_step_equals_one_process(
    dtype: torch.dtype, tolerance: float, stop_at: int | None, references: dict, tmp_path: Path
) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path), 0))
    reference, expected = references[dtype]
    if stop_at is not None:
        distributed(dtype, folder, stop_at)
    model, losses = distributed(dtype, folder)
    assert len(losses) == EPOCHS * 36 - (stop_at or 0)
    np.testing.assert_allclose(losses, expected[stop_at or 0 :], rtol=tolerance)
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        if SIZE == 1:
            assert torch.equal(a, b), name
        else:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=name)
    hvd.check_in_sync(model)
