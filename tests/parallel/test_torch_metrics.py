"""Reduced metrics, buffers and schedules: one value for all ranks, equal to that of one process."""

from __future__ import annotations

import math

import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.errors import CheckpointError, OutOfSyncError, UsageError
from hvdkit.metrics import Accuracy, Confusion, Mean

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
several = pytest.mark.skipif(SIZE == 1, reason="one process agrees with itself")


def test_g1_sums_are_divided_not_means_averaged() -> None:
    """Rank 0: 3 right of 4; the last rank: 0 right of 1 (with one process both)."""
    accuracy, loss = Accuracy(), Mean()
    if RANK == 0:
        accuracy.update([1, 1, 1, 0], [1, 1, 1, 1])
        loss.update(2.0, 4)
    if RANK == SIZE - 1:
        accuracy.update([0], [1])
        loss.update(7.0, 1)
    values = hvd.reduce_metrics({"accuracy": accuracy, "loss": loss, "pair": (RANK + 1, 2)})
    assert values == {"accuracy": 0.6, "loss": 3.0, "pair": pytest.approx((SIZE + 1) / 4)}
    assert hvd.reduce_metrics(accuracy) == 0.6  # this rank's sums are as they were
    hvd.check_in_sync(torch.tensor([values["accuracy"], values["loss"]]))


def test_g1_no_items_is_nan_and_g3_confusion_is_pooled() -> None:
    assert math.isnan(hvd.reduce_metrics(Mean()))
    assert math.isnan(hvd.reduce_metrics((0.0, 0)))
    confusion = Confusion(2)
    confusion.update([RANK % 2, 1], [1, 1])
    total = hvd.reduce_metrics(confusion)
    assert total.sum() == 2 * SIZE and total[1, 0] == (SIZE + 1) // 2


def test_a_bare_mean_is_refused() -> None:
    with pytest.raises(UsageError, match="'loss' is a float"):
        hvd.reduce_metrics({"loss": 0.5})


@several
def test_other_metrics_are_found() -> None:
    with pytest.raises(OutOfSyncError, match="reduce_metrics"):
        hvd.reduce_metrics({f"m{RANK}": (1, 1)})


def test_g7_buffers_are_averaged() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2, affine=False))
    for _ in range(3):
        model[0](torch.randn(8, 2) + 10.0 * RANK)
    model[0].num_batches_tracked.fill_(3 + RANK)
    means = hvd.gather_objects(model[0].running_mean.double())
    untouched = {name: b.clone() for name, b in model[1].named_buffers()}
    hvd.average_buffers(model)
    hvd.check_in_sync(model)
    torch.testing.assert_close(model[0].running_mean.double(), torch.stack(means).mean(0))
    assert int(model[0].num_batches_tracked) == 3
    assert all(torch.equal(b, untouched[name]) for name, b in model[1].named_buffers())
    hvd.average_buffers(torch.nn.Linear(2, 2))


def optimizer(lr: float = 0.1, **options: object) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": lr}, {"params": [model.bias], "lr": lr / 10}]
    return hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=lr), **options)


def rates(opt: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[list[float]]:
    seen = []
    for _ in range(steps):
        seen.append([g["lr"] for g in opt.param_groups])
        opt.step()
        schedule.step()
    return seen


def test_d9_rate_fresh_and_resumed_is_one_formula() -> None:
    """Base 0.1, scaled by 4, warm-up 5 steps, total 20: steps 3, 7 and 19; groups keep their ratio."""
    settings = {"steps_per_epoch": 5, "warmup_epochs": 1, "decay": "polynomial", "epochs": 4}
    scale = {"lr_scale": "linear", "base_batch": 16, "global_batch": 64}
    opt = optimizer(**scale)
    schedule = hvd.LRSchedule(opt, **settings)
    fresh = rates(opt, schedule, 20)
    assert fresh[0] == pytest.approx([0.1, 0.01])
    assert fresh[3] == pytest.approx([0.1 + 0.3 * 3 / 5, 0.01 + 0.03 * 3 / 5])
    assert fresh[7] == pytest.approx([0.4 * 13 / 15, 0.04 * 13 / 15])
    assert fresh[19] == pytest.approx([0.4 / 15, 0.04 / 15])
    assert schedule.get_last_lr() == pytest.approx([0.0, 0.0])
    for stop in (3, 7, 18):
        opt = optimizer(**scale)
        schedule = hvd.LRSchedule(opt, **settings)
        rates(opt, schedule, stop)
        saved = opt.state_dict(), schedule.state_dict()
        resumed = optimizer(lr=0.7, **scale)
        again = hvd.LRSchedule(resumed, **settings)
        resumed.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        assert rates(resumed, again, 20 - stop) == fresh[stop:]


def test_schedule_follows_the_loaders_batch() -> None:
    opt = optimizer(lr_scale="sqrt", base_batch=4, backward_passes_per_step=2)
    loader = hvd.DataLoader(list(range(100)), global_batch=8)
    schedule = hvd.LRSchedule(opt, loader, warmup_epochs=1)
    assert schedule.schedule.scaling.factor == 2.0  # global batch 8, accumulated over 2
    assert schedule.schedule.steps_per_epoch == 7  # 13 batches
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1)


def test_d9_schedule_goes_on_at_the_same_part_of_training_with_another_batch() -> None:
    opt = optimizer()
    schedule = hvd.LRSchedule(opt, steps_per_epoch=10, decay="cosine", epochs=4)
    rates(opt, schedule, 20)
    half = hvd.LRSchedule(optimizer(), steps_per_epoch=5, decay="cosine", epochs=4)
    half.load_state_dict(schedule.state_dict())
    assert half.last_epoch == 10
    assert half.get_last_lr() == pytest.approx(schedule.get_last_lr())


def test_schedule_of_a_plain_optimizer() -> None:
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = hvd.LRSchedule(opt, steps_per_epoch=2, decay="exponential", gamma=0.25)
    assert [r[0] for r in rates(opt, schedule, 3)] == pytest.approx([0.5, 0.25, 0.125])


def test_bad_schedules() -> None:
    opt = optimizer(lr_scale="linear", base_batch=4)
    loader = hvd.DataLoader(list(range(100)), global_batch=8)
    with pytest.raises(UsageError, match="either a loader or steps_per_epoch"):
        hvd.LRSchedule(opt)
    with pytest.raises(UsageError, match="either a loader or steps_per_epoch"):
        hvd.LRSchedule(opt, loader, steps_per_epoch=3)
    with pytest.raises(UsageError, match="needs the global batch"):
        hvd.LRSchedule(opt, steps_per_epoch=3)
    with pytest.raises(UsageError, match="decay='cosine'"):
        hvd.LRSchedule(opt, loader, decay="cosine")
    schedule = hvd.LRSchedule(opt, loader)
    with pytest.raises(CheckpointError, match="1 groups, the optimizer 2"):
        schedule.load_state_dict({"step": 1, "base_lrs": [0.1], "schedule": {"steps_per_epoch": 3}})
