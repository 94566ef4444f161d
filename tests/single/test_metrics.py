"""Metrics: any split over ranks gives what one process would compute, empty ranks included."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import UsageError
from hvdkit.metrics import (
    Accuracy,
    Confusion,
    HistogramAUC,
    Mean,
    Metric,
    Quantiles,
    exact_auc,
    from_vector,
    in_sample_order,
    merge,
    to_vector,
)


def _over_ranks(make, parts):
    """A metric that has seen each of the parts on a rank of its own, reduced through one vector."""
    ranks = [make() for _ in parts]
    for metric, part in zip(ranks, parts, strict=True):
        metric.update(*part)
    total = np.sum([to_vector([metric.state()]) for metric in ranks], axis=0)
    reduced = make()
    reduced.load(from_vector(total, [reduced.state()])[0])
    return reduced


def test_g1_accuracy_over_unequal_ranks():
    """Rank 0: 3 right of 4, rank 1: 0 right of 1: 0.6, not 0.375."""
    parts = [([1, 2, 3, 0], [1, 2, 3, 4]), ([5], [6])]
    assert _over_ranks(Accuracy, parts).compute() == 0.6
    means = [([1.0, 1.0, 1.0, 0.0],), ([0.0],)]
    assert _over_ranks(Mean, means).compute() == 0.6
    batches = [(0.75, 4), (0.0, 1)]
    assert _over_ranks(Mean, batches).compute() == 0.6


def test_g3_auc_over_ranks_is_that_of_the_pooled_scores():
    parts = [([0.1, 0.2], [0, 1]), ([0.8, 0.9], [0, 1])]
    assert [exact_auc(*part) for part in parts] == [1.0, 1.0]
    assert exact_auc([0.1, 0.2, 0.8, 0.9], [0, 1, 0, 1]) == 0.75
    pooled = _over_ranks(HistogramAUC, parts)
    assert pooled.compute() == 0.75 and pooled.error() == 0


def test_g3_f1_over_ranks_is_that_of_the_pooled_counts():
    parts = [([1, 1, 0], [1, 1, 1]), ([1, 0, 0, 0], [0, 0, 0, 0])]
    assert _over_ranks(lambda: Confusion(2), parts).f1()[1] == pytest.approx(4 / 6)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(0, 60), ranks=st.integers(1, 5))
def test_any_split_equals_one_process(data, count, ranks):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), min_size=ranks - 1, max_size=ranks - 1)))
    scores, guesses, labels = rng.random(count), rng.integers(0, 4, count), rng.integers(0, 4, count)
    positive = (labels > 1).astype(int)
    for make, *columns in [
        (Mean, scores, labels),
        (Accuracy, guesses, labels),
        (lambda: Confusion(4), guesses, labels),
        (HistogramAUC, scores, positive),
        (Quantiles, scores - 0.5),
    ]:
        parts = list(zip(*(np.split(column, cuts) for column in columns), strict=True))
        split, single = _over_ranks(make, parts), make()
        single.update(*columns)
        np.testing.assert_allclose(split.compute(), single.compute(), rtol=1e-12)
        for name, array in single.state().items():
            if array.dtype == np.int64:
                assert np.array_equal(split.state()[name], array)


def test_nothing_at_all_is_nan():
    for metric in (Mean(), Accuracy(), HistogramAUC(), Quantiles()):
        assert math.isnan(metric.compute())
    confusion = Confusion(3)
    assert confusion.compute().sum() == 0
    assert math.isnan(confusion.accuracy()) and math.isnan(confusion.macro_f1()) and np.isnan(confusion.f1()).all()
    assert math.isnan(HistogramAUC().error())
    assert math.isnan(exact_auc([], [])) and math.isnan(exact_auc([0.1, 0.2], [1, 1]))


def test_all_follow_the_protocol_and_states_are_copies():
    for metric in (Mean(), Accuracy(), Confusion(2), HistogramAUC(4), Quantiles()):
        assert isinstance(metric, Metric)
        state = metric.state()
        assert all(array.dtype in (np.float64, np.int64) for array in state.values())
        for array in state.values():
            array += 7
        assert all(not array.any() for array in metric.state().values())


def test_metrics_start_anew_after_reset():
    mean = Mean()
    mean.update([1, 2])
    mean.reset()
    mean.update([5])
    assert mean.compute() == 5


def test_mean_in_float64_with_weights_and_masks():
    mean = Mean()
    mean.update(np.full(10**5, 0.1, np.float32))
    assert mean.compute() == pytest.approx(float(np.float32(0.1)), rel=1e-12)
    masked = Mean()
    masked.update([[1.0, math.nan], [3.0, 4.0]], [[1, 0], [1, 0]])
    assert masked.compute() == 2.0
    spread = Mean()
    spread.update([[1.0, 3.0], [5.0, 7.0]], [1, 3])
    assert spread.compute() == (1 + 9 + 5 + 21) / 8
    bad = Mean()
    bad.update([1.0, math.nan])
    assert math.isnan(bad.compute())  # not hidden


def test_accuracy_from_scores_top_k_and_mask():
    scores = np.array([[0.1, 0.9, 0.0], [0.5, 0.3, 0.4], [0.2, 0.3, 0.5]])
    for top, right in ((1, 1), (2, 2), (3, 3)):
        accuracy = Accuracy(top)
        accuracy.update(scores, [1, 2, 0])
        assert accuracy.state()["right"] == right and accuracy.state()["count"] == 3
    accuracy = Accuracy()
    accuracy.update([[1, 2], [3, 4]], [[1, 2], [0, 0]], mask=[[True, True], [True, False]])
    assert accuracy.compute() == 2 / 3


def test_confusion_follows_the_definitions_class_by_class():
    rng = np.random.default_rng(0)
    for classes in (2, 3, 7):
        labels, guesses = rng.integers(0, classes, (2, 40))
        confusion = Confusion(classes)
        confusion.update(guesses, labels)
        assert confusion.accuracy() == np.mean(labels == guesses)
        f1 = []
        for one in range(classes):
            right = np.sum((labels == one) & (guesses == one))
            assert confusion.compute()[one].tolist() == [np.sum(guesses[labels == one] == c) for c in range(classes)]
            assert confusion.precision()[one] == right / np.sum(guesses == one)
            assert confusion.recall()[one] == right / np.sum(labels == one)
            f1.append(2 * right / (np.sum(guesses == one) + np.sum(labels == one)))
        assert confusion.f1().tolist() == f1 and confusion.macro_f1() == pytest.approx(np.mean(f1))


def test_confusion_rules_for_absent_classes():
    confusion = Confusion(4)
    confusion.update([0, 1, 1], [0, 0, 1])
    confusion.update([0], [2])  # class 2 is never predicted, class 3 never occurs
    np.testing.assert_array_equal(confusion.precision(), [0.5, 0.5, 0, math.nan])
    np.testing.assert_array_equal(confusion.recall(), [0.5, 1, 0, math.nan])
    assert confusion.macro_f1() == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=40))
def test_auc_is_the_share_of_pairs_in_order(items):
    scores, labels = np.array([score / 12 for score, _ in items]), np.array([int(label) for _, label in items])
    up, down = scores[labels == 1], scores[labels == 0]
    pairs = (up[:, None] > down).sum() + (up[:, None] == down).sum() / 2
    expected = pairs / (len(up) * len(down)) if len(up) and len(down) else math.nan
    assert exact_auc(scores, labels) == pytest.approx(expected, nan_ok=True)
    coarse = HistogramAUC(bins=5)
    coarse.update(scores, labels)
    if not math.isnan(expected):
        assert abs(coarse.compute() - expected) <= coarse.error() + 1e-12


def test_the_histogram_is_near_the_exact_area_and_tells_how_near():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 3000)
    scores = np.clip(rng.normal(0.4 + 0.2 * labels, 0.2), 0, 1)
    exact = exact_auc(scores, labels)
    histogram = HistogramAUC()
    histogram.update(scores, labels)
    assert 0 < abs(histogram.compute() - exact) <= histogram.error() < 2e-3
    logits = HistogramAUC(low=-10, high=10)
    logits.update(scores * 20 - 10, labels)
    assert abs(logits.compute() - exact) <= logits.error()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e9, 1e9, allow_nan=False), min_size=1, max_size=50),
    st.sampled_from([0.001, 0.01, 0.1]),
)
def test_quantiles_are_within_their_accuracy(values, accuracy):
    sketch = Quantiles(accuracy)
    sketch.update(values)
    at = np.array([0, 0.1, 0.25, 0.5, 0.9, 1])
    exact = np.sort(values)[np.floor(at * (len(values) - 1)).astype(int)]
    np.testing.assert_allclose(sketch.compute(at), exact, rtol=accuracy * (1 + 1e-9), atol=1e-9)


def test_quantiles_at_the_ends_of_their_range():
    sketch = Quantiles(smallest=1e-3, largest=1e3)
    sketch.update([math.inf, -math.inf, 0.0, 1e-9, 5.0])
    low, zero, zero_too, five, high = sketch.compute([0, 0.25, 0.5, 0.75, 1])
    assert low == -high and high == pytest.approx(1e3, rel=0.03)
    assert zero == zero_too == 0 and five == pytest.approx(5, rel=0.01)
    assert sketch.compute(0.75).shape == ()


def test_states_of_several_metrics_travel_as_one_vector():
    mean, confusion = Mean(), Confusion(2)
    mean.update([1.5, 2.5])
    confusion.update([0, 1], [1, 1])
    states = [mean.state(), confusion.state()]
    vector = to_vector(states)
    assert vector.dtype == np.float64 and vector.shape == (6,)
    for got, state in zip(from_vector(vector * 3, states), states, strict=True):
        assert {name: array.dtype for name, array in got.items()} == {n: a.dtype for n, a in state.items()}
        for name, array in state.items():
            assert np.array_equal(got[name], 3 * array) and np.array_equal(merge([state] * 3)[name], got[name])
    assert to_vector([]).shape == (0,) and from_vector([], []) == []
    for length in (5, 7):
        with pytest.raises(UsageError, match=f"{length} numbers was given; the states need 6"):
            from_vector(np.zeros(length), states)


def test_gathered_rows_come_in_sample_order():
    ids, rows = [[4, 0], [], [2, 9]], [["e", "a"], [], ["c", "j"]]
    flat_ids = np.concatenate([np.array(part, int) for part in ids])
    assert in_sample_order(flat_ids, np.array([r for part in rows for r in part])).tolist() == ["a", "c", "e", "j"]
    assert in_sample_order([], np.empty((0, 3))).shape == (0, 3)
    with pytest.raises(UsageError, match=r"\[4\] come more than once"):
        in_sample_order([4, 1, 4], [1, 2, 3])
    with pytest.raises(UsageError, match="one id per row"):
        in_sample_order([4, 1], [1, 2, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Accuracy(0), "top=0"),
        (lambda: Accuracy().update([1, 2], [1, 2, 3]), r"\(2,\).*\(3,\)"),
        (lambda: Accuracy().update([1, 2], [1, 2], mask=[True]), "mask"),
        (lambda: Accuracy(4).update([[0.1, 0.2, 0.3]], [1]), r"\(1, 3\)"),
        (lambda: Confusion(0), "classes=0"),
        (lambda: Confusion(2).update([0, 2], [0, 1]), "predictions hold"),
        (lambda: Confusion(2).update([0, 1], [0, -1]), "labels hold"),
        (lambda: Confusion(2).update([0.5], [1]), "predictions hold"),
        (lambda: Confusion(2).update([0], [[1]]), r"\(1, 1\)"),
        (lambda: HistogramAUC(low=1, high=0), "low must be below"),
        (lambda: HistogramAUC().update([1.5], [1]), "expected 0 to 1"),
        (lambda: HistogramAUC().update([0.5], [2]), "labels hold"),
        (lambda: exact_auc([math.nan], [1]), "NaN"),
        (lambda: exact_auc([0.1], [1, 0]), r"\(2,\)"),
        (lambda: Quantiles(accuracy=0), "accuracy=0"),
        (lambda: Quantiles(smallest=2, largest=1), "smallest=2"),
        (lambda: Quantiles().update([math.nan, 1]), "1 of 2 values are NaN"),
        (lambda: Quantiles().compute(1.5), "from 0 to 1"),
        (lambda: Confusion(2).load(Confusion(3).state()), r"\(3, 3\).*\(2, 2\)"),
        (lambda: Mean().load(Accuracy().state()), "right"),
    ],
)
def test_bad_input_is_refused_with_what_was_given(call, message):
    with pytest.raises(UsageError, match=message):
        call()
