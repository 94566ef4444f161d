"""Command lines: golden files for every launcher, and what each launcher cannot be told."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from hvdkit.errors import HvdkitError, LaunchError, UsageError
from hvdkit.launch.command import Command, JobRequest, build_command, gpu_spec
from hvdkit.launch.dialects import write_hosts
from hvdkit.launch.environment import Forwarding, forwarded_environment
from hvdkit.launch.hostfile import parse_hostfile
from hvdkit.launch.hosts import Host, HostList
from hvdkit.launch.mpi import Launcher
from hvdkit.launch.placement import place

GOLDEN = Path(__file__).parents[1] / "data" / "launch"
LAUNCHERS = {
    "openmpi4": Launcher("/opt/ompi4/bin/mpirun", "openmpi", (4, 1, 8)),
    "openmpi5": Launcher("/opt/ompi5/bin/mpirun", "openmpi", (5, 0, 11)),
    "mpich": Launcher("/opt/mpich/bin/mpiexec", "mpich", (5, 0, 2)),
    "intel": Launcher("/opt/impi/bin/mpirun", "intel", (2021, 19)),
    "horovodrun": Launcher("/opt/env/bin/horovodrun", "horovodrun"),
}
ENVIRON = {
    "PATH": "/opt/env/bin:/usr/bin",
    "NCCL_DEBUG": "INFO",
    "HOME": "/home/ada",
    "WANDB_API_KEY": "s3cret",
    "CUDA_VISIBLE_DEVICES": "3",
}
TWO_HOSTS = "n1 slots=2\nn2 slots=1\n"


def job(family: str, hosts: str = TWO_HOSTS, remote: tuple[str, ...] = ("n1", "n2"), **changes: object) -> JobRequest:
    plain = JobRequest(
        launcher=LAUNCHERS[family],
        placement=place(parse_hostfile(hosts)),
        command=("/opt/env/bin/python", "train.py", "--note", "a b'c"),
        forwarding=forwarded_environment(ENVIRON),
        remote_hosts=remote,
        python="/opt/env/bin/python",
        wrapper="/opt/env/rank_wrapper.py",
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def build(family: str, **changes: object) -> Command:
    return build_command(job(family, **changes), "/tmp/hosts")  # type: ignore[arg-type]


FULL = {
    "ssh_port": 2222,
    "ssh_identity": "/home/ada/.ssh/id_cluster",
    "interface": "eth1",
    "bind": "core",
    "tag_output": True,
    "log_dir": "/logs",
    "launcher_arguments": ("--verbose",),
    "forwarding": forwarded_environment(ENVIRON, ["SEED=7"]),
    "hosts": "n1 gpus=0,2\nn2.rack.example slots=2\n",
    "remote": ("n1", "n2.rack.example"),
}
CASES: dict[str, dict[str, object]] = {
    "local": {"hosts": "localhost slots=4\n", "remote": (), "cores": 2, "is_root": True},
    "two_hosts": {},
    "full": FULL,
}


def as_text(command: Command) -> str:
    """One argument a line, then what is added to the environment or taken from it, and the host file."""
    lines = [json.dumps(word) for word in command.argv]
    lines += ["", "# environment"]
    lines += [f"+{name}={command.environ[name]}" for name in sorted(set(command.environ) - set(ENVIRON))]
    lines += [f"-{name}" for name in sorted(set(ENVIRON) - set(command.environ))]
    lines += [f"~{name}={v}" for name, v in sorted(command.environ.items()) if ENVIRON.get(name, v) != v]
    return "\n".join([*lines, "", "# host file", command.hostfile])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", LAUNCHERS)
def test_golden_command(family: str, case: str) -> None:
    """`HVDKIT_UPDATE_GOLDEN=1 pytest` writes the files anew; read the diff before you commit it."""
    changes = dict(CASES[case])
    if family == "horovodrun":
        changes.pop("bind", None)
    text = as_text(build(family, **changes))
    path = GOLDEN / f"{family}_{case}.txt"
    if os.environ.get("HVDKIT_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("family", LAUNCHERS)
def test_b8_no_secret_leaves_this_machine(family: str) -> None:
    command = build(family)
    assert not any("s3cret" in word or "WANDB" in word or "CUDA_VISIBLE" in word for word in command.argv)
    if family not in ("openmpi4", "openmpi5"):  # these forward what -x names; the others all they have
        assert "WANDB_API_KEY" not in command.environ and "CUDA_VISIBLE_DEVICES" not in command.environ


@pytest.mark.parametrize("family", LAUNCHERS)
def test_b8_values_never_stand_on_the_command_line(family: str) -> None:
    forwarding = forwarded_environment(ENVIRON, ["V=a b'c\nd"])
    command = build(family, forwarding=forwarding)
    assert command.environ["V"] == "a b'c\nd"
    assert not any("b'c\nd" in word for word in command.argv)


@pytest.mark.parametrize("family", LAUNCHERS)
def test_a_local_job_keeps_the_users_environment(family: str) -> None:
    command = build(family, hosts="localhost slots=2\n", remote=())
    assert command.environ["WANDB_API_KEY"] == "s3cret" and command.environ["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize("family", LAUNCHERS)
@pytest.mark.parametrize("words", [(":",), ("",), ("a", ":", "b")])
def test_words_that_launchers_take_for_their_own(family: str, words: tuple[str, ...]) -> None:
    command = build(family, command=("/bin/echo", *words))
    after = command.argv[command.argv.index("/opt/env/rank_wrapper.py") :]
    assert ":" not in command.argv and "" not in command.argv
    assert json.loads(after[after.index("--json") + 1]) == ["/bin/echo", *words]


def test_more_ranks_than_cores_yield() -> None:
    assert "mpi_yield_when_idle" in build("openmpi5", hosts="localhost slots=3\n", remote=(), cores=2).argv
    assert "mpi_yield_when_idle" not in build("openmpi5", hosts="localhost slots=2\n", remote=(), cores=2).argv
    assert "mpi_yield_when_idle" not in build("openmpi5", hosts="n1 slots=8\n", remote=("n1",), cores=2).argv


def test_many_hosts_are_reached_at_once() -> None:
    hosts = "".join(f"n{i} slots=1\n" for i in range(64))
    argv = build("openmpi4", hosts=hosts, remote=("n1",)).argv
    assert argv[argv.index("plm_rsh_num_concurrent") + 1] == "64"


def test_threads_are_told_in_one_line() -> None:
    notes = build("openmpi5", hosts="localhost slots=2\n", remote=(), cores=2).notes
    assert sum("OMP_NUM_THREADS" in note for note in notes) == 1
    forwarding = forwarded_environment(ENVIRON | {"OMP_NUM_THREADS": "1"})
    notes = build("openmpi5", hosts="localhost slots=2\n", remote=(), cores=2, forwarding=forwarding).notes
    assert not any("OMP_NUM_THREADS" in note for note in notes)


@pytest.mark.parametrize(
    ("family", "host", "word"),
    [
        ("mpich", Host("fd00::1", 1), "IPv6"),
        ("intel", Host("fd00::1", 1), "IPv6"),
        ("horovodrun", Host("fd00::1", 1), "IPv6"),
        ("mpich", Host("n1", 1, port=2222), "--ssh-port"),
        ("horovodrun", Host("n1", 1, user="ada"), "ssh/config"),
        ("horovodrun", Host("n1", 1, port=2222), "ssh/config"),
        ("openmpi4", Host("n_1", 1), "underscore"),
    ],
)
def test_what_a_dialect_cannot_say(family: str, host: Host, word: str) -> None:
    with pytest.raises(LaunchError, match=word):
        build_command(dataclasses.replace(job(family), placement=place(HostList((host,), "f"))), "/tmp/hosts")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("horovodrun", {"bind": "core"}),
        ("horovodrun", {"ssh_user": "ada"}),
        ("openmpi5", {"ssh_port": 0}),
        ("openmpi5", {"ssh_identity": "/home/a b/key"}),
        ("openmpi5", {"ssh_identity": "-oProxyCommand=id"}),
        ("horovodrun", {"ssh_identity": "/k;id"}),
        ("mpich", {"ssh_user": "$(id)"}),
        ("mpich", {"interface": "-x"}),
        ("mpich", {"interface": "eth0;id"}),
    ],
)
def test_settings_that_would_not_arrive_as_given(family: str, changes: dict[str, object]) -> None:
    with pytest.raises(HvdkitError) as caught:
        build(family, **changes)
    assert isinstance(caught.value, (UsageError, LaunchError))


def test_horovodrun_from_a_directory_that_its_shell_would_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "a b;c"
    bad.mkdir()
    monkeypatch.chdir(bad)
    with pytest.raises(LaunchError, match="directory"):
        build("horovodrun")
    assert build("horovodrun", hosts="localhost slots=1\n", remote=()).argv


def test_gpu_lists_are_given_by_range_of_ranks() -> None:
    assert gpu_spec(place(parse_hostfile("n1 gpus=0,2\nn2 slots=3\nn3 gpus=5\n"))) == "0-1:0,2;5-5:5"
    assert gpu_spec(place(parse_hostfile("n2 slots=3\n"))) == ""


def test_dialects_keep_what_they_can() -> None:
    hosts = [Host("n1", 2, 4, None, "ada", 2222), Host("fd00::1", 1, gpus=(3,))]
    assert write_hosts(hosts, "openmpi") == "ada@n1 slots=2 max_slots=4 port=2222\nfd00::1 slots=1\n"
    assert parse_hostfile(write_hosts(hosts, "hvdkit")).hosts[1].gpus == (3,)
    assert write_hosts([Host("n1", 2, user="ada")], "intel") == "n1:2 user=ada\n"


def test_request_without_forwarding_has_no_names() -> None:
    empty = Forwarding({}, (), ())
    assert "-x" in build("openmpi5", forwarding=empty).argv  # the way back to the launcher
    assert build("openmpi5", forwarding=empty, remote=()).argv.count("-x") == 0
