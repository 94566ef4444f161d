"""``hvdkit.torch`` as a drop-in: its names, ``init()`` and what only rank 0 does."""

from __future__ import annotations

import random

import horovod.torch
import numpy as np
import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.errors import UsageError, WorldError
from hvdkit.torch import runtime

WORLD = hvd.init()


def test_every_name_of_horovod_is_there() -> None:
    names = {name for name in dir(horovod.torch) if not name.startswith("_")}
    assert names <= set(dir(hvd))
    assert names <= set(hvd.__all__)
    # one of our own files has the name of one of Horovod's
    same = names - hvd.FIXED_NAMES.keys() - {"optimizer"}
    assert {name for name in same if getattr(hvd, name) is not getattr(horovod.torch, name)} == set()


def test_fixed_names_are_ours() -> None:
    for name in hvd.FIXED_NAMES:
        assert getattr(hvd, name) is not getattr(horovod.torch, name)
        assert getattr(hvd, name).__module__.startswith("hvdkit.")


def test_init_again_is_the_same_world() -> None:
    assert hvd.init() is WORLD
    assert hvd.world() is WORLD
    assert (WORLD.rank, WORLD.size) == (hvd.rank(), hvd.size())
    assert WORLD.is_main == (hvd.rank() == 0)
    assert isinstance(WORLD.device, torch.device)


def test_without_init_there_is_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_world", None)
    with pytest.raises(WorldError, match=r"hvd\.init\(\)"):
        hvd.world()


def test_b5_another_size_than_declared_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_world", None)
    monkeypatch.setenv("HOROVOD_SIZE", str(hvd.size() + 1))
    with pytest.raises(WorldError, match=rf"{hvd.size()} process.*declared {hvd.size() + 1}"):
        hvd.init()


def test_seed_differs_by_rank_and_is_the_plain_one_on_rank_0() -> None:
    hvd.init(seed=3)
    drawn = (random.random(), float(np.random.random()), float(torch.rand(())))
    every = hvd.gather_objects(drawn)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    assert every[0] == (random.random(), float(np.random.random()), float(torch.rand(())))
    assert len(set(every)) == hvd.size()
    hvd.init(seed=3)
    assert (random.random(), float(np.random.random()), float(torch.rand(()))) == drawn


@pytest.mark.parametrize("seed", [-1, 1.5, True])
def test_bad_seed(seed: object) -> None:
    with pytest.raises(UsageError, match="seed="):
        hvd.init(seed=seed)  # type: ignore[arg-type]


def test_g6_only_rank_0_prints(capfd: pytest.CaptureFixture[str]) -> None:
    hvd.print_on_rank0("step", 3)
    lines = hvd.gather_objects(capfd.readouterr().out.strip())
    assert lines == ["step 3"] + [""] * (hvd.size() - 1)


def test_progress_gives_the_items_on_every_rank() -> None:
    assert list(hvd.progress(range(5), "items")) == [0, 1, 2, 3, 4]
    assert list(hvd.progress(iter("ab"))) == ["a", "b"]


def test_g5_gather_of_unequal_objects() -> None:
    mine = {"rank": hvd.rank(), "rows": list(range(hvd.rank() * 3)), "name": "x" * hvd.rank()}
    every = hvd.gather_objects(mine)
    assert [e["rank"] for e in every] == list(range(hvd.size()))
    assert [len(e["rows"]) for e in every] == [3 * r for r in range(hvd.size())]
