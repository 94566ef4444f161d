"""Drop-in: every public name of Horovod's TensorFlow packages, and the names that hvdkit adds."""

from __future__ import annotations

import inspect
import types
from typing import Any

import horovod.tensorflow
import horovod.tensorflow.keras
import pytest

import hvdkit.tf
import hvdkit.tf.keras

PAIRS = [(horovod.tensorflow, hvdkit.tf), (horovod.tensorflow.keras, hvdkit.tf.keras)]


def public(module: types.ModuleType) -> set[str]:
    """Names of a module that are its own: modules that it merely imports from elsewhere are not."""
    names = {name for name in dir(module) if not name.startswith("_")}
    foreign = {
        name
        for name in names
        if isinstance(getattr(module, name), types.ModuleType)
        and not getattr(module, name).__name__.startswith(("horovod", "hvdkit"))
    }
    return names - foreign


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_every_name_of_horovod_is_here(theirs: types.ModuleType, ours: types.ModuleType) -> None:
    missing = {name for name in public(theirs) if not hasattr(ours, name)}
    assert missing == set()
    assert public(theirs) <= set(ours.__all__)


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_what_is_added_is_listed(theirs: types.ModuleType, ours: types.ModuleType) -> None:
    assert set(ours.__all__) - public(theirs) == {*ours.HVDKIT_NAMES, "HVDKIT_NAMES"}
    assert all(hasattr(ours, name) for name in ours.__all__)


def test_callbacks_keep_their_names() -> None:
    theirs = public(horovod.tensorflow.keras.callbacks) - {"is_version_greater_equal_than"}
    assert theirs <= set(hvdkit.tf.keras.callbacks.__all__)


def signatures() -> list[Any]:
    pairs: list[Any] = []
    for theirs, ours in [*PAIRS, (horovod.tensorflow.keras.callbacks, hvdkit.tf.keras.callbacks)]:
        for name in sorted(public(theirs)):
            value = getattr(theirs, name)
            if callable(value) and not name.startswith("is_version"):
                pairs.append(pytest.param(value, getattr(ours, name), id=f"{theirs.__name__}.{name}"))
    return pairs


@pytest.mark.parametrize(("theirs", "ours"), signatures())
def test_calls_written_for_horovod_fit(theirs: Any, ours: Any) -> None:
    if theirs is ours:
        return
    expected, found = (list(inspect.signature(f).parameters.values()) for f in (theirs, ours))
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in expected):
        return  # Horovod does not say what it takes
    positional = [p for p in found if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [p.name for p in positional[: len(expected)]] == [p.name for p in expected]
    for old, new in zip(expected, positional, strict=False):
        if old.default is not inspect.Parameter.empty:
            assert new.default == old.default or new.default is old.default


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hvdkit.tf.nonsense  # noqa: B018
