"""Rates as a function of the optimizer step, against tables worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import UsageError
from hvdkit.schedule import DECAYS, Scaling, Schedule, momentum_correction

BY_FOUR = Scaling("linear", base_batch=64, global_batch=256)


@pytest.mark.parametrize(
    ("rule", "base", "batch", "factor"),
    [
        ("none", 64, 256, 1),
        ("none", None, None, 1),
        ("linear", 64, 256, 4),
        ("linear", 64, 32, 0.5),
        ("linear", 50, 50, 1),
        ("sqrt", 64, 256, 2),
        ("sqrt", 256, 64, 0.5),
    ],
)
def test_scaling_rules(rule, base, batch, factor):
    assert Scaling(rule, base, batch).factor == factor


def test_what_was_scaled_is_described():
    assert BY_FOUR.describe(0.1) == "lr 0.1 x 4 (linear: global batch 256 / base 64)"
    assert Scaling("sqrt", 64, 128).describe(0.1) == "lr 0.1 x 1.41421 (sqrt: global batch 128 / base 64)"
    assert Scaling().describe(1e-3) == "lr 0.001 x 1 (none)"
    assert Scaling("none", None, 96).describe(1e-3) == "lr 0.001 x 1 (none: global batch 96)"
    accumulated = Scaling("linear", 64, 256, accumulation=2)
    assert accumulated.describe(0.1) == "lr 0.1 x 4 (linear: global batch 256 / base 64, accumulated over 2)"
    schedule = Schedule(scaling=BY_FOUR, steps_per_epoch=10, warmup_epochs=5)
    assert schedule.describe(0.1) == "lr 0.1 x 4 (linear: global batch 256 / base 64), warm-up 5 epochs"
    schedule = Schedule(scaling=BY_FOUR, steps_per_epoch=10, warmup_epochs=1, decay="cosine", epochs=90)
    assert schedule.describe(0.1).endswith("/ base 64), warm-up 1 epoch, cosine decay over 90 epochs")


# D9: base rate 0.1, four times the base batch, 5 warm-up steps, 20 steps. Rates worked out by hand at 3, 7 and 19:
# warm-up 0.1 + 0.3 * 3/5; then 0.4 times what the decay leaves after 2 and 14 of 15 steps.
D9 = {
    "none": ({}, [0.28, 0.4, 0.4]),
    "cosine": ({"epochs": 20}, [0.28, 0.2 * (1 + math.cos(math.pi * 2 / 15)), 0.2 * (1 + math.cos(math.pi * 14 / 15))]),
    "polynomial": ({"epochs": 20, "power": 2}, [0.28, 0.4 * (13 / 15) ** 2, 0.4 * (1 / 15) ** 2]),
    "exponential": ({"gamma": 0.9}, [0.28, 0.4 * 0.81, 0.4 * 0.9**14]),
    "step": ({"milestones": [7, 15, 19]}, [0.28, 0.04, 0.0004]),
}


@pytest.mark.parametrize("decay", DECAYS)
def test_d9_rates_fresh_and_resumed_follow_one_formula(decay):
    settings, expected = D9[decay]
    fresh = Schedule(scaling=BY_FOUR, steps_per_epoch=1, warmup_epochs=5, decay=decay, **settings)
    resumed = Schedule.from_state(json.loads(json.dumps(fresh.state())))
    assert resumed == fresh
    for schedule in (fresh, resumed):  # base rates of two groups keep their ratio
        for base in (0.1, 0.01):
            rates = [base * schedule.factor(step) for step in (3, 7, 19)]
            assert rates == pytest.approx([rate * base / 0.1 for rate in expected], rel=1e-12)


def test_warmup_table():
    """Goyal et al. 2.2: from the base rate by equal increments to the scaled rate, here in 4 steps of 2 epochs."""
    schedule = Schedule(scaling=Scaling("linear", 10, 90), steps_per_epoch=2, warmup_epochs=2)
    assert [schedule.factor(step) for step in range(7)] == [1, 3, 5, 7, 9, 9, 9]
    assert schedule.warmup_steps == 4
    from_zero = Schedule(scaling=Scaling("linear", 10, 40), steps_per_epoch=2, warmup_epochs=2, warmup_from=0)
    assert [from_zero.factor(step) for step in range(6)] == [0, 1, 2, 3, 4, 4]
    downwards = Schedule(scaling=Scaling("linear", 40, 20), steps_per_epoch=5, warmup_epochs=1)
    assert [downwards.factor(step) for step in (0, 1, 5)] == pytest.approx([1, 0.9, 0.5])
    part = Schedule(scaling=BY_FOUR, steps_per_epoch=3, warmup_epochs=0.5)
    assert part.warmup_steps == 2 and part.factor(1) == 2.5


def test_step_table():
    """Drops at epochs counted from the start of training, on the first step of the epoch."""
    schedule = Schedule(scaling=BY_FOUR, steps_per_epoch=10, warmup_epochs=1, decay="step", milestones=(3, 6, 8))
    at = [0, 9, 10, 29, 30, 59, 60, 79, 80, 1000]
    table = [1, 3.7, 4, 4, 0.4, 0.4, 0.04, 0.04, 0.004, 0.004]
    assert [schedule.factor(step) for step in at] == pytest.approx(table)
    halves = Schedule(steps_per_epoch=4, decay="step", milestones=(1, 1.5), gamma=0.5)
    assert [halves.factor(step) for step in (3, 4, 5, 6)] == [1, 0.5, 0.5, 0.25]


def test_cosine_table():
    schedule = Schedule(steps_per_epoch=4, decay="cosine", epochs=2)
    half = math.sqrt(0.5)
    table = {0: 1, 2: (1 + half) / 2, 4: 0.5, 6: (1 - half) / 2, 8: 0, 20: 0}
    assert [schedule.factor(step) for step in table] == pytest.approx(list(table.values()), abs=1e-15)
    ending = Schedule(scaling=BY_FOUR, steps_per_epoch=4, decay="cosine", epochs=2, end_factor=0.1)
    assert [ending.factor(step) for step in (0, 4, 8, 99)] == pytest.approx([4, 2.2, 0.4, 0.4])


def test_polynomial_table():
    linear = Schedule(steps_per_epoch=5, decay="polynomial", epochs=2)
    assert [linear.factor(step) for step in (0, 1, 5, 9, 10, 11)] == pytest.approx([1, 0.9, 0.5, 0.1, 0, 0])
    square = Schedule(steps_per_epoch=5, decay="polynomial", epochs=2, power=2, end_factor=0.2)
    assert [square.factor(step) for step in (0, 5, 10)] == pytest.approx([1, 0.4, 0.2])


def test_exponential_table():
    schedule = Schedule(scaling=BY_FOUR, steps_per_epoch=2, warmup_epochs=1, decay="exponential", gamma=0.25)
    assert [schedule.factor(step) for step in (0, 1, 2, 3, 4, 6)] == pytest.approx([1, 2.5, 4, 2, 1, 0.25])


SCHEDULES = st.sampled_from(
    [
        Schedule(scaling=scaling, steps_per_epoch=7, warmup_epochs=warmup, decay=decay, **settings)
        for scaling in (Scaling(), BY_FOUR, Scaling("sqrt", 64, 640))
        for warmup in (0, 2.5)
        for decay, settings in [
            ("none", {}),
            ("step", {"milestones": (3, 5.5)}),
            ("cosine", {"epochs": 9}),
            ("polynomial", {"epochs": 9, "power": 0.5}),
            ("exponential", {"gamma": 0.8}),
        ]
    ]
)


@given(schedule=SCHEDULES, steps=st.lists(st.integers(0, 200), max_size=20))
def test_arrays_and_numbers_agree_and_a_state_says_all(schedule, steps):
    table = schedule.factor(np.array(steps, np.int64))
    assert table.dtype == np.float64 and table.tolist() == [schedule.factor(step) for step in steps]
    assert type(schedule.factor(3)) is float
    assert Schedule.from_state(json.loads(json.dumps(schedule.state()))) == schedule
    assert np.all((table >= 0) & (table <= max(1.0, schedule.scaling.factor)))


@given(schedule=SCHEDULES)
def test_no_scaling_and_no_warmup_start_at_the_scaled_rate(schedule):
    assert schedule.factor(0) == (1.0 if schedule.warmup_steps else schedule.scaling.factor)
    assert schedule.factor(schedule.warmup_steps) == pytest.approx(schedule.scaling.factor)


def test_momentum_correction_keeps_the_two_forms_of_momentum_equal():
    """Goyal et al., section 3: equation 10 with the correction follows equation 9 while the rate changes."""
    rates, gradients = [0.1, 0.4, 0.2, 0.05, 0.3], [1.0, -2.0, 0.5, 3.0, 1.5]
    inside = outside = velocity = buffer = 0.0
    for previous, rate, gradient in zip(rates[:1] + rates, rates, gradients, strict=False):
        buffer = 0.9 * buffer + gradient
        outside -= rate * buffer
        velocity = 0.9 * momentum_correction(previous, rate) * velocity + rate * gradient
        inside -= velocity
        assert inside == pytest.approx(outside, rel=1e-12)
    assert momentum_correction(0.1, 0.4) == 4
    assert momentum_correction(0.0, 0.4) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "cubic"}, "'none', 'linear', 'sqrt'"),
        ({"rule": "linear", "global_batch": 4}, "without base_batch"),
        ({"rule": "sqrt", "base_batch": 4}, "without global_batch"),
        ({"base_batch": 0}, "base_batch=0"),
        ({"global_batch": 1.5}, "global_batch=1.5"),
        ({"accumulation": 0}, "accumulation=0"),
    ],
)
def test_bad_scalings_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Scaling(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ({"steps_per_epoch": True}, "steps_per_epoch=True"),
        ({"warmup_epochs": -1}, "warmup_epochs=-1"),
        ({"warmup_epochs": math.nan}, "warmup_epochs=nan"),
        ({"warmup_epochs": "5"}, "warmup_epochs='5'"),
        ({"decay": "linear"}, "'polynomial'"),
        ({"decay": "cosine"}, "without epochs"),
        ({"decay": "polynomial"}, "without epochs"),
        ({"decay": "step"}, "without milestones"),
        ({"decay": "exponential"}, "without gamma"),
        ({"decay": "cosine", "epochs": 5, "gamma": 0.1}, "gamma=0.1 was given with decay='cosine'"),
        ({"decay": "cosine", "epochs": 5, "power": 2}, "power=2 was given"),
        ({"milestones": (3,)}, "milestones="),
        ({"decay": "step", "milestones": (3, 2)}, "ascend"),
        ({"decay": "step", "milestones": (3,), "warmup_epochs": 4}, "after the warm-up"),
        ({"decay": "step", "milestones": (3,), "gamma": 0}, "gamma=0"),
        ({"decay": "cosine", "epochs": 5, "warmup_epochs": 5}, "leaves nothing"),
        ({"decay": "cosine", "epochs": 0}, "epochs=0"),
        ({"decay": "cosine", "epochs": 5, "end_factor": -1}, "end_factor=-1"),
        ({"decay": "polynomial", "epochs": 5, "power": 0}, "power=0"),
    ],
)
def test_bad_schedules_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Schedule(**{"steps_per_epoch": 10, **arguments})


@pytest.mark.parametrize("rates", [(-0.1, 0.1), (0.1, math.inf), (0.1, None)])
def test_bad_rates_are_refused(rates):
    with pytest.raises(UsageError, match="_rate="):
        momentum_correction(*rates)
