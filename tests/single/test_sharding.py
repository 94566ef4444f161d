"""The plan of global batches: the same samples and steps on any number of ranks, and a resume with the next sample."""

from __future__ import annotations

import json
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import UsageError
from hvdkit.sharding import TAILS, ShardPlan

PLANS = 2000


def _random_plans(count=PLANS, seed=0):
    """Arguments of random plans: lengths 0, 1, below the size and below the batch come often."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        length = int(rng.choice([0, 1, rng.integers(2, 9), rng.integers(9, 200)], p=[0.05, 0.05, 0.3, 0.6]))
        batch = {["global_batch", "batch_per_rank"][number % 2]: int(rng.integers(1, 40))}
        yield {
            "length": length,
            "size": int(rng.integers(1, 12)),
            "seed": int(rng.integers(0, 2**63)),
            "shuffle": bool(rng.random() < 0.8),
            "tail": TAILS[number % 3],
            **batch,
        }


def _ranks(arguments):
    return [ShardPlan(rank=rank, **arguments) for rank in range(arguments["size"])]


def _epoch(plans, epoch):
    """All ids of an epoch in global order."""
    steps = zip(*(plan.batches(plan.position(epoch)) for plan in plans), strict=True)
    return np.concatenate([np.empty(0, np.int64), *(ids for step in steps for ids in step)])


def test_union_over_ranks_and_steps_is_one_epoch_over_thousands_of_plans(caplog):
    for arguments in _random_plans():
        plans, length = _ranks(arguments), arguments["length"]
        assert len({plan.steps for plan in plans}) == 1, arguments
        seen = np.bincount(_epoch(plans, 3), minlength=length)
        total = {"exact": length, "pad": length + plans[0].padded, "drop": length - plans[0].dropped}[arguments["tail"]]
        assert seen.sum() == total, arguments
        if arguments["tail"] == "exact":
            assert (seen == 1).all(), arguments
        elif arguments["tail"] == "drop":
            assert (seen <= 1).all() and plans[0].dropped < plans[0].global_batch, arguments
        elif length:
            assert seen.min() >= 1 and seen.max() - seen.min() <= 1, arguments
            assert total % plans[0].global_batch == 0, arguments


def test_order_does_not_depend_on_the_number_of_ranks_over_thousands_of_plans():
    for arguments in _random_plans(1000, seed=1):
        one = ShardPlan(**{**arguments, "size": 1, "rank": 0})
        batch = ShardPlan(rank=0, **arguments).global_batch
        same_batch = {name: value for name, value in arguments.items() if not name.endswith("batch_per_rank")}
        single = ShardPlan(**{**same_batch, "size": 1, "rank": 0, "global_batch": batch})
        assert np.array_equal(_epoch(_ranks(arguments), 2), _epoch([single], 2)), arguments
        if arguments["tail"] == "exact":  # not even on the batch
            assert np.array_equal(_epoch([one], 2), _epoch([single], 2)), arguments


def test_each_batch_is_cut_as_array_split_cuts_it():
    for arguments in _random_plans(300, seed=2):
        plans = _ranks(arguments)
        for step in range(plans[0].steps):
            parts = [plan.ids(1, step) for plan in plans]
            for part, expected in zip(parts, np.array_split(np.concatenate(parts), len(plans)), strict=True):
                assert np.array_equal(part, expected)
            counts = [len(part) for part in parts]
            for plan in plans:
                assert plan.counts(step).tolist() == counts and plan.counts(step).dtype == np.int64


def test_walking_by_position_gives_the_same_batches():
    for arguments in _random_plans(400, seed=3):
        for plan in _ranks(arguments)[::3]:
            position = plan.position(1)
            walked = list(plan.batches(position))
            assert len(walked) == plan.steps == plan.remaining_steps(position)
            for step, ids in enumerate(walked):
                assert position == plan.position(1, step)
                assert np.array_equal(ids, plan.ids(1, step)) and ids.dtype == np.int64
                assert np.array_equal(ids, plan.ids_at(position))
                assert np.array_equal(plan.counts(step), plan.counts_at(position))
                position = plan.advance(position)
            if plan.steps:
                assert position == plan.position(2) == plan.position(1, plan.steps)


def test_batches_from_any_position_are_those_of_ids_at():
    """Also positions that no full epoch comes to, and blocks that end inside an epoch."""
    rng = np.random.default_rng(4)
    long = {"length": 70_001, "size": 3, "global_batch": 50, "tail": "exact"}
    cases = [(arguments, int(rng.integers(0, 3 * arguments["length"] + 1))) for arguments in _random_plans(300, seed=5)]
    for arguments, start in [*cases, (long, 70_000), (long, 70_001), (long, 70_102)]:
        plan = ShardPlan(rank=int(rng.integers(arguments["size"])), **arguments)
        position = start
        for ids in plan.batches(start):
            assert np.array_equal(ids, plan.ids_at(position)), (arguments, start)
            position = plan.advance(position)
        if plan.steps:
            assert plan.locate(position) == (plan.locate(start)[0] + 1, 0)


def test_c6_resume_mid_epoch_goes_on_with_the_very_next_sample():
    """20 items, 2 ranks, batch 2; stopped at epoch 1 step 2: the log is that of the uninterrupted run."""
    plans = [ShardPlan(length=20, size=2, rank=rank, batch_per_rank=2, seed=5) for rank in range(2)]
    whole = [[plan.ids(epoch, step).tolist() for epoch in range(3) for step in range(5)] for plan in plans]
    for stop in range(15):
        saved = json.loads(json.dumps({"position": plans[0].position(stop // 5, stop % 5), **plans[0].state()}))
        for rank, log in enumerate(whole):
            plan = ShardPlan(length=20, size=2, rank=rank, batch_per_rank=2, seed=5)
            plan.check_state(saved)
            position, resumed = saved["position"], log[:stop]
            while plan.locate(position)[0] < 3:
                for ids in plan.batches(position):
                    resumed.append(ids.tolist())
                    position = plan.advance(position)
            assert resumed == log


@settings(max_examples=120, deadline=None)
@given(
    length=st.integers(1, 120),
    per_rank=st.integers(1, 9),
    sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 12)), min_size=2, max_size=6),
    use_global=st.booleans(),
)
def test_c6_resume_on_other_sizes_any_number_of_times(length, per_rank, sizes, use_global):
    """Before plus after every stop is the one order of samples, on whatever sizes the job ran."""
    batch = {"global_batch": per_rank} if use_global else {"batch_per_rank": per_rank}
    plan, position, seen = ShardPlan(length=length, size=1, rank=0, seed=3, **batch), 0, []
    for size, steps in sizes:
        ranks = [plan.replan(size=size, rank=rank) for rank in range(size)]
        for _ in range(steps):
            parts = [rank.ids_at(position) for rank in ranks]
            assert [len(part) for part in parts] == ranks[0].counts_at(position).tolist()
            seen += np.concatenate(parts).tolist()
            position = ranks[-1].advance(position)
        plan = ranks[0]
    assert position == len(seen)
    single = ShardPlan(length=length, size=1, rank=0, seed=3, global_batch=length)
    whole = np.concatenate([single.ids(epoch, 0) for epoch in range(position // length + 1)])
    assert seen == whole[:position].tolist()


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_resume_on_another_size_keeps_its_epoch_when_padding_or_dropping(tail):
    """A position counts dataset samples, so an epoch ends at a multiple of the length whatever the batch was."""
    before = ShardPlan(length=10, size=2, rank=0, batch_per_rank=2, tail=tail, seed=1)
    position = before.position(3, before.steps)
    assert position == 40
    after = before.replan(size=3, rank=2)
    assert after.global_batch == 6
    assert after.locate(position) == (4, 0)
    middle = before.position(3, 1)
    rest = np.concatenate([before.replan(size=3, rank=rank).ids_at(middle) for rank in range(3)])
    order = ShardPlan(length=10, size=1, rank=0, global_batch=10, seed=1).ids(3, 0)
    assert rest.tolist() == order[4:].tolist()


def test_dropping_skips_to_the_next_epoch_where_no_batch_is_left():
    plan = ShardPlan(length=10, size=1, rank=0, global_batch=4, tail="drop", shuffle=False)
    assert plan.steps == 2 and plan.dropped == 2
    assert plan.locate(7) == (1, 0) and plan.advance(7) == 14 and plan.remaining_steps(7) == 2
    assert plan.ids_at(7).tolist() == [0, 1, 2, 3]


def test_padding_repeats_from_the_start_of_the_order():
    plan = ShardPlan(length=10, size=1, rank=0, global_batch=4, tail="pad", seed=8)
    assert plan.steps == 3 and plan.padded == 2
    assert plan.ids(1, 2)[2:].tolist() == plan.ids(1, 0)[:2].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_c1_evaluation_shows_each_sample_once(size):
    plans = [ShardPlan(length=10, size=size, rank=rank, batch_per_rank=3, shuffle=False) for rank in range(size)]
    assert sorted(_epoch(plans, 0).tolist()) == list(range(10))


@pytest.mark.parametrize("length", [0, 1, 3])
def test_c2_fewer_samples_than_ranks(length):
    plans = [ShardPlan(length=length, size=8, rank=rank, batch_per_rank=4) for rank in range(8)]
    assert {plan.steps for plan in plans} == {1 if length else 0}
    assert sorted(_epoch(plans, 0).tolist()) == list(range(length))
    padded = [ShardPlan(length=length, size=8, rank=rank, batch_per_rank=4, tail="pad") for rank in range(8)]
    assert {len(plan.ids(0, 0)) for plan in padded if plan.steps} <= {4}
    assert padded[0].padded == (32 - length if length else 0)


def test_c2_dropping_everything_is_said_with_both_numbers(capsys):
    assert ShardPlan(length=3, size=8, rank=0, batch_per_rank=1, tail="drop").steps == 0
    message = capsys.readouterr().err
    assert "3 samples" in message and "batch of 8" in message


def test_c3_every_epoch_and_seed_has_its_own_order_and_shards_are_disjoint():
    plans = [ShardPlan(length=12, size=2, rank=rank, batch_per_rank=2) for rank in range(2)]
    orders = [_epoch(plans, epoch).tolist() for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    for epoch in range(3):
        shards = [{i for step in range(3) for i in plan.ids(epoch, step).tolist()} for plan in plans]
        assert shards[0] | shards[1] == set(range(12)) and not shards[0] & shards[1]
    other = [ShardPlan(length=12, size=2, rank=rank, batch_per_rank=2, seed=1) for rank in range(2)]
    assert _epoch(other, 0).tolist() != orders[0]


def test_f9_steps_and_counts_are_known_before_the_epoch_in_all_modes():
    """9 items, 2 ranks, batch 2: all ranks make the same steps, and the last step's weights are known."""
    expected = {"exact": [[2, 2], [2, 2], [1, 0]], "pad": [[2, 2]] * 3, "drop": [[2, 2]] * 2}
    for tail, counts in expected.items():
        for rank in range(2):
            plan = ShardPlan(length=9, size=2, rank=rank, batch_per_rank=2, tail=tail)
            assert [plan.counts(step).tolist() for step in range(plan.steps)] == counts


def test_no_samples_make_no_steps():
    plan = ShardPlan(length=0, size=2, rank=1, global_batch=4)
    assert plan.steps == plan.remaining_steps(0) == plan.padded == plan.dropped == 0
    assert plan.advance(0) == 0 and plan.position(5) == 0 and plan.locate(0) == (0, 0)
    assert plan.ids_at(0).tolist() == [] and plan.counts_at(0).tolist() == [0, 0]
    assert list(plan.batches(0)) == []
    with pytest.raises(UsageError, match="without steps"):
        plan.ids(0, 0)


def test_replan_follows_what_the_user_stated():
    stays = ShardPlan(length=100, size=2, rank=0, global_batch=10, seed=4, shuffle=False, tail="pad").replan(
        size=5, rank=4
    )
    assert stays == ShardPlan(length=100, size=5, rank=4, global_batch=10, seed=4, shuffle=False, tail="pad")
    assert ShardPlan(length=100, size=2, rank=0, batch_per_rank=10).replan(size=5, rank=0).global_batch == 50


def test_state_is_plain_and_accepted_by_the_same_training_on_another_size():
    plan = ShardPlan(length=np.int64(100), size=2, rank=0, batch_per_rank=np.int32(5), seed=2**64 - 1)
    state = json.loads(json.dumps(plan.state()))
    assert state == plan.state() and {type(value) for value in state.values()} <= {int, str, bool}
    plan.replan(size=7, rank=3).check_state(state)
    ShardPlan(length=100, size=5, rank=3, global_batch=10, seed=2**64 - 1).check_state(state)  # the same global batch


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"length": 101}, ["length=100", "length=101"]),
        ({"seed": 3}, ["seed=1", "seed=3"]),
        ({"shuffle": False}, ["shuffle=True", "shuffle=False"]),
        ({"tail": "drop"}, ["tail='exact'", "tail='drop'"]),
        ({"batch_per_rank": 6}, ["batch=5", "batch=6"]),
        ({"batch_per_rank": None, "global_batch": 50}, ["batch_mode='batch_per_rank'", "batch_mode='global_batch'"]),
    ],
)
def test_a_state_of_other_data_order_or_batch_is_refused_with_both_values(change, shown):
    arguments = {"length": 100, "size": 2, "rank": 0, "batch_per_rank": 5, "seed": 1}
    state = ShardPlan(**arguments).state()
    with pytest.raises(UsageError) as error:
        ShardPlan(**{**arguments, **change}).check_state(state)
    assert all(part in str(error.value) for part in shown)


def test_a_change_of_batch_can_be_allowed_and_other_orders_cannot():
    state = ShardPlan(length=100, size=2, rank=0, global_batch=5).state()
    ShardPlan(length=100, size=2, rank=0, global_batch=6).check_state(state, allow_batch_change=True)
    with pytest.raises(UsageError, match="order=0"):
        ShardPlan(length=100, size=2, rank=0, global_batch=5).check_state({**state, "order": 0})
    with pytest.raises(UsageError, match="no 'length'"):
        ShardPlan(length=100, size=2, rank=0, global_batch=5).check_state({"epoch": 3})


GOOD = {"length": 10, "size": 2, "rank": 0, "global_batch": 4}


@pytest.mark.parametrize("bad", [-1, 1.0, "3", None, True, np.float32(2), 2**70])
def test_bad_lengths_are_refused(bad):
    with pytest.raises(UsageError, match=r"length=.* whole number"):
        ShardPlan(**{**GOOD, "length": bad})


@pytest.mark.parametrize("bad", [0, -1, 1.0, "3", True, np.bool_(True)])
@pytest.mark.parametrize("name", ["size", "global_batch", "batch_per_rank"])
def test_bad_sizes_and_batches_are_refused(name, bad):
    arguments = {key: value for key, value in GOOD.items() if name == "size" or key != "global_batch"}
    with pytest.raises(UsageError, match=rf"{name}=.* whole number"):
        ShardPlan(**{**arguments, name: bad})


@pytest.mark.parametrize("bad", [-1, 2, 0.0, True])
def test_a_rank_outside_the_size_is_refused(bad):
    with pytest.raises(UsageError, match=r"rank=.* from 0 to 1"):
        ShardPlan(**{**GOOD, "rank": bad})


def test_both_or_neither_batch_is_refused():
    with pytest.raises(UsageError, match=r"global_batch=4 and batch_per_rank=2"):
        ShardPlan(**GOOD, batch_per_rank=2)
    with pytest.raises(UsageError, match="neither"):
        ShardPlan(length=10, size=2, rank=0)


@pytest.mark.parametrize(
    ("name", "bad"), [("tail", "wrap"), ("tail", None), ("shuffle", 1), ("seed", -1), ("seed", 0.5)]
)
def test_bad_choices_are_refused(name, bad):
    with pytest.raises(UsageError, match=f"{name}="):
        ShardPlan(**GOOD, **{name: bad})


def test_steps_epochs_and_positions_outside_are_refused():
    plan = ShardPlan(**GOOD)
    for call in (
        lambda: plan.ids(0, 3),
        lambda: plan.ids(-1, 0),
        lambda: plan.counts(-1),
        lambda: plan.position(0, 4),
        lambda: plan.locate(-1),
        lambda: plan.ids_at(1.5),
    ):
        with pytest.raises(UsageError, match="was given"):
            call()


def test_a_billion_samples_start_at_once_in_little_memory():
    tracemalloc.start()
    begin = time.perf_counter()
    plan = ShardPlan(length=10**9, size=64, rank=63, batch_per_rank=32, seed=77)
    next(iter(plan.batches(123_456_789_012)))
    elapsed, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert elapsed < 0.5  # far above what bench/ measures: this machine may be busy
