"""What happens between ``backward()`` and ``step()``: reduced gradients, accumulation, clipping, loss scaling, gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import hvdkit.torch as hvd
from hvdkit.torch.batch import Batch, set_current

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
several = pytest.mark.skipif(SIZE == 1, reason="one process has nothing to reduce")


@pytest.fixture(autouse=True)
def _no_batch() -> Any:
    set_current(None)
    yield
    set_current(None)


def net(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator, dtype=torch.float64), torch.randint(
        0, 3, (count,), generator=generator
    )


def part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.tensor_split(SIZE)[RANK]


def wrap(model: torch.nn.Module, lr: float = 0.1, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), model=model, **options)


def close(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    hvd.check_in_sync(model)
    for (name, a), b in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(a, b[1], rtol=1e-10, atol=1e-12, msg=name)


def test_gradients_are_those_of_the_global_batch_after_backward() -> None:
    model, reference = net(), net()
    optimizer = wrap(model)
    x, y = rows(4 * SIZE)
    F.cross_entropy(model(part(x)), part(y)).backward()
    F.cross_entropy(reference(x), y).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    optimizer.synchronize()  # Horovod's pattern: changes nothing more
    with optimizer.skip_synchronize():
        optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9).step()
    close(model, reference)


@pytest.mark.parametrize("count", [1, 2, 7, 5 * SIZE + 1])
def test_unequal_parts_count_by_samples(count: int) -> None:
    model, reference = net(), net()
    optimizer, plain = wrap(model), torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x, y = rows(count, step)
        counts = [len(t) for t in x.tensor_split(SIZE)]
        set_current(Batch(counts, RANK, count))
        mine, labels = (part(x), part(y)) if counts[RANK] else (x[:1] * torch.nan, y[:1])  # a filler may be NaN
        optimizer.zero_grad()
        F.cross_entropy(model(mine), labels).backward()
        optimizer.step()
        plain.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        plain.step()
    close(model, reference)


def test_weights_can_be_left_out() -> None:
    model = net()
    optimizer = wrap(model, weighted=False)
    set_current(Batch([0] * SIZE, RANK, 4))
    F.cross_entropy(model(rows(2)[0]), rows(2)[1]).backward()
    assert model[0].weight.grad.abs().sum() > 0
    optimizer.step()


@pytest.mark.parametrize("passes", [2, 4])
def test_d5_accumulation_with_a_short_last_window(passes: int) -> None:
    """10 batches of unequal parts, twice: equal to one process that accumulates over the same batches."""
    model, reference = net(), net()
    optimizer = wrap(model, backward_passes_per_step=passes)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for batch in range(10):
            x, y = rows(3 * SIZE + 1, batch)
            set_current(Batch([len(t) for t in x.tensor_split(SIZE)], RANK, len(x)))
            (F.cross_entropy(model(part(x)), part(y)) / passes).backward()
            (F.cross_entropy(reference(x), y) / passes).backward()
            if (batch + 1) % passes == 0 or batch == 9:
                for o in (optimizer, plain):
                    o.step()
                    o.zero_grad()
    close(model, reference)


@pytest.mark.parametrize("carried", [False, True])
def test_d5_the_last_batch_of_an_epoch_is_reduced_by_backward(carried: bool) -> None:
    """So a short window can be clipped; a window that is carried over into the next epoch is right as well."""
    model, reference = net(), net()
    optimizer = wrap(model, backward_passes_per_step=3)
    for step, is_last in enumerate([False, True, False][: 3 if carried else 2]):
        x, y = rows(2 * SIZE, step)
        set_current(Batch([2] * SIZE, RANK, len(x), is_last))
        F.cross_entropy(model(part(x)), part(y)).backward()
        F.cross_entropy(reference(x), y).backward()
        if is_last:
            for a, b in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)
    optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9).step()
    close(model, reference)


def test_d5_a_dropped_window_leaves_nothing_behind() -> None:
    model, reference = net(), net()
    optimizer = wrap(model, backward_passes_per_step=4)
    x, y = rows(4 * SIZE)
    for _ in range(2):  # two passes of a window that is given up
        F.cross_entropy(model(part(x)), part(y)).backward()
    optimizer.zero_grad()
    for _ in range(4):
        F.cross_entropy(model(part(x)), part(y)).backward()
    optimizer.step()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    (4 * F.cross_entropy(reference(x), y)).backward()
    plain.step()
    close(model, reference)


def test_d5_more_passes_than_announced_are_right_too() -> None:
    model, reference = net(), net()
    optimizer = wrap(model)
    x, y = rows(4 * SIZE)
    for scale in (1.0, 2.0):
        (scale * F.cross_entropy(model(part(x)), part(y))).backward()
    optimizer.step()
    (3 * F.cross_entropy(reference(x), y)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9).step()
    close(model, reference)


def test_d5_generator_and_discriminator() -> None:
    """The generator's backward pass also reaches the discriminator's parameters, which another optimizer owns."""
    results = []
    for distributed in (True, False):
        torch.manual_seed(1)
        gen, dis = torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 1).double()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (gen, dis)]
        if distributed:
            optimizers = [hvd.DistributedOptimizer(o, model=m) for o, m in zip(optimizers, (gen, dis), strict=True)]
        for step in range(3):
            noise, _ = rows(2 * SIZE, step)
            noise = part(noise[:, :2]) if distributed else noise[:, :2]
            optimizers[1].zero_grad()
            F.softplus(-dis(noise)).mean().backward()
            F.softplus(dis(gen(noise).detach())).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.softplus(-dis(gen(noise))).mean().backward()
            optimizers[0].step()
        results.append(torch.nn.ModuleList([gen, dis]))
    close(*results)


def test_d5_two_optimizers_reached_in_another_order_on_each_rank() -> None:
    results = []
    for distributed in (True, False):
        torch.manual_seed(0)
        parts = [torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 4).double()]
        optimizers: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.1) for m in parts]
        if distributed:
            optimizers = [hvd.DistributedOptimizer(o, model=m) for o, m in zip(optimizers, parts, strict=True)]
        x, _ = rows(SIZE)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in [RANK] if distributed else range(SIZE):
            first, second = parts if rank % 2 else parts[::-1]
            (second(first(x[rank : rank + 1])).pow(2).sum() / (1 if distributed else SIZE)).backward()
        for optimizer in optimizers:
            optimizer.step()
        results.append(torch.nn.ModuleList(parts))
    close(*results)


def test_d7_clipping_acts_on_the_averaged_gradient() -> None:
    """Gradients 3 and 5 (0 and 8 for other numbers of ranks) have the mean 4; the norm limit 1 leaves 1."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    slopes = torch.linspace(3, 5, SIZE, dtype=torch.float64) if SIZE > 1 else torch.tensor([4.0], dtype=torch.float64)
    (weight * slopes[RANK]).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
    optimizer.step()
    assert norm.item() == pytest.approx(4.0)
    assert weight.item() == pytest.approx(-1.0, rel=1e-5)
    optimizer.zero_grad()


def test_d7_inf_on_one_rank_skips_the_step_on_all() -> None:
    model = net().float()
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    before, history = None, []
    for step in range(4):
        x, y = rows(4 * SIZE, step)
        if step == 2:
            before = [p.detach().clone() for p in model.parameters()]
            if RANK == SIZE - 1:
                x = x * torch.inf
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(part(x).float()), part(y))).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        history.append(scaler.get_scale())
    assert history == [1024.0, 1024.0, 512.0, 512.0]
    hvd.check_in_sync(model)


class Branches(torch.nn.Module):
    """Uses ``left`` or ``right`` as told, never ``spare``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.spare = (torch.nn.Linear(4, 1).double() for _ in range(3))

    def forward(self, x: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        total = x.sum() * 0
        if left:
            total = total + self.left(x).mean()
        if right:
            total = total + self.right(x).mean() ** 2
        return total


def test_unused_everywhere_is_untouched_and_unused_somewhere_is_averaged() -> None:
    model, reference = Branches(), Branches()
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), **settings), model=model)
    plain = torch.optim.SGD(reference.parameters(), **settings)
    uses = [[(True, True)] * SIZE, [(r == 0, True) for r in range(SIZE)], [(False, r == 0) for r in range(SIZE)]]
    for step, use in enumerate([*uses, *uses]):
        x, _ = rows(SIZE, step)
        optimizer.zero_grad()
        loss = model(x[RANK : RANK + 1], *use[RANK])
        if loss.requires_grad:  # a rank may have no gradient at all
            loss.backward()
        if not any(left for left, _ in use):
            assert model.left.weight.grad is None or SIZE > 1
        optimizer.step()
        plain.zero_grad()
        (sum(reference(x[r : r + 1], *use[r]) for r in range(SIZE)) / SIZE).backward()
        plain.step()
        assert model.spare.weight.grad is None
        assert model.spare.weight not in optimizer.state or not optimizer.state[model.spare.weight]
    close(model, reference)


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
def test_d10_sparse_embedding_that_some_ranks_lack(kind: str, as_dense: bool) -> None:
    tables = []
    for distributed in (True, False):
        torch.manual_seed(0)
        # the dense twin in one process; SparseAdam has none, since it moves only the rows it sees
        table = torch.nn.Embedding(4, 2, sparse=distributed or kind == "SparseAdam").double()
        optimizer: Any = getattr(torch.optim, kind)(table.parameters(), lr=0.1)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, model=table, sparse_as_dense=as_dense)
        for step in range(3):
            optimizer.zero_grad()
            if distributed:
                if RANK == 0 or (step == 1 and RANK == 1):
                    table(torch.tensor([0, 1, 1])).pow(2).sum().backward()
            else:
                share = (2 if step == 1 and SIZE > 1 else 1) / SIZE
                (table(torch.tensor([0, 1, 1])).pow(2).sum() * share).backward()
            optimizer.step()
        tables.append(table)
    hvd.check_in_sync(tables[0])
    torch.testing.assert_close(tables[0].weight, tables[1].weight)


def test_groups_added_and_unfrozen_later_are_reduced() -> None:
    models = [net(), net()]
    for model in models:
        model[2].requires_grad_(False)
        model.append(torch.nn.Linear(3, 3).double())
        if RANK > 0:
            with torch.no_grad():
                model[3].weight.add_(RANK)
    optimizers: list[Any] = [torch.optim.SGD([*m[0].parameters(), *m[2].parameters()], lr=0.1) for m in models]
    optimizers[0] = hvd.DistributedOptimizer(optimizers[0], model=models[0])
    models[1].load_state_dict(models[0].state_dict())
    for which, cut in ((0, part), (1, lambda t: t)):
        model, optimizer = models[which], optimizers[which]
        for step in range(4):
            if step == 1:
                optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.05})
            if step == 2:
                model[2].requires_grad_(True)
            x, y = (cut(t) for t in rows(2 * SIZE, step))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    close(*models)


def test_unfrozen_just_before_backward_is_reduced_by_step() -> None:
    models = [net(), net()]
    optimizers: list[Any] = []
    for model in models:
        model[2].requires_grad_(False)
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    hvd.DistributedOptimizer(optimizers[0], model=models[0])
    for which, cut in ((0, part), (1, lambda t: t)):
        models[which][2].requires_grad_(True)
        x, y = (cut(t) for t in rows(2 * SIZE))
        F.cross_entropy(models[which](x), y).backward()
        optimizers[which].step()
    close(*models)


def test_gradients_set_by_hand_are_reduced() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.full((2,), float(RANK))
    optimizer.step()
    assert weight.tolist() == pytest.approx([-(SIZE - 1) / 2] * 2)
    optimizer.zero_grad()
    weight.grad = torch.full((2,), float(RANK))
    with optimizer.skip_synchronize():
        optimizer.step()
    assert weight.tolist() == pytest.approx([-(SIZE - 1) / 2 - RANK] * 2)


def test_a_second_optimizer_for_the_same_model_takes_over() -> None:
    models, count = [net(), net()], 3 * SIZE + 1
    set_current(Batch([len(t) for t in torch.arange(count).tensor_split(SIZE)], RANK, count))
    for which, cut in ((0, part), (1, lambda t: t)):
        model = models[which]
        for phase, params in enumerate([model.parameters(), model.parameters(), model[0].parameters()]):
            optimizer: Any = torch.optim.SGD(params, lr=0.1)
            if which == 0:
                optimizer = hvd.DistributedOptimizer(optimizer, model=model)
            for step in range(2):
                x, y = (cut(t) for t in rows(count, step + phase))
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    close(*models)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    models = [net(), net()]
    optimizers: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    hvd.DistributedOptimizer(optimizers[0], model=models[0])
    for which, cut in ((0, part), (1, lambda t: t)):
        for step in range(2):
            x, y = (cut(t) for t in rows(2 * SIZE, step))
            optimizers[which].zero_grad()
            hidden = models[which][0](x)
            out = (
                checkpoint(models[which][1:], hidden, use_reentrant=reentrant)
                if which == 0
                else models[which][1:](hidden)
            )
            F.cross_entropy(out, y).backward()
            optimizers[which].step()
    close(*models)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    (weight * (RANK + 1)).sum().abs().backward() if dtype.is_complex else (weight * (RANK + 1)).sum().backward()
    if dtype.is_complex:
        weight.grad = torch.full_like(weight, RANK + 1)
        optimizer.zero_grad()
        weight.grad = torch.full_like(weight, RANK + 1)
    optimizer.step()
    assert weight.detach().abs().tolist() == pytest.approx([(SIZE + 1) / 2] * 3)


def test_channels_last_and_half_on_the_wire() -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = wrap(model, compression=hvd.Compression.fp16)
    x = torch.full((2, 3, 5, 5), float(RANK)).to(memory_format=torch.channels_last)
    model(x).mean().backward()
    torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight, (SIZE - 1) / 2 / 4), rtol=1e-3, atol=0)
    optimizer.step()
    hvd.check_in_sync(model)


@several
def test_sum_and_groups() -> None:
    model, reference = net(), net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum, num_groups=2)
    x, y = rows(2 * SIZE)
    F.cross_entropy(model(part(x)), part(y), reduction="sum").backward()
    optimizer.step()
    F.cross_entropy(reference(x), y, reduction="sum").backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    close(model, reference)
