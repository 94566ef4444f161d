"""`hvdkit hosts`: the tables, the JSON object, the dialects, exit code 2 for a bad list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hvdkit.cli.main import cli
from hvdkit.errors import HostfileError, LaunchError, UsageError

SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}


def hosts(*words: str, environ: dict[str, str] | None = None) -> Result:
    unset = dict.fromkeys(
        ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "PBS_NODEFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS", "HVDKIT_HOSTS")
    )
    return CliRunner().invoke(cli, ["hosts", *words], env={**unset, **(environ or {})}, standalone_mode=False)


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("ada@n1 gpus=0,2 max_slots=4 port=2222\nn2 slots=1\nn3 slots=0\n")
    result = hosts("--hostfile", str(path), "--json")
    assert result.exception is None
    assert json.loads(result.stdout) == {
        "hosts": [
            {
                "host": "n1",
                "slots": 2,
                "max_slots": 4,
                "gpus": [0, 2],
                "user": "ada",
                "port": 2222,
                "source": f"{path}:1",
            },
            {
                "host": "n2",
                "slots": 1,
                "max_slots": None,
                "gpus": None,
                "user": None,
                "port": None,
                "source": f"{path}:2",
            },
        ],
        "ranks": [
            {"rank": 0, "host": "n1", "local_rank": 0, "local_size": 2, "cross_rank": 0, "cross_size": 2, "gpu": 0},
            {"rank": 1, "host": "n1", "local_rank": 1, "local_size": 2, "cross_rank": 0, "cross_size": 1, "gpu": 2},
            {"rank": 2, "host": "n2", "local_rank": 0, "local_size": 1, "cross_rank": 1, "cross_size": 2, "gpu": None},
        ],
        "warnings": [f"{path}:3: host n3 has 0 slots and is left out"],
    }


def test_tables_say_where_hosts_came_from() -> None:
    result = hosts(environ=SLURM)
    lines = result.stdout.split("\n")
    assert lines[0].split() == ["host", "slots", "max_slots", "gpus", "user", "port", "source"]
    assert lines[1].split() == ["n1", "2", "-", "-", "-", "-", "SLURM_JOB_NODELIST"]
    assert lines[4].split() == ["rank", "host", "local_rank", "local_size", "cross_rank", "cross_size", "gpu"]
    assert lines[7].split() == ["2", "n2", "0", "1", "1", "2", "-"]


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("openmpi", "n1 slots=2\nn2 slots=1\n"),
        ("mpich", "n1:2\nn2:1\n"),
        ("intel", "n1:2\nn2:1\n"),
        ("horovod", "n1 slots=2\nn2 slots=1\n"),
        ("deepspeed", "n1 slots=2\nn2 slots=1\n"),
    ],
)
def test_formats(dialect: str, text: str) -> None:
    assert hosts("-H", "n1:2,n2:1", "--format", dialect).stdout == text


def test_sources(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("p1\np1\n")
    pbs = {"PBS_NODEFILE": str(tmp_path / "nodes")}
    lsf = {"LSB_MCPU_HOSTS": "batch1 1 l1 4"}
    everything = SLURM | pbs | lsf
    for source, names in (("auto", ["n1", "n2"]), ("slurm", ["n1", "n2"]), ("pbs", ["p1"]), ("lsf", ["batch1", "l1"])):
        found = json.loads(hosts("--source", source, "--json", environ=everything).stdout)["hosts"]
        assert [host["host"] for host in found] == names
    skipped = hosts("--source", "lsf", "--skip-launch-host", "--json", environ=lsf)
    assert [host["host"] for host in json.loads(skipped.stdout)["hosts"]] == ["l1"]


def test_filters() -> None:
    result = hosts("-H", "w0:4,w1:4", "--include", "w0@w1:0,2", "--json")
    assert [(h["host"], h["gpus"]) for h in json.loads(result.stdout)["hosts"]] == [
        ("w0", [0, 1, 2, 3]),
        ("w1", [0, 2]),
    ]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["-H", "a,"], HostfileError),
        (["--source", "slurm"], HostfileError),
        (["--source", "file"], UsageError),
        (["--hostfile", "none"], HostfileError),
        (["-H", "a:1", "-np", "2"], UsageError),
        ([], UsageError),
    ],
)
def test_bad_lists_have_exit_code_2(words: list[str], kind: type[UsageError]) -> None:
    error = hosts(*words).exception
    assert isinstance(error, kind) and error.exit_code == 2


def test_a_format_that_cannot_say_it() -> None:
    assert isinstance(hosts("-H", "[::1]:2", "--format", "mpich").exception, LaunchError)
