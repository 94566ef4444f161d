"""Hostfiles and -H lists: every spelling gives the right hosts, and every mistake its place."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdkit.errors import HostfileError
from hvdkit.launch.hostfile import parse_host_option, parse_hostfile, read_hostfile
from hvdkit.launch.hosts import Host, HostList, host_key, name_problem
from hvdkit.launch.placement import place

ROOT = Path(__file__).parents[2]


def slots(pool: HostList) -> dict[str, int]:
    return {host.name: host.slots for host in pool.hosts}


GOOD_FILES = {
    "row 1": ("n1 slots=2\nn2 slots=4\n", {"n1": 2, "n2": 4}),
    "row 2, blank lines and comments": ("# rack\n\nn1 slots=2  # top\nn2 slots=2\n", {"n1": 2, "n2": 2}),
    "row 3, no final newline": ("n1 slots=2 # c", {"n1": 2}),
    "row 4, CRLF": ("n1 slots=2\r\nn2 slots=2\r\n", {"n1": 2, "n2": 2}),
    "row 6, max_slots": ("n1 slots=4 max_slots=8\n", {"n1": 4}),
    "max_slots first": ("n1 max_slots=8 slots=4\n", {"n1": 4}),
    "row 7, max_slots alone": ("n1 max_slots=4\n", {"n1": 4}),
    "max-slots, slots-max, slots_max": ("n1 max-slots=4\nn2 slots-max=2\nn3 slots_max=1", {"n1": 4, "n2": 2, "n3": 1}),
    "row 9, blanks around =": ("n1 slots = 4\n", {"n1": 4}),
    "one blank at =": ("n1 slots= 4\nn2 slots =5\n", {"n1": 4, "n2": 5}),
    "row 10, zero slots": ("n1 slots=0\nn2 slots=2\n", {"n2": 2}),
    "row 11, repeated names": ("n1\nn1\nn2\n", {"n1": 2, "n2": 1}),
    "row 14, Hydra": ("n1:4\nn2:2\n", {"n1": 4, "n2": 2}),
    "row 15, Hydra with a comment": ("n1:2 # c\nn2:1\n", {"n1": 2, "n2": 1}),
    "Hydra, repeats add up": ("n1:2\nn2:1\nn1:2\n", {"n1": 4, "n2": 1}),
    "a byte order mark": ("\ufeffn1 slots=2\n", {"n1": 2}),
    "tabs and leading blanks": ("\t n1\tslots=2\t\n", {"n1": 2}),
    "cpu and count": ("n1 cpu=2\nn2 count=3\n", {"n1": 2, "n2": 3}),
    "// comment": ("n1 slots=2 // c\n// all\n", {"n1": 2}),
    "/* */ over lines": ("/* a\nn0 slots=1\n*/ n1 slots=2 /* x */\n", {"n1": 2}),
    "slots after a comment": ("n1 /* x */ slots=2\n", {"n1": 2}),
    "quoted user": ('n1 slots=2 user="ada"\n', {"n1": 2}),
    "dots and underscores": ("n_1.a.com slots=1\nn_1.b.org slots=2\n", {"n_1.a.com": 1, "n_1.b.org": 2}),
    "IPv6": ("[::1]:2\nfe80::1%eth0 slots=1\n2001:db8::7 slots=4\n", {"::1": 2, "fe80::1%eth0": 1, "2001:db8::7": 4}),
    "upper case is the same host": ("N1:2\nn1:1\n", {"N1": 3}),
    "gpus give slots": ("n1 gpus=0,2,3\nn2 gpus=4-7\n", {"n1": 3, "n2": 4}),
}


@pytest.mark.parametrize(("text", "expected"), GOOD_FILES.values(), ids=GOOD_FILES)
def test_b1_hostfile_spelling(text: str, expected: dict[str, int]) -> None:
    assert slots(parse_hostfile(text)) == expected
    assert slots(parse_hostfile(text.encode())) == expected


# text, line, column, words that the message must have
BAD_FILES = {
    "row 12, slots= twice": ("n1 slots=2\nn1 slots=3\n", 2, 1, ("n1", "lines 1 and 2")),
    "row 13, names without slots": ("n1\nn2\n", 1, 1, ("n1", "--slots-per-host")),
    "row 18, only a port": ("n1 port=22\n", 1, 1, ("no slot count",)),
    "a name without slots among others": ("n1 slots=2\nn2\n", 2, 1, ("n2",)),
    "repeats among counts": ("n1\nn1\nn2 slots=1\n", 1, 1, ("n1",)),
    "slots= and : for one host": ("n1:2\nn1 slots=2\n", 2, 1, ("twice",)),
    "count twice in a line": ("n1:2 slots=2\n", 1, 12, ("twice",)),
    "key twice": ("n1 slots=2 slots=3\n", 1, 12, ("slots", "twice")),
    "negative": ("ok slots=1\nn1 slots=-1\n", 2, 10, ("'-1'",)),
    "no number": ("n1 slots=two\n", 1, 10, ("'two'",)),
    "digits of another script": ("n1 slots=\u0663\n", 1, 10, ("whole number",)),
    "huge": ("n1 slots=99999999999999999999\n", 1, 10, ("whole number",)),
    "no value": ("n1 slots=\n", 1, 4, ("no value",)),
    "no count after the colon": ("n1:\n", 1, 4, ("missing",)),
    "no name": (":4\n", 1, 1, ("missing",)),
    "stray word": ("n1 slots=2 foo\n", 1, 12, ("foo",)),
    "stray number": ("n1 4\n", 1, 4, ("'4'",)),
    "unknown key": ("n1 slots=2 speed=9\n", 1, 12, ("speed", "known are")),
    "two hosts on a line": ("n1,n2 slots=2\n", 1, 3, ("one host per line",)),
    "exclusion": ("^n1\n", 1, 1, ("--exclude",)),
    "relative": ("+n0 slots=1\n", 1, 1, ("relative",)),
    "rankfile": ("rank 0=n1 slot=0\n", 1, 1, ("rankfile",)),
    "max below slots": ("n1 slots=4 max_slots=2\n", 1, 22, ("max_slots=2",)),
    "GPU twice": ("n1 gpus=0,0\n", 1, 9, ("twice",)),
    "GPU range backwards": ("n1 gpus=3-1\n", 1, 9, ("3-1",)),
    "slots and GPUs disagree": ("n1 slots=2 gpus=0,1,2\n", 1, 17, ("2 slots but 3 GPUs",)),
    "port out of range": ("n1 slots=1 port=70000\n", 1, 17, ("70000",)),
    "two users": ("a@n1:1\nb@n1:1\n", 2, 1, ("two users",)),
    "two ports": ("n1:1 port=1\nn1:1 port=2\n", 2, 1, ("two ports",)),
    "bad user": ("a;b@n1 slots=1\n", 1, 1, ("user",)),
    "bad IPv6": ("[::1 slots=1\n", 1, 1, ("IPv6",)),
    "open comment": ("n1 slots=1\n  /* x\n", 2, 3, ("never closed",)),
    "no UTF-8": (b"n1 slots=2\nn\xff slots=1\n", 2, 2, ("0xff",)),
    "NUL": ("n1\0 slots=1\n", 1, 1, ("letters",)),
}


@pytest.mark.parametrize(("text", "line", "column", "words"), BAD_FILES.values(), ids=BAD_FILES)
def test_b1_mistake_has_line_column_text_and_reason(
    text: str | bytes, line: int, column: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, source="cluster.txt")
    error = caught.value
    assert (error.line, error.column) == (line, column), str(error)
    assert str(error).startswith(f"cluster.txt:{line}:{column}: ")
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize("text", ["", "\n\n", "# only\n", "  \t\r\n", "/* */", "n1 slots=0\n"], ids=repr)
def test_b1_row_35_no_hosts(text: str) -> None:
    with pytest.raises(HostfileError, match=r"f: (no hosts|every host has 0 slots)"):
        parse_hostfile(text, source="f")


def test_row_10_warns_of_the_host_left_out() -> None:
    (warning,) = parse_hostfile("n1 slots=0\nn2 slots=2\n", source="f").warnings
    assert "f:1" in warning and "n1" in warning


def test_row_13_default_slots() -> None:
    assert slots(parse_hostfile("n1\nn2 port=22\n", default_slots=3)) == {"n1": 3, "n2": 3}


def test_everything_that_a_line_says_is_kept() -> None:
    (host,) = parse_hostfile("ada@n1 slots=2 max_slots=4 port=2222 gpus=1,3\n", source="f").hosts
    assert host == Host("n1", 2, 4, (1, 3), "ada", 2222, "f:1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1:2, h2:4", {"h1": 2, "h2": 4}),  # row 19
        ("h1", {"h1": 1}),
        ("a,a,b", {"a": 2, "b": 1}),
        ("a:2,a:1", {"a": 3}),
        ("[::1]:2,h2:1", {"::1": 2, "h2": 1}),
        ("ada@h1:2", {"h1": 2}),
    ],
)
def test_host_option(text: str, expected: dict[str, int]) -> None:
    assert slots(parse_host_option(text)) == expected


@pytest.mark.parametrize(
    ("text", "column", "word"),
    [
        ("h1:2,", 6, "empty entry 2"),  # row 20
        (",h1", 1, "empty entry 1"),
        ("h1:2,,h2:1", 6, "empty entry 2"),
        ("h1:2 h2:4", 6, "stray word 'h2:4'"),
        ("h1:x", 4, "'x'"),
        ("h1:2,-oProxyCommand=x:1", 6, "'-'"),
    ],
)
def test_b7_host_option_mistakes(text: str, column: int, word: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_host_option(text)
    assert caught.value.column == column
    assert word in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "; rm -rf x",
        "$(id)",
        "`id`",
        "-oProxyCommand=id",
        "a|b",
        "a&b",
        "a'b",
        'a"b',
        "a\\b",
        "a\nb",
        "a\0b",
        "ä",
        "a..b",
        "",
    ],
)
def test_names_that_could_mean_something_to_a_shell(name: str) -> None:
    assert name_problem(name) is not None
    with pytest.raises(HostfileError):
        parse_hostfile(f"{name} slots=2\n")
    with pytest.raises(HostfileError):
        parse_host_option(f"{name}:2")


def test_a_leading_minus_is_said_to_be_an_option_of_ssh() -> None:
    assert "ssh would take it for an option" in (name_problem("-oProxyCommand=id") or "")


def test_message_of_a_hostile_file_is_safe_for_a_terminal() -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile("n1 slots=\x1b[2J\x07\n")
    assert all(char.isprintable() or char == "\n" for char in str(caught.value))


def test_missing_file_stops(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match="No such file"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(HostfileError, match="directory"):
        read_hostfile(tmp_path)


EXAMPLES = {
    "openmpi": {"node1": 2, "node2": 4, "node4": 1},
    "mpich": {"node1": 3, "node2": 4},
    "intel": {"node1": 2, "node2": 4},
    "deepspeed": {"worker-0": 4, "worker-1": 4},
    "horovod": {"node1": 2, "node2": 4},
    "pbs_nodefile": {"node1": 3, "node2": 1},
    "gpus": {"node1": 3, "node2": 4},
    "addresses": {"n1.rack-a.example": 2, "n1.rack-b.example": 2, "10.0.0.7": 4, "fd00::1": 2, "fd00::2": 2, "n5": 1},
    "windows": {"node1": 2, "node2": 2},
    "localhost": {"localhost": 2},
}


def test_every_example_hostfile_is_tested() -> None:
    assert {path.name for path in (ROOT / "hostfiles").iterdir()} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_hostfile(name: str) -> None:
    assert slots(read_hostfile(ROOT / "hostfiles" / name)) == EXAMPLES[name]


_WORDS = st.sampled_from(
    [
        "n1",
        "n2",
        "slots",
        "slots=2",
        "=",
        "3",
        ":",
        "[",
        "]",
        "::1",
        "#",
        "//",
        "/*",
        "*/",
        "\n",
        "\r\n",
        " ",
        "\t",
        ",",
        "-",
        "@",
        "u@",
    ]
    + [
        "max_slots=1",
        "gpus=0,1",
        "port=22",
        '"',
        "^n1",
        "+n1",
        "rank 0=",
        "\ufeff",
        "\x85",
        "\u2028",
        "\0",
        "0",
        "$(id)",
        "9" * 30,
    ]
)
_TEXTS = st.one_of(st.text(), st.lists(_WORDS).map("".join))


def check_hosts(pool: HostList) -> None:
    """What every accepted list must hold."""
    keys = [host_key(host.name) for host in pool.hosts]
    assert keys and len(keys) == len(set(keys))
    for host in pool.hosts:
        assert host.slots > 0 and name_problem(host.name) is None
        assert host.gpus is None or len(host.gpus) == host.slots


@settings(max_examples=400, deadline=1000)
@given(st.one_of(st.binary(), _TEXTS), st.sampled_from([None, 1, 4]))
@example(b"\xef\xbb\xbf\xff", None)
@example("a" * 200_000, None)
@example("/*" * 50_000, None)
@example("n1 " + "x=1 " * 20_000, None)
def test_fuzz_hostfile(content: str | bytes, default_slots: int | None) -> None:
    try:
        check_hosts(parse_hostfile(content, source="f", default_slots=default_slots))
    except HostfileError as error:
        assert error.source == "f"
        assert error.line is not None or "no hosts" in str(error) or "0 slots" in str(error)
        assert len(str(error)) < 2000


@settings(max_examples=300, deadline=1000)
@given(_TEXTS)
def test_fuzz_host_option(text: str) -> None:
    try:
        check_hosts(parse_host_option(text))
    except HostfileError as error:
        assert error.source == "-H"


@settings(max_examples=100)
@given(
    st.dictionaries(st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True), st.integers(1, 64), min_size=1, max_size=8),
    st.data(),
)
def test_every_dialect_reads_back_as_it_was(hosts: dict[str, int], data: st.DataObject) -> None:
    from hvdkit.launch.dialects import DIALECTS, write_hosts

    pool = HostList(tuple(Host(name, count) for name, count in hosts.items()), "f")
    dialect = data.draw(st.sampled_from(sorted(DIALECTS)))
    assert slots(parse_hostfile(write_hosts(pool.hosts, dialect))) == hosts


def test_ten_thousand_hosts_are_parsed_and_placed_quickly() -> None:
    text = "".join(f"node{i:05d} slots=4\n" for i in range(10_000))
    seconds = []
    for _ in range(5):
        start = time.process_time()
        placement = place(parse_hostfile(text))
        seconds.append(time.process_time() - start)
    assert placement.size == 40_000
    assert min(seconds) < 0.3  # 0.1 on a quiet machine: bench/ measures, this only finds a slow path
