"""Slurm, PBS and LSF: what the scheduler's variables mean, and that a host list must lie within them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import HostfileError, UsageError
from hvdkit.launch.allocation import parse_names, read_lsf, read_pbs, read_slurm, read_variable
from hvdkit.launch.hosts import HostList
from hvdkit.launch.nodelist import expand_counts, expand_nodelist
from hvdkit.launch.sources import find_hosts


def slots(pool: HostList | None) -> dict[str, int]:
    assert pool is not None
    return {host.name: host.slots for host in pool.hosts}


def slurm(nodes: str, tasks: str) -> dict[str, str]:
    return {"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks}


@pytest.mark.parametrize(
    ("nodes", "tasks", "expected"),
    [
        ("n[001-003,007]", "2(x3),1", {"n001": 2, "n002": 2, "n003": 2, "n007": 1}),  # row 24
        ("rack[0-1]n[0-1]", "4(x4)", {"rack0n0": 4, "rack0n1": 4, "rack1n0": 4, "rack1n1": 4}),  # row 26
        ("n1", "3", {"n1": 3}),
        ("a,b c\td\ne", "1(x5)", {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}),
        ("n[1-2]-ib,login", "1,2,3", {"n1-ib": 1, "n2-ib": 2, "login": 3}),
        ("n[09-11]", "8(x3)", {"n09": 8, "n10": 8, "n11": 8}),
        ("n[8-11]", "1(x4)", {"n8": 1, "n9": 1, "n10": 1, "n11": 1}),
        ("n1,n1", "2,3", {"n1": 5}),
        ("a[0-1]b[0-1]c[0-1]", "2(x8)", {f"a{i}b{j}c{k}": 2 for i in "01" for j in "01" for k in "01"}),
    ],
)
def test_slurm(nodes: str, tasks: str, expected: dict[str, int]) -> None:
    assert slots(read_slurm(slurm(nodes, tasks))) == expected


@pytest.mark.parametrize(
    ("nodes", "tasks", "word"),
    [
        ("n[1-3]", "2(x2)", "3 nodes, 2 counts"),  # row 28
        ("n[3-1]", "2", "bad range 3-1"),  # row 29
        ("n[1-", "2", "never closed"),
        ("n1]", "2", "without"),
        ("n[1,[2]]", "2", "inside"),
        ("n[]", "1", "empty item"),
        ("n[1,,2]", "2", "empty item"),
        ("n[a-b]", "2", "'a-b'"),
        ("n[0-99999999]", "2", "more than 65536"),
        ("n[0-60000]m[0-60000]", "2", "more than 131072"),
        ("n[1-2];id", "1(x2)", "letters"),
        ("-n[1-2]", "1(x2)", "'-'"),
        ("n1", "2(x", "'2(x'"),
        ("n1", "two", "'two'"),
        ("n1", "1(x999999999)", "no count"),
        ("a[0-1]b[0-1]c[0-1]", "1(x7),2", "three or more brackets"),
        (",", "1", "no nodes"),
    ],
)
def test_slurm_mistakes(nodes: str, tasks: str, word: str) -> None:
    with pytest.raises(HostfileError) as caught:
        read_slurm(slurm(nodes, tasks))
    assert word in str(caught.value)
    assert caught.value.source in ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")


def test_slurm_without_counts() -> None:
    nodes = {"SLURM_JOB_NODELIST": "n[1-2]"}
    with pytest.raises(HostfileError, match="SLURM_TASKS_PER_NODE is not set"):
        read_slurm(nodes)
    assert slots(read_slurm(nodes, default_slots=4)) == {"n1": 4, "n2": 4}
    assert slots(read_slurm(nodes | {"SLURM_NTASKS_PER_NODE": "3"})) == {"n1": 3, "n2": 3}
    assert read_slurm({"SLURM_CONF": "/etc/slurm.conf"}) is None


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("n1\nn1\nn2\nn1\n", {"n1": 3, "n2": 1}),  # row 23
        ("n1\nn1\nn2\nn2\n", {"n1": 2, "n2": 2}),
        ("n1\nn2\nn1\nn2\n", {"n1": 2, "n2": 2}),
        ("n1\r\nn2\r\n", {"n1": 1, "n2": 1}),
        ("\nn1.pbs.example\n", {"n1.pbs.example": 1}),
    ],
)
def test_b3_pbs_node_file(tmp_path: Path, lines: str, expected: dict[str, int]) -> None:
    path = tmp_path / "nodes"
    path.write_text(lines)
    assert slots(read_pbs({"PBS_NODEFILE": str(path)})) == expected


def test_pbs_mistakes(tmp_path: Path) -> None:
    assert read_pbs({}) is None
    with pytest.raises(HostfileError, match="cannot be read"):
        read_pbs({"PBS_NODEFILE": str(tmp_path / "none")})
    (tmp_path / "empty").write_text("")
    with pytest.raises(HostfileError, match="no hosts"):
        read_pbs({"PBS_NODEFILE": str(tmp_path / "empty")})
    (tmp_path / "slots").write_text("n1\nn2 slots=2\n")
    with pytest.raises(HostfileError, match="one host name per line") as caught:
        read_pbs({"PBS_NODEFILE": str(tmp_path / "slots")})
    assert caught.value.line == 2


def test_lsf(tmp_path: Path) -> None:
    row_31 = {"LSB_MCPU_HOSTS": " batch1 1  n1 4 n2 4 "}
    pool = read_lsf(row_31)
    assert slots(pool) == {"batch1": 1, "n1": 4, "n2": 4}
    assert pool is not None and "--skip-launch-host" in pool.warnings[0]
    assert slots(read_lsf(row_31, skip_launch_host=True)) == {"n1": 4, "n2": 4}
    assert slots(read_lsf({"LSB_HOSTS": "n1 n2 n1"})) == {"n1": 2, "n2": 1}
    (tmp_path / "hosts").write_text("n1\nn1\nn2\n")
    assert slots(read_lsf({"LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")})) == {"n1": 2, "n2": 1}
    assert read_lsf({}) is None


@pytest.mark.parametrize(
    ("text", "word"), [("n1 2 n2", "without a count"), ("n1 x", "'x'"), ("2(x 4", "letters"), ("n1 -1", "'-1'")]
)
def test_lsf_mistakes(text: str, word: str) -> None:
    with pytest.raises(HostfileError) as caught:
        read_lsf({"LSB_MCPU_HOSTS": text})
    assert word in str(caught.value)


def test_only_the_launch_host() -> None:
    with pytest.raises(HostfileError, match="launch host"):
        read_lsf({"LSB_MCPU_HOSTS": "batch1 1"}, skip_launch_host=True)


S13 = slurm("s13n[09-11]", "8(x3)")


def test_b7_hosts_within_the_allocation() -> None:
    assert slots(find_hosts(S13, hosts="s13n09:8,s13n11:2")) == {"s13n09": 8, "s13n11": 2}
    assert slots(find_hosts(S13, hosts="s13n09.cluster:8")) == {"s13n09.cluster": 8}


@pytest.mark.parametrize(
    ("hosts", "word"),
    [("s13n12:1", "s13n12 is not in"), ("s13n09:9", "9 slots"), ("s13n09.a:1,10.0.0.1:1", "10.0.0.1")],
)
def test_b7_hosts_outside_the_allocation(hosts: str, word: str) -> None:
    with pytest.raises(HostfileError) as caught:
        find_hosts(S13, hosts=hosts)
    assert word in str(caught.value)
    assert "SLURM_JOB_NODELIST" in str(caught.value)


def test_b7_hostfile_outside_the_allocation_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("s13n09 slots=8\ns13n12 slots=8\n")
    with pytest.raises(HostfileError, match=r"hosts:2: host s13n12 is not in"):
        find_hosts(S13, hostfile=path)


def test_where_hosts_come_from(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("p1\n")
    pbs = {"PBS_NODEFILE": str(tmp_path / "nodes")}
    assert slots(find_hosts(S13 | pbs)) == {"s13n09": 8, "s13n10": 8, "s13n11": 8}
    assert slots(find_hosts(S13 | pbs, source="pbs")) == {"p1": 1}
    assert slots(find_hosts({"HVDKIT_HOSTS": "a:2"})) == {"a": 2}
    assert slots(find_hosts({}, ranks=3)) == {"localhost": 3}
    assert slots(find_hosts({"HVDKIT_HOSTS": "a:2"}, hosts="b:1")) == {"b": 1}
    assert read_variable({"HVDKIT_HOSTS": " "}) is None


def test_contradictions_are_refused(tmp_path: Path) -> None:
    for bad in (
        {"hosts": "a:1", "hostfile": "f"},
        {"source": "file"},
        {"source": "slurm", "hosts": "a:1"},
        {"default_slots": 0, "hosts": "a"},
        {},
    ):
        with pytest.raises(UsageError):
            find_hosts({}, **bad)
    with pytest.raises(HostfileError, match="no slurm job"):
        find_hosts({}, source="slurm")


@settings(max_examples=300, deadline=1000)
@given(st.text(alphabet="n01-[], \t\n()x;$é", max_size=60) | st.text(max_size=60))
def test_fuzz_nodelist(text: str) -> None:
    try:
        names = expand_nodelist(text, "s")
        assert names and all(name.strip() == name for name in names)
    except HostfileError as error:
        assert error.source == "s"
    try:
        assert len(expand_counts(text, "s", 3)) == 3
    except HostfileError as error:
        assert error.source == "s"
    try:
        read_lsf({"LSB_MCPU_HOSTS": text})
        parse_names(text.split("\n"), "s")
    except HostfileError:
        pass


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 20)), min_size=1, max_size=4), st.integers(1, 4))
def test_ranges_expand_like_a_plain_loop(ranges: list[tuple[int, int]], width: int) -> None:
    text = "n[" + ",".join(f"{low:0{width}d}-{low + more}" for low, more in ranges) + "]"
    expected = [f"n{i:0{max(width, len(str(low)))}d}" for low, more in ranges for i in range(low, low + more + 1)]
    assert expand_nodelist(text, "s") == expected
