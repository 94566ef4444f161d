"""``DistributedOptimizer``: N ranks step as one process does on the global batch, with every optimizer torch has."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hvdkit.torch as hvd
from hvdkit.errors import OutOfSyncError, UsageError
from hvdkit.torch.batch import set_current

WORLD = hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
ROWS = 12 * SIZE  # per step, the same number for every rank
several = pytest.mark.skipif(SIZE == 1, reason="one process has nothing to reduce")


@pytest.fixture(autouse=True)
def _no_batch() -> None:
    """A loop that another test left by ``break`` has its batch still at hand."""
    set_current(None)


def net(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (ROWS,), generator=generator)


def mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(SIZE)[RANK]


def train(model: torch.nn.Module, optimizer: Any, steps: int, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for step in range(steps):
        x, y = data(step)
        optimizer.zero_grad()
        F.cross_entropy(model(part(x)), part(y)).backward()
        optimizer.step()


def assert_same(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    hvd.check_in_sync(model)
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        if SIZE == 1:
            assert torch.equal(a, b), name  # one process is plain torch, bit for bit
        else:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=name)


SPECIAL = {"SparseAdam": "needs sparse gradients", "LBFGS": "needs a closure", "Optimizer": "has no step"}
CLASSES = [
    kind
    for name, kind in sorted(vars(torch.optim).items())
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in SPECIAL
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_optimizer_equals_one_process(kind: type[torch.optim.Optimizer]) -> None:
    models = [net(), net()]
    if kind.__name__ == "Muon":  # takes matrices only
        params = [[p for p in m.parameters() if p.ndim == 2] for m in models]
    else:
        params = [list(m.parameters()) for m in models]
    settings = {"lr": 0.05} | ({"momentum": 0.9, "weight_decay": 0.1} if kind is torch.optim.SGD else {})
    optimizer = hvd.DistributedOptimizer(kind(params[0], **settings), model=models[0])
    assert isinstance(optimizer, kind) and type(optimizer).__name__ == kind.__name__
    train(models[0], optimizer, 4, mine)
    train(models[1], kind(params[1], **settings), 4, lambda t: t)
    assert_same(*models)
    hvd.check_in_sync(optimizer)


def test_lbfgs_and_closures_equal_one_process() -> None:
    models = [net(), net()]
    losses: list[list[float]] = [[], []]
    make = [torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe") for m in models]
    make[0] = hvd.DistributedOptimizer(make[0], model=models[0])
    for which, part in ((0, mine), (1, lambda t: t)):
        for step in range(3):
            x, y = (part(t) for t in data(step))

            def closure(which: int = which, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                make[which].zero_grad()
                loss = F.cross_entropy(models[which](x), y)
                loss.backward()
                return loss

            losses[which].append(make[which].step(closure).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    hvd.check_in_sync(models[0])


def test_setting_up_changes_nothing() -> None:
    model = net(RANK)
    rank0 = copy.deepcopy(net(0).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    assert hvd.DistributedOptimizer(optimizer, model=model) is optimizer
    assert all(torch.equal(value, rank0[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.state) == 0


def test_d3_state_and_class_are_kept() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1, lambda t: t)
    before = copy.deepcopy(optimizer.state_dict())
    optimizer = hvd.DistributedOptimizer(optimizer, model=model)
    after = optimizer.state_dict()
    assert str(before) == str(after)
    optimizer.zero_grad(set_to_none=False)
    assert all(bool((p.grad == 0).all()) for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


def test_d3_load_then_wrap_equals_wrap_then_load() -> None:
    trained = net()
    source = torch.optim.Adam(trained.parameters(), lr=0.01)
    train(trained, source, 2, lambda t: t)
    results = []
    for wrap_first in (True, False):
        model = net()
        model.load_state_dict(trained.state_dict())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        if wrap_first:
            optimizer = hvd.DistributedOptimizer(optimizer, model=model)
        optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
        if not wrap_first:
            optimizer = hvd.DistributedOptimizer(optimizer, model=model)
        train(model, optimizer, 2, mine)
        results.append(model)
    train(trained, source, 2, lambda t: t)
    for model in results:
        assert_same(model, trained)


@pytest.mark.parametrize("before", [True, False])
def test_d3_schedulers_drive_the_rate(before: bool) -> None:
    models = [net(), net()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.4) for m in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers[0 if before else 1 :]]
    hvd.DistributedOptimizer(optimizers[0], model=models[0])
    if not before:
        schedulers.insert(0, torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if it believes that step() was not called
        for which, part in ((0, mine), (1, lambda t: t)):
            for _ in range(5):
                train(models[which], optimizers[which], 1, part)
                schedulers[which].step()
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"] == 0.1
    assert_same(*models)


def test_d3_step_hooks_run_once_on_reduced_gradients() -> None:
    model, reference = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(model[0].weight.grad.clone()))
    hvd.DistributedOptimizer(optimizer, model=model)
    optimizer.load_state_dict(optimizer.state_dict())  # makes torch patch the class again
    train(model, optimizer, 1, mine)
    x, y = data(0)
    F.cross_entropy(reference(x), y).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], reference[0].weight.grad)


class NeedsArguments(torch.optim.Optimizer):
    """A user's optimizer that cannot be made from parameters alone, and whose step takes no closure."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, {"rate": rate})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["rate"])


def test_a_users_own_optimizer() -> None:
    models = [net(), net()]
    optimizer = hvd.DistributedOptimizer(NeedsArguments(models[0].parameters(), 0.3), model=models[0])
    train(models[0], optimizer, 3, mine)
    train(models[1], torch.optim.SGD(models[1].parameters(), lr=0.3), 3, lambda t: t)
    assert_same(*models)


def test_wrapping_twice_and_bad_arguments() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for arguments, message in [
        ({"named_parameters": named[:1]}, "lacks 3"),
        ({"named_parameters": [*named, ("0.weight", named[0][1])]}, "more than once: 0.weight"),
        ({"named_parameters": [p for _, p in named]}, "pairs"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"lr_scale": "cubic", "base_batch": 1}, "lr_scale='cubic'"),
        ({"lr_scale": "linear"}, "without base_batch"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"check_every": -1}, "check_every=-1"),
    ]:
        with pytest.raises(UsageError, match=message):
            hvd.DistributedOptimizer(optimizer, **arguments)
        assert type(optimizer) is torch.optim.SGD
    hvd.DistributedOptimizer(optimizer, model=model)
    with pytest.raises(UsageError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(UsageError, match="Linear was given"):
        hvd.DistributedOptimizer(model[0])


SETTINGS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}),
    (torch.optim.LBFGS, {"lr": 0.1}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=["AdamW", "SGD", "momentum", "LBFGS"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_d1_state_of_rank_0_reaches_all_exactly(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], wrapped: bool
) -> None:
    model = net()
    optimizer = kind(model.parameters(), **settings)
    if RANK == 0:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data(0)[0]), data(0)[1])
            loss.backward()
            return loss

        optimizer.step(closure)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)  # puts initial_lr into rank 0's groups only
    optimizer.zero_grad()
    expected = hvd.broadcast_object(str(optimizer.state_dict()), 0)
    hvd.broadcast_parameters(model.state_dict(), 0)
    weights = copy.deepcopy(model.state_dict())
    if wrapped:
        hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert str(optimizer.state_dict()) == expected
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    hvd.check_in_sync(optimizer)
    hvd.check_in_sync(model)


def test_d1_state_that_only_others_have_is_removed() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    if RANK > 0:
        train(model, optimizer, 1, lambda t: t)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert len(optimizer.state) == 0


def test_drift_is_found_within_check_every_steps() -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, check_every=3)
    train(model, optimizer, 3, mine)
    with torch.no_grad():
        model[2].bias[1] += float(RANK) * 1e-9
    train(model, optimizer, 2, mine)
    if SIZE == 1:
        train(model, optimizer, 1, mine)
    else:
        with pytest.raises(OutOfSyncError, match=r"after step 6.*weight '2.bias'"):
            train(model, optimizer, 1, mine)


@several
def test_drift_of_the_rate_is_found() -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, check_every=1)
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.1 + RANK
    with pytest.raises(OutOfSyncError, match=r"learning rates"):
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()


def test_d9_scaling_is_applied_once() -> None:
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.01}]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(groups, lr=1.0), lr_scale="sqrt", base_batch=16, global_batch=64, model=model
    )
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.02]
    train(model, optimizer, 2, mine)
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.02]
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = torch.optim.SGD(net().parameters(), lr=1.0)
    for arguments, expected in [({"global_batch": 64}, 0.2), ({"global_batch": 256}, 0.4)]:
        model = net()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        fresh = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.7), lr_scale="sqrt", base_batch=16, **arguments)
        fresh.load_state_dict(copy.deepcopy(saved))
        assert [g["lr"] for g in fresh.param_groups] == pytest.approx([expected, expected / 10])


def test_d9_scaling_needs_the_batch_and_comes_before_schedulers() -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), lr_scale="linear", base_batch=8)
    with pytest.raises(UsageError, match="needs the global batch"):
        train(model, optimizer, 1, mine)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(late, 2)
    with pytest.raises(UsageError, match="scheduler was made before"):
        hvd.DistributedOptimizer(late, lr_scale="linear", base_batch=8, global_batch=16)


def test_adasum() -> None:
    model, reference = net(), net()
    if SIZE & (SIZE - 1) or (SIZE > 1 and not hvd.mpi_enabled()):
        with pytest.raises(UsageError, match="Adasum"):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
        return
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, op=hvd.Adasum)
    for step in range(2):  # the same data everywhere: Adasum of equal steps is that step
        for m, o in ((model, optimizer), (reference, torch.optim.SGD(reference.parameters(), lr=0.1))):
            o.zero_grad()
            F.cross_entropy(m(data(step)[0]), data(step)[1]).backward()
            o.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    hvd.check_in_sync(model)
