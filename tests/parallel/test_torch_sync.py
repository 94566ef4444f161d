"""``check_in_sync`` and the signature: what differs between ranks is found and named, on every rank."""

from __future__ import annotations

import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.errors import OutOfSyncError, UsageError
from hvdkit.torch.collectives import broadcast_tensors, on_rank0
from hvdkit.torch.sync import quick_digest

hvd.init()
LAST = hvd.size() - 1
several = pytest.mark.skipif(hvd.size() == 1, reason="one process is in step with itself")


def net(*, width: int = 2, bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3, bias=bias), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, width))


def test_equal_models_pass_quietly() -> None:
    hvd.check_in_sync(net())
    hvd.check_in_sync({"a": torch.tensor(float("nan")), "b": torch.empty(0), "c": torch.tensor(True)})
    hvd.check_in_sync(torch.arange(5))
    hvd.check_in_sync(torch.optim.SGD(net().parameters(), lr=0.1))


@several
def test_first_differing_weight_is_named_on_every_rank() -> None:
    model = net()
    if hvd.rank() == LAST:
        with torch.no_grad():
            model[2].weight[0, 0] += 1e-6
            model[2].bias[0] += 1
    with pytest.raises(OutOfSyncError, match=rf"the student.*weight '2.weight'.*rank {LAST}"):
        hvd.check_in_sync(model, "the student")


@several
def test_g7_buffers_are_told_from_weights() -> None:
    model = net()
    if hvd.rank() == 0:
        model[1].running_mean += 1
    with pytest.raises(OutOfSyncError, match=r"buffer '1.running_mean'.*rank 0: "):
        hvd.check_in_sync(model)


@several
@pytest.mark.parametrize("kind", ["shape", "dtype", "missing"])
def test_f3_other_models_are_named_with_both_values(kind: str) -> None:
    odd = hvd.rank() == LAST
    model = net(width=3 if odd and kind == "shape" else 2, bias=not (odd and kind == "missing"))
    if odd and kind == "dtype":
        model.double()
    expected = {
        "shape": r"'2.weight' is .*\(2, 3\) float32.*\(3, 3\) float32",
        "dtype": r"'0.weight' is .*float32.*float64",
        "missing": r"'0.bias' is .*\(3,\) float32.*absent",
    }
    with pytest.raises(OutOfSyncError, match=expected[kind]):
        hvd.check_in_sync(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OutOfSyncError, match=expected[kind]):
        hvd.DistributedOptimizer(optimizer, model=model)
    with pytest.raises(OutOfSyncError):
        hvd.broadcast_parameters(model.state_dict(), 0)


@several
def test_f3_other_optimizer_and_settings() -> None:
    model = net()
    kind = torch.optim.Adam if hvd.rank() == LAST else torch.optim.SGD
    with pytest.raises(OutOfSyncError, match=r"optimizer class is .*SGD.*Adam"):
        hvd.DistributedOptimizer(kind(model.parameters(), lr=0.1))
    passes = 2 if hvd.rank() == LAST else 1
    with pytest.raises(OutOfSyncError, match=r"backward_passes_per_step is .*: 1;.*: 2"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=passes)


@several
def test_d8_rates_that_differ_are_named() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1 if hvd.rank() == 0 else 0.2)
    with pytest.raises(OutOfSyncError, match=r"option 'lr' of group 0 is rank 0: 0\.1"):
        hvd.check_in_sync(optimizer)


@several
def test_optimizer_state_that_differs_is_named() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.full((5, 4), float(hvd.rank()))).sum().backward()
    with torch.no_grad():
        [p.grad.add_(hvd.rank()) for p in model.parameters()]
    optimizer.step()
    with pytest.raises(OutOfSyncError, match="state 'momentum_buffer' of parameter 0"):
        hvd.check_in_sync(optimizer)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UsageError, match="takes a module"):
        hvd.check_in_sync([1, 2])


DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int16, torch.float16, torch.uint8)


def test_broadcast_is_exact_for_every_dtype_and_layout() -> None:
    torch.manual_seed(hvd.rank())
    tensors = [(torch.randn(3, 4) * 9).to(dtype) for dtype in DTYPES]
    tensors += [torch.randn(4, 6).t(), torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)]
    tensors += [torch.tensor(float(hvd.rank())), torch.empty(0), torch.nn.Parameter(torch.randn(7))]
    hvd.broadcast_parameters([(f"t{i}", t) for i, t in enumerate(tensors)], LAST)
    torch.manual_seed(LAST)
    assert torch.equal(tensors[0], (torch.randn(3, 4) * 9).double())
    assert tensors[8].is_contiguous(memory_format=torch.channels_last)
    hvd.check_in_sync({str(i): t for i, t in enumerate(tensors)})


def test_broadcast_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdkit.torch.collectives._CHUNK_BYTES", 100)
    tensors = [torch.full((n,), float(hvd.rank())) for n in (3, 40, 1, 24, 2)]
    broadcast_tensors(tensors, 0)
    assert all(bool((t == 0).all()) for t in tensors)


def test_quick_digest_sees_one_bit() -> None:
    weights = [torch.zeros(3), torch.ones(5, dtype=torch.bfloat16), torch.tensor(2.0)]
    before = quick_digest(weights, [0.1])
    assert quick_digest([w.clone() for w in weights], [0.1]) == before
    assert quick_digest(weights, [0.2]) != before
    weights[0].view(torch.int32)[1] = 1
    assert quick_digest(weights, [0.1]) != before


def test_an_error_on_rank_0_is_raised_by_all() -> None:
    def fail() -> None:
        raise UsageError("no room")

    with pytest.raises(UsageError, match="no room"):
        on_rank0(fail)
    assert on_rank0(lambda: hvd.rank()) == 0
