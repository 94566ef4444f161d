"""Checkpoints: whole or not there, proven when read, and without litter, wherever the process dies."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.checkpoint import CheckpointFolder, pack, unpack
from hvdkit.errors import CheckpointError, UsageError


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "deep" / "checkpoints", keep=3)


def _names(folder):
    return sorted(path.name for path in folder.path.iterdir())


def _steps(folder):
    return [step for step, _ in folder.steps()]


def test_what_is_written_is_found_and_read(folder):
    assert folder.newest_good() is None and folder.steps() == [] and folder.best() is None
    for step in range(1, 6):
        path = folder.write(step * 10, b"payload %d" % step)
    assert folder.newest_good() == (50, path)
    assert folder.read(path) == path.read_bytes() == b"payload 5"
    assert _steps(folder) == [30, 40, 50]
    assert len(_names(folder)) == 7  # three payloads, their descriptions, and "latest"
    assert (folder.path / "latest").read_text().strip() == path.name
    info = folder.info(path)
    assert (info.step, info.bytes, info.metric) == (50, 9, None) and len(info.sha256) == 64


@pytest.mark.parametrize("damage", ["half", "empty", "changed", "longer", "no description", "bad description"])
def test_f5_a_broken_newest_file_is_passed_over_with_a_warning(folder, damage, capsys):
    older = folder.write(1, b"a" * 1000)
    newest = folder.write(2, b"b" * 1000)
    beside = newest.with_suffix(".json")
    {
        "half": lambda: os.truncate(newest, 500),
        "empty": lambda: os.truncate(newest, 0),
        "changed": lambda: newest.write_bytes(b"b" * 999 + b"c"),
        "longer": lambda: newest.write_bytes(b"b" * 1001),
        "no description": beside.unlink,
        "bad description": lambda: os.truncate(beside, beside.stat().st_size // 2),
    }[damage]()
    assert folder.newest_good() == (1, older)
    message = capsys.readouterr().err
    assert "WARNING" in message and newest.name in message
    with pytest.raises(CheckpointError, match=newest.stem):
        folder.read(newest)
    again = folder.write(2, b"d" * 1000)
    assert folder.newest_good() == (2, again)
    assert _steps(folder) == [1, 2]  # the broken one of the same step is gone


def test_f5_all_broken_is_a_fresh_start(folder, capsys):
    for path in [folder.write(step, b"abc") for step in range(3)]:
        os.truncate(path, 1)
    assert folder.newest_good() is None
    assert capsys.readouterr().err.count("has 1 bytes, but 3 were written") == 3


class _Killed(BaseException):
    """Not an Exception, so that nothing in between can handle it, as nothing handles a kill."""


def _die_at_call(monkeypatch, number):
    """Make call ``number`` to any function that touches the disk the last one."""
    calls = iter(range(1000))

    def dying(function):
        def call(*args, **kwargs):
            if next(calls) == number:
                raise _Killed
            return function(*args, **kwargs)

        return call

    for owner, name in [(os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "open")]:
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


def test_f5_dying_at_any_point_of_a_save_leaves_a_good_checkpoint_and_no_litter(tmp_path):
    points = 0
    for number in range(100):
        folder = CheckpointFolder(tmp_path / str(number), keep=2)
        for step in (1, 2, 3):
            folder.write(step, b"before %d" % step)
        with pytest.MonkeyPatch.context() as patch:
            _die_at_call(patch, number)
            try:
                folder.write(4, b"new")
                died = False
            except _Killed:
                died = True
        step, path = folder.newest_good()
        assert (step, folder.read(path)) in [(3, b"before 3"), (4, b"new")]
        assert died or step == 4
        folder.write(5, b"after")
        assert folder.newest_good()[0] == 5
        assert not [name for name in _names(folder) if name.startswith(".")]
        assert len(_names(folder)) == 5, number  # two checkpoints of two files each, and "latest"
        points += died
        if not died:
            break
    assert points >= 10


@pytest.mark.parametrize("number", range(12))
def test_f5_dying_while_the_same_step_is_saved_again_keeps_the_first_save(tmp_path, number):
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.write(7, b"first")
    with pytest.MonkeyPatch.context() as patch:
        _die_at_call(patch, number)
        with contextlib.suppress(_Killed):
            folder.write(7, b"second")
    step, path = folder.newest_good()
    assert step == 7 and folder.read(path) in (b"first", b"second")


WRITER = """
import sys
from hvdkit.checkpoint import CheckpointFolder
folder = CheckpointFolder(sys.argv[1], keep=2)
start = folder.newest_good()
for step in range(start[0] + 1 if start else 0, 10**6):
    folder.write(step, step.to_bytes(8, "little") * 250_000)
    print(step, flush=True)
"""


def test_f5_kill_minus_nine_inside_save(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for attempt in range(4):
        command = [sys.executable, "-c", WRITER, str(folder.path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            saved = [int(writer.stdout.readline()) for _ in range(3)]
            time.sleep(0.0017 * (attempt + 1))  # somewhere inside one of the next saves, which take some 5 ms
            writer.kill()
            saved += [int(line) for line in writer.stdout]
        step, path = folder.newest_good()
        assert step in (saved[-1], saved[-1] + 1)
        assert folder.read(path) == step.to_bytes(8, "little") * 250_000
        assert len(_names(folder)) <= 9  # 2 kept, 1 written, 1 not yet removed, 2 files each, and "latest"


@pytest.mark.parametrize("failing", ["fsync", "replace", "mkdir"])
def test_a_full_disk_is_reported_and_leaves_no_litter(folder, monkeypatch, failing):
    folder.write(1, b"good")
    before = _names(folder)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os if failing == "fsync" else Path, failing, full)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written to .*checkpoints.*No space left"):
        folder.write(2, b"new")
    assert _names(folder) == before
    assert folder.newest_good()[0] == 1


def test_a_path_that_is_a_file_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointFolder(tmp_path / "file").write(1, b"")
    with pytest.raises(CheckpointError, match="cannot be listed"):
        CheckpointFolder(tmp_path / "file").newest_good()


def test_other_files_in_the_folder_are_left_alone(folder):
    folder.write(1, b"")
    for name in ("notes.txt", "step-5.ckpt", "step-000000000009-12345678.ckpt.bak", "other.json", ".hidden"):
        (folder.path / name).write_text("mine")
    for step in range(2, 7):
        folder.write(step, b"")
    assert {"notes.txt", "step-5.ckpt", "step-000000000009-12345678.ckpt.bak", "other.json", ".hidden"} < set(
        _names(folder)
    )
    assert folder.newest_good()[0] == 6


def test_a_checkpoint_removed_while_another_process_looks_is_passed_over(folder, monkeypatch, capsys):
    good = folder.write(1, b"good")
    gone = folder.write(2, b"gone")
    listed = list(folder.path.iterdir())
    gone.unlink()
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(listed))
    assert folder.newest_good() == (1, good)
    assert gone.name in capsys.readouterr().err


def test_the_best_is_kept_if_asked(tmp_path):
    metrics = [0.2, 0.9, 0.9, 0.5, 0.1, None]
    for best, expected in (("max", 2), ("min", 4), (None, None)):
        folder = CheckpointFolder(tmp_path / str(best), keep=1, best=best)
        for step, metric in enumerate(metrics):
            folder.write(step, b"x%d" % step, metric)
        assert _steps(folder) == ([expected] if best else []) + [5]
        assert (folder.best() or (None,))[0] == expected
    everything = CheckpointFolder(tmp_path / "all", keep=None)
    for step in range(9):
        everything.write(step, b"")
    assert _steps(everything) == list(range(9))


def test_a_broken_file_does_not_take_the_place_of_a_good_one(folder):
    paths = [folder.write(step, b"abc") for step in range(3)]
    os.truncate(paths[2], 1)
    folder.write(3, b"abc")
    assert _steps(folder) == [0, 1, 3]  # the three newest whole ones


def test_going_back_does_not_remove_what_is_written_then(tmp_path):
    """A broken step 100 is passed over; the save of step 91 must survive its own pruning."""
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.write(90, b"good")
    os.truncate(folder.write(100, b"good"), 1)
    folder.write(90, b"again")
    folder.write(91, b"next")
    assert folder.newest_good()[0] == 91
    assert _steps(folder) == [91, 100]  # not older than what was written, so not judged
    folder.write(101, b"past it")
    assert _steps(folder) == [101]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: CheckpointFolder(path, keep=0), "keep=0"),
        (lambda path: CheckpointFolder(path, keep=True), "keep=True"),
        (lambda path: CheckpointFolder(path, best="loss"), "best='loss'"),
        (lambda path: CheckpointFolder(path).write(-1, b""), "step=-1"),
        (lambda path: CheckpointFolder(path).write(1.0, b""), "step=1.0"),
        (lambda path: CheckpointFolder(path).write(1, b"", metric=math.nan), "metric=nan"),
        (lambda path: CheckpointFolder(path).write(1, "text"), "type str"),
    ],
)
def test_bad_input_is_refused(tmp_path, call, message):
    with pytest.raises(UsageError, match=message):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_reading_what_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"no readable step-1\.json"):
        CheckpointFolder(tmp_path).read(tmp_path / "step-1.ckpt")


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.booleans() | st.none(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(PLAIN)
def test_plain_values_come_back_with_their_types(state):
    loaded = unpack(pack(state))
    assert loaded == state and repr(loaded) == repr(state)


def test_arrays_come_back_with_dtype_shape_and_order():
    generator = np.random.default_rng(0)
    arrays = [
        generator.random((3, 4)).astype(kind)
        for kind in ("f2", "f4", "f8", ">f4", "i1", "u8", "c16", "?", "M8[s]", "S3", "U3")
    ]
    arrays += [np.zeros((2, 0, 3)), np.array(3.5), np.asfortranarray(arrays[1]), arrays[2][::2, ::-1]]
    arrays += [np.zeros(2, [("x", "i4"), ("y", "f8")]), np.zeros((), "V5")]
    for array, loaded in zip(arrays, unpack(pack({"deep": [tuple(arrays)]}))["deep"][0], strict=True):
        assert type(loaded) is np.ndarray and loaded.dtype == array.dtype and loaded.shape == array.shape
        assert loaded.tobytes() == array.tobytes() and loaded.flags.writeable
    for scalar in (np.float32(1.5), np.int64(-3), np.bool_(True), np.float64(0.1), np.str_("é")):
        assert unpack(pack(scalar)) == scalar and type(unpack(pack(scalar))) is type(scalar)


def test_bfloat16_comes_back_bit_by_bit():
    ml_dtypes = pytest.importorskip("ml_dtypes")  # comes with TensorFlow only
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        array = np.random.default_rng(0).normal(size=(5, 3)).astype(dtype)
        for given_array in (array, array.T, array[::2], np.array(1.5, dtype), array[:0]):
            loaded = unpack(pack([given_array]))[0]
            assert loaded.dtype == dtype and loaded.shape == given_array.shape
            assert loaded.tobytes() == given_array.tobytes()
        assert type(unpack(pack(dtype(1.5)))) is dtype


def test_random_states_survive():
    generator = np.random.default_rng(7)
    saved = unpack(pack(generator.bit_generator.state))
    expected = generator.random(5)
    generator.bit_generator.state = saved
    assert generator.random(5).tolist() == expected.tolist()
    assert math.isnan(unpack(pack(math.nan))) and unpack(pack(-math.inf)) == -math.inf
    assert math.copysign(1, unpack(pack(-0.0))) == -1
    assert type(unpack(pack(OrderedDict(a=1)))) is dict


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [1, {2, 3}]}, r"state\['a'\]\[1\] is a builtins.set"),
        ([np.array([object()])], r"state\[0\] is a numpy.ndarray"),
        ({"f": print}, r"state\['f'\]"),
        ({(1, 2): 3}, r"key \(1, 2\) of type tuple"),
    ],
)
def test_what_has_no_plain_form_is_refused_with_its_place(state, where):
    with pytest.raises(CheckpointError, match=where):
        pack(state)


def test_foreign_bytes_are_refused_and_nothing_is_unpickled():
    stream, code = io.BytesIO(), io.BytesIO()
    np.savez(stream, something=np.zeros(3))
    tree = np.frombuffer(json.dumps({"a": 0}).encode(), np.uint8)
    np.savez(code, tree=tree, a0=np.array([print], dtype=object))
    good = pack({"a": np.arange(1000)})
    for payload in (b"", b"hello", stream.getvalue(), code.getvalue(), good[: len(good) // 2], good[10:]):
        with pytest.raises(CheckpointError, match=f"these {len(payload)} bytes"):
            unpack(payload)


def test_a_dtype_that_is_not_installed_is_named():
    stream = io.BytesIO()
    tree = np.frombuffer(json.dumps({"a": 0, "dtype": "float7_e1m5"}).encode(), np.uint8)
    np.savez(stream, tree=tree, a0=np.zeros(3, np.uint8))
    with pytest.raises(CheckpointError, match="float7_e1m5, which needs the package ml_dtypes"):
        unpack(stream.getvalue())
