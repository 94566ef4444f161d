"""``TrainingState``: a run that stopped goes on as if it had not, and all ranks follow rank 0."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hvdkit.torch as hvd
from hvdkit.errors import CheckpointError, UsageError

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
SAMPLES, BATCH = 22 * SIZE, 4 * SIZE  # 5 full batches and one of 2 per rank: batch normalisation cannot train on 1
STEPS = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rank 0's folder, on every rank."""
    return Path(hvd.broadcast_object(str(tmp_path), 0))


class Run:
    """A training with everything that has a state: momentum, dropout, moving statistics, a schedule, shuffled data."""

    def __init__(self, folder: Path, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
        hvd.init(seed=5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 3)
        )
        self.optimizer = hvd.DistributedOptimizer(
            kind(self.model.parameters(), lr=0.1, weight_decay=0.1), model=self.model, lr_scale="sqrt", base_batch=2
        )
        generator = torch.Generator().manual_seed(3)
        data = list(torch.randn(SAMPLES, 4, generator=generator))
        self.loader = hvd.DataLoader(data, global_batch=BATCH, seed=1)
        self.schedule = hvd.LRSchedule(self.optimizer, self.loader, warmup_epochs=1, decay="cosine", epochs=4)
        self.state = hvd.TrainingState(
            folder, model=self.model, optimizer=self.optimizer, schedule=self.schedule, loader=self.loader, **options
        )

    def train(self, epochs: int, save_at: int = 0, stop_at: int = 0) -> Run:
        """Train up to ``epochs``; save after step ``save_at`` and leave after step ``stop_at``."""
        for _ in self.state.epochs(epochs):
            for x in self.loader:
                self.optimizer.zero_grad()
                noise = torch.from_numpy(np.random.standard_normal(x.shape)).float() * random.random() * 0.01
                F.cross_entropy(self.model(x + noise), (x[:, 0] > 0).long()).backward()
                self.optimizer.step()
                self.schedule.step()
                if self.state.step == save_at:
                    self.state.save()
                if self.state.step == stop_at:
                    return self
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        hvd.average_buffers(self.model)
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("stop", ["in the first epoch", "at an end", "in the last epoch"])
def test_c6_d1_resume_is_bit_exact(folder: Path, kind: type[torch.optim.Optimizer], stop: str) -> None:
    at = {"in the first epoch": 2, "at an end": 2 * STEPS, "in the last epoch": 3 * STEPS - 1}[stop]
    expected = Run(folder / "whole", kind).train(3, save_at=at).weights()
    Run(folder / "parts", kind).train(3, save_at=at, stop_at=at)
    torch.manual_seed(99), random.seed(RANK), np.random.seed(7)
    resumed = Run(folder / "parts", kind)
    with torch.no_grad():
        resumed.model[0].weight.add_(RANK)
    assert resumed.state.restore()
    assert resumed.state.step == at
    assert resumed.loader.position == resumed.loader.plan.position(*divmod(at, STEPS))
    resumed.train(3)
    weights = resumed.weights()
    assert {name: torch.equal(weights[name], value) for name, value in expected.items()} == dict.fromkeys(
        expected, True
    )
    hvd.check_in_sync(resumed.optimizer)


def test_d9_resumed_rate_is_scaled_once(folder: Path) -> None:
    run = Run(folder).train(2, save_at=3, stop_at=5)
    expected = [run.optimizer.param_groups[0]["lr"]]
    again = Run(folder)
    again.state.restore()
    again.train(2, stop_at=5)
    assert [again.optimizer.param_groups[0]["lr"]] == expected
    assert again.schedule.base_lrs == [0.1]


def test_epochs_left(folder: Path) -> None:
    run = Run(folder)
    assert list(run.state.epochs(0)) == []
    for epoch in run.state.epochs(2):
        for _ in run.loader:
            pass
        if epoch == 0:
            run.state.save()
    again = Run(folder)
    again.state.restore()
    assert again.state.epoch == 1
    assert list(again.state.epochs(4)) == [1, 2, 3]  # a body that does not touch the loader ends as well
    with pytest.raises(UsageError, match="count=-1"):
        list(again.state.epochs(-1))


def test_without_a_loader_epochs_are_counted(folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    state = hvd.TrainingState(folder, model=model)
    for epoch in state.epochs(5):
        if epoch == 2:
            state.save()
            break
    again = hvd.TrainingState(folder, model=model)
    assert again.restore()
    assert list(again.epochs(5)) == [3, 4]


def test_f8_loads_with_torchs_default(folder: Path) -> None:
    run = Run(folder).train(1, save_at=2, stop_at=2)
    if RANK == 0:
        path = sorted(folder.glob("step-*.ckpt"))[0]
        payload = torch.load(path)
        assert payload["step"] == 2 and len(payload["random"]) == SIZE
        assert payload["parts"].keys() == {"model", "optimizer", "schedule", "loader"}
    hvd.barrier()
    drawn = (random.random(), float(np.random.random()), torch.rand(3).tolist())
    run.state.restore()
    assert (random.random(), float(np.random.random()), torch.rand(3).tolist()) == drawn


def test_f5_a_broken_newest_file_is_passed_over(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(folder)
    run.train(1, save_at=1, stop_at=1)
    run.train(1, save_at=3, stop_at=3)
    newest = run.state.folder.newest_good() if RANK == 0 else None
    if RANK == 0:
        assert newest is not None and newest[0] == 3
        newest[1].write_bytes(newest[1].read_bytes()[: newest[1].stat().st_size // 2])
    again = Run(folder)
    assert again.state.restore()
    assert again.state.step == 1
    hvd.check_in_sync(again.model)


def test_f7_only_rank_0s_disk_counts(tmp_path: Path) -> None:
    """Each rank has its own folder; first only rank 0's is filled, then only the others' are."""
    own = tmp_path / f"rank{RANK}"
    Run(own).train(1, save_at=2, stop_at=2)
    assert own.exists() == (RANK == 0)
    again = Run(own)
    assert again.state.restore()
    assert again.state.step == 2
    other = Run(own if RANK > 0 else tmp_path / "empty")
    if RANK > 0:
        own.mkdir(exist_ok=True)
        (own / "step-000000000009-00000000.ckpt").write_bytes(b"not for us")
    assert not other.state.restore()
    assert other.state.step == 0


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(folder: Path) -> None:
    Run(folder).train(1, save_at=1, stop_at=1)
    with pytest.raises(CheckpointError, match=r"the model in .* does not fit"):
        hvd.TrainingState(folder, model=torch.nn.Linear(3, 3)).restore()
    run = Run(folder)
    run.state.parts["loader"] = hvd.DataLoader(list(range(SAMPLES + 1)), global_batch=BATCH, seed=1)
    with pytest.raises(CheckpointError, match=rf"the loader in .*length={SAMPLES}"):
        run.state.restore()


def test_a_folder_that_cannot_be_written_fails_on_every_rank(folder: Path) -> None:
    (folder / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Run(folder / "file" / "below").train(1, save_at=1)


def test_foreign_bytes_are_refused(folder: Path) -> None:
    run = Run(folder)
    if RANK == 0:
        run.state.folder.write(4, b"these are no tensors")
    hvd.barrier()
    with pytest.raises(CheckpointError, match="not a checkpoint of tensors"):
        run.state.restore()


def test_keep_and_best_and_others(folder: Path) -> None:
    run = Run(folder, keep=1, best="max", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    for step, metric in ((1, 0.9), (2, 0.3), (3, 0.5)):
        run.train(1, stop_at=step)
        run.state.save(metric)
    if RANK == 0:
        assert [step for step, _ in run.state.folder.steps()] == [1, 3]
    again = Run(folder, scaler=torch.amp.GradScaler("cpu", init_scale=99.0))
    assert again.state.restore()
    assert again.state.parts["scaler"].get_scale() == 4.0
