"""``SyncBatchNorm`` on the CPU: N ranks normalise, and learn, as one process does on the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.torch.batch import Batch, set_current

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()


def net(norm: Any) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv1d(2, 3, 1), norm(3), torch.nn.Tanh(), torch.nn.Conv1d(3, 1, 1)).double()


@pytest.mark.parametrize("count", [4 * SIZE, 2 * SIZE + 1, 1])
def test_g7_equals_one_process(count: int) -> None:
    """Unequal parts and a rank without samples (which gets fillers) included."""
    model, reference = net(hvd.SyncBatchNorm), net(torch.nn.BatchNorm1d)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(count, 2, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        parts = x.tensor_split(SIZE)
        set_current(Batch([len(p) for p in parts], RANK, count))
        optimizer.zero_grad()
        (model(parts[RANK] if len(parts[RANK]) else x[:2] * 7) - 1).pow(2).mean().backward()
        optimizer.step()
        plain.zero_grad()
        (reference(x) - 1).pow(2).mean().backward()
        plain.step()
    set_current(None)
    hvd.check_in_sync(model)
    for (name, a), b in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=name)
    model.eval(), reference.eval()
    torch.testing.assert_close(model(x), reference(x))
