"""Lists of files over ranks and workers, and records by number: each exactly once per epoch."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import UsageError
from hvdkit.files import FilePlan, list_files, shuffled
from hvdkit.records import TarFiles, TFRecordFiles
from hvdkit.sharding import ShardPlan


def _plans(files, size, workers=1, **settings):
    return [
        FilePlan(files=files, size=size, rank=rank, workers=workers, worker=worker, **settings)
        for rank in range(size)
        for worker in range(workers)
    ]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_c4_each_item_is_seen_once_for_any_size_and_workers(workers):
    """range(23), size 3: one stream, split by record over ranks and workers (0: the rank reads by itself)."""
    plans = _plans(["all"], 3, max(1, workers))
    seen = [list(plan.records(0, lambda _: range(23))) for plan in plans]
    assert sorted(item for part in seen for item in part) == list(range(23))
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=9),
    size=st.integers(1, 5),
    workers=st.integers(1, 3),
    split=st.sampled_from(["auto", "file", "record"]),
    epoch=st.integers(0, 3),
)
def test_every_record_once_however_it_is_split(counts, size, workers, split, epoch):
    content = {f"part-{i}": [(i, j) for j in range(count)] for i, count in enumerate(counts)}
    files = random.Random(0).sample(list(content), len(content))  # listed in another order, as another host may
    plans = _plans(files, size, workers, split=split)
    seen = [list(plan.records(epoch, content.__getitem__)) for plan in plans]
    assert sorted(item for part in seen for item in part) == sorted(item for part in content.values() for item in part)
    if plans[0].split == "record":
        assert max(map(len, seen)) - min(map(len, seen)) <= 1
    if split == "auto":
        assert plans[0].split == ("file" if len(counts) >= size * workers else "record")
    assert len({tuple(plan.order(epoch)) for plan in plans}) == 1


def test_order_of_files_follows_seed_and_epoch_only():
    files = [f"{i:02}" for i in range(30)]
    plan = FilePlan(files=files, size=4, rank=1, seed=5)
    other = FilePlan(files=files[::-1], size=7, rank=3, seed=5)
    assert plan.order(2) == other.order(2) != plan.order(3)
    assert sorted(plan.order(2)) == files == FilePlan(files=files, size=1, rank=0, shuffle=False).order(9)
    assert plan.mine(0) == plan.order(0)[1::4]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_by_record_a_resume_on_another_size_goes_on_with_the_next_record(size):
    files, read = ["a", "b"], {"a": range(10), "b": range(10, 25)}.__getitem__
    stopped = [list(plan.records(1, read))[:3] for plan in _plans(files, 4, split="record")]
    rest = [list(plan.records(1, read, start=12)) for plan in _plans(files, size, split="record")]
    assert sorted(item for part in stopped + rest for item in part) == list(range(25))


@settings(max_examples=80, deadline=None)
@given(count=st.integers(0, 60), buffer=st.integers(1, 70), epoch=st.integers(0, 2))
def test_the_shuffle_buffer_gives_each_once_and_stays_within_its_size(count, buffer, epoch):
    drawn = []

    def source():
        for item in range(count):
            drawn.append(item)
            yield item

    out = []
    for item in shuffled(source(), buffer, seed=3, epoch=epoch):
        out.append(item)
        assert len(drawn) - len(out) < buffer
    assert sorted(out) == list(range(count))
    assert out == list(shuffled(range(count), buffer, seed=3, epoch=epoch))
    assert buffer > 1 or out == list(range(count))


def test_the_shuffle_buffer_differs_by_seed_epoch_and_share_and_is_equal_everywhere():
    orders = [tuple(shuffled(range(50), 20, seed=s, epoch=e, share=h)) for s in (0, 1) for e in (0, 1) for h in (0, 1)]
    assert len(set(orders)) == 8
    assert list(shuffled(range(8), 4, seed=1)) == [0, 4, 3, 2, 6, 1, 7, 5]


def test_files_are_listed_in_sorted_order(tmp_path):
    for name in ("b.tar", "a.tar", "c.txt", "x[1].tar"):
        (tmp_path / name).write_text("")
    names = [str(tmp_path / name) for name in ("a.tar", "b.tar", "x[1].tar")]
    assert list_files(str(tmp_path / "*.tar")) == names
    assert list_files([tmp_path / "x[1].tar", tmp_path / "b.tar"]) == names[1:]
    with pytest.raises(UsageError, match=r"none\.tar"):
        list_files([names[0], str(tmp_path / "none.tar")])
    with pytest.raises(UsageError, match="comes 2 times"):
        list_files([tmp_path / "*.tar", tmp_path / "a.tar"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": []}, "empty list"),
        ({"files": ["a", "a"]}, "'a' comes 2 times"),
        ({"size": 0}, "size=0"),
        ({"rank": 2}, "rank=2"),
        ({"workers": 0}, "workers=0"),
        ({"worker": 1}, "worker=1"),
        ({"split": "byte"}, "split='byte'"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_file_plans_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        FilePlan(**{"files": ["a", "b"], "size": 2, "rank": 0, **change})


def test_by_file_there_is_no_start_inside_an_epoch():
    with pytest.raises(UsageError, match="start=3"):
        FilePlan(files=["a", "b"], size=2, rank=0, split="file").records(0, lambda _: [], start=3)


def _tfrecord(path, payloads):
    path.write_bytes(b"".join(struct.pack("<QI", len(p), 0) + p + bytes(4) for p in payloads))


@pytest.fixture
def tfrecords(tmp_path):
    """Three files of 4, 0 and 3 records, the payload of which is their number."""
    for name, numbers in (("a", range(4)), ("b", ()), ("c", range(4, 7))):
        _tfrecord(tmp_path / f"{name}.tfrecord", [b"%d" % n * (n + 1) for n in numbers])
    return tmp_path / "*.tfrecord"


def test_tfrecords_by_number_make_an_exact_plan_with_fewer_files_than_ranks(tfrecords):
    records = pickle.loads(pickle.dumps(TFRecordFiles(tfrecords)))  # as a spawned worker gets it
    assert list(records) == [b"%d" % n * (n + 1) for n in range(7)]
    plans = [ShardPlan(length=len(records), size=5, rank=rank, global_batch=3) for rank in range(5)]
    seen = [records[int(i)] for plan in plans for ids in plan.batches(0) for i in ids]
    assert sorted(seen) == sorted(records[i] for i in range(7))


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:5], lambda b: b"text that is no TFRecord at all"])
def test_broken_tfrecord_files_are_named(tmp_path, damage):
    _tfrecord(tmp_path / "x", [b"abc", b"defg"])
    (tmp_path / "x").write_bytes(damage((tmp_path / "x").read_bytes()))
    with pytest.raises(UsageError, match=r"x is cut off, compressed or no TFRecord file: the record at byte"):
        TFRecordFiles(tmp_path / "x")


def test_a_file_that_changes_after_it_was_indexed_is_noticed(tfrecords):
    records = TFRecordFiles(tfrecords)
    os.truncate(records.files[2], 20)
    assert records[0] == b"0"
    with pytest.raises(UsageError, match="changed since it was indexed"):
        records[6]
    with pytest.raises(UsageError, match="record=7"):
        records[7]


def _tar(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_tars_give_samples_by_number(tmp_path):
    _tar(tmp_path / "1.tar", [("d/001.jpg", b"J1"), ("d/001.cls", b"1"), ("d/002.seg.png", b"S2"), ("d/002.cls", b"2")])
    _tar(tmp_path / "0.tar", [("README", b"no sample"), ("000.txt", b"T0" * 1000), (".hidden.x", b"")])
    samples = pickle.loads(pickle.dumps(TarFiles(tmp_path / "*.tar")))
    assert list(samples) == [
        {"__key__": "000", "txt": b"T0" * 1000},
        {"__key__": "d/001", "jpg": b"J1", "cls": b"1"},
        {"__key__": "d/002", "seg.png": b"S2", "cls": b"2"},
    ]
    order = ShardPlan(length=3, size=1, rank=0, global_batch=2).ids(0, 0)
    assert samples[order[0]]["__key__"]  # numpy numbers are welcome


def test_the_same_key_in_two_tars_is_two_samples(tmp_path):
    for name in "ab":
        _tar(tmp_path / f"{name}.tar", [("001.cls", name.encode())])
    assert [sample["cls"] for sample in map(TarFiles(tmp_path / "*.tar").__getitem__, range(2))] == [b"a", b"b"]


def test_bad_tars_are_named(tmp_path):
    _tar(tmp_path / "z.tar", [("1.cls", b"1")], mode="w:gz")
    _tar(tmp_path / "twice.tar", [("1.cls", b"1"), ("1.cls", b"2")])
    (tmp_path / "text.tar").write_text("no tar " * 200)
    for name, message in (
        ("z.tar", "uncompressed tar"),
        ("text.tar", "uncompressed tar"),
        ("twice.tar", "'1.cls' twice"),
    ):
        with pytest.raises(UsageError, match=rf"{name}.*{message}"):
            TarFiles(tmp_path / name)


def test_numbers_and_plans_meet_at_no_records(tmp_path):
    _tfrecord(tmp_path / "empty", [])
    records = TFRecordFiles(tmp_path / "empty")
    assert len(records) == 0 and ShardPlan(length=len(records), size=2, rank=0, global_batch=4).steps == 0
    with pytest.raises(UsageError, match="record=0"):
        records[0]
    assert np.array_equal(records._spans, np.empty((0, 2)))
