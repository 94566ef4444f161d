"""Ranks on hosts: the numbers that Horovod gives them, and what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import HostfileError, PlacementError, UsageError
from hvdkit.launch.filters import filter_hosts
from hvdkit.launch.hostfile import parse_hostfile
from hvdkit.launch.hosts import Host, HostList
from hvdkit.launch.placement import Rank, place


def pool_of(*slots: int) -> HostList:
    return HostList(tuple(Host(f"h{i}", count) for i, count in enumerate(slots)), "f")


def test_rank_table_of_unequal_hosts() -> None:
    assert place(pool_of(1, 2, 1)).ranks == (
        Rank(0, "h0", 0, 1, 0, 3, None),
        Rank(1, "h1", 0, 2, 1, 3, None),
        Rank(2, "h1", 1, 2, 0, 1, None),
        Rank(3, "h2", 0, 1, 2, 3, None),
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_b3_numbers_hold_for_any_slots(slots: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, sum(slots)))
    placement = place(pool_of(*slots), size)
    ranks = placement.ranks
    assert [r.rank for r in ranks] == list(range(size)) and placement.size == size
    assert len({(r.host, r.local_rank) for r in ranks}) == size
    for r in ranks:
        same_host = [other for other in ranks if other.host == r.host]
        same_local = [other.host for other in ranks if other.local_rank == r.local_rank]
        assert (r.local_size, r.cross_size) == (len(same_host), len(same_local))
        assert r.local_rank == r.rank - same_host[0].rank
        assert r.cross_rank == same_local.index(r.host)
    assert [host.slots for host in placement.hosts[:-1]] == slots[: len(placement.hosts) - 1]
    assert sum(host.slots for host in placement.hosts) == size


@pytest.mark.parametrize("order", ["n1\nn1\nn2\nn2\n", "n1\nn2\nn1\nn2\n"])
def test_b3_node_file_gives_one_table(order: str) -> None:
    ranks = place(parse_hostfile(order)).ranks
    assert [(r.host, r.local_rank, r.local_size, r.cross_rank, r.cross_size) for r in ranks] == [
        ("n1", 0, 2, 0, 2),
        ("n1", 1, 2, 0, 2),
        ("n2", 0, 2, 1, 2),
        ("n2", 1, 2, 1, 2),
    ]


def test_gpus_follow_the_local_rank() -> None:
    pool = parse_hostfile("n1 gpus=0,2,3\nn2 slots=1\n")
    assert [r.gpu for r in place(pool).ranks] == [0, 2, 3, None]
    assert [h.gpus for h in place(pool, 2).hosts] == [(0, 2)]


def test_b7_more_ranks_than_slots_lists_the_hosts() -> None:
    with pytest.raises(PlacementError) as caught:
        place(parse_hostfile("n1 slots=2\nlonger-name slots=1\n", source="f"), 4)
    message = str(caught.value)
    assert "-np 4" in message and "3 slots" in message
    assert "f:1" in message and "longer-name" in message
    assert isinstance(caught.value, ValueError) and caught.value.exit_code == 2


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks(ranks: int) -> None:
    with pytest.raises(PlacementError, match="at least 1"):
        place(pool_of(2), ranks)


W = parse_hostfile("w0 slots=4\nw1 slots=4\n", source="f")


def filtered(include: str = "", exclude: str = "") -> dict[str, tuple[int, ...]]:
    return {host.name: host.slot_ids for host in filter_hosts(W, include, exclude).hosts}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("w0@w1:0,2", "", {"w0": (0, 1, 2, 3), "w1": (0, 2)}),  # row 33
        ("w1:0,2@w0", "", {"w0": (0, 1, 2, 3), "w1": (0, 2)}),
        ("w1", "", {"w1": (0, 1, 2, 3)}),
        ("", "w1:0", {"w0": (0, 1, 2, 3), "w1": (1, 2, 3)}),
        ("", "w0", {"w1": (0, 1, 2, 3)}),
        ("", "w0:0,1,2,3@w1:1", {"w1": (0, 2, 3)}),
        ("w1:3,1", "", {"w1": (1, 3)}),
        ("", "", {"w0": (0, 1, 2, 3), "w1": (0, 1, 2, 3)}),
    ],
)
def test_filters(include: str, exclude: str, expected: dict[str, tuple[int, ...]]) -> None:
    assert filtered(include, exclude) == expected


def test_filtered_slots_are_the_ranks_gpus() -> None:
    ranks = place(filter_hosts(W, include="w0:1@w1:0,2")).ranks
    assert [(r.host, r.local_rank, r.gpu) for r in ranks] == [("w0", 0, 1), ("w1", 0, 0), ("w1", 1, 2)]
    gpus = parse_hostfile("w0 gpus=4,6,7\n")
    assert [r.gpu for r in place(filter_hosts(gpus, exclude="w0:6")).ranks] == [4, 7]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("w2", "no host 'w2'"),
        ("w0:4", "no slot 4"),
        ("w0:x", "'x'"),
        ("w0:", "missing"),
        ("w0@w0:1", "twice"),
        ("w0:1,1", "twice"),
    ],
)
def test_filter_mistakes(text: str, word: str) -> None:
    for given_filter in ({"include": text}, {"exclude": text}):
        with pytest.raises(HostfileError) as caught:
            filter_hosts(W, **given_filter)
        assert word in str(caught.value)


def test_filters_that_leave_nothing_or_contradict() -> None:
    with pytest.raises(HostfileError, match="no host is left"):
        filter_hosts(W, exclude="w0@w1")
    with pytest.raises(UsageError, match="keep one"):
        filter_hosts(W, "w0", "w1")


def test_ipv6_in_a_filter() -> None:
    pool = parse_hostfile("[fd00::1]:4\nn1:1\n")
    assert [h.slots for h in filter_hosts(pool, include="[fd00::1]:0,3").hosts] == [2]
    assert [h.slots for h in filter_hosts(pool, include="fd00::1").hosts] == [4]
