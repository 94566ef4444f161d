"""`hvdkit run` from the outside: what it prints, what it refuses, its exit codes; with a stand-in for mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdkit.cli.main import main

ROOT = Path(__file__).parents[2]
# Answers --version as Open MPI does and starts `-n` ranks with Open MPI's variables, the first failure last.
MPIRUN = """#!{python}
import os, subprocess, sys
if sys.argv[1:] == ["--version"]:
    print("mpirun (Open MPI) 5.0.11")
    sys.exit()
size = int(sys.argv[sys.argv.index("-n") + 1])
hosts = open(sys.argv[sys.argv.index("--hostfile") + 1]).read()
command = sys.argv[sys.argv.index("-I") - 1:]
environs = [{{**os.environ, "OMPI_COMM_WORLD_RANK": str(r), "HOSTS": hosts}} for r in range(size)]
ranks = [subprocess.Popen(command, env=environ) for environ in environs]
sys.exit(max(r.wait() for r in ranks))
"""
Hvdkit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hvdkit(tmp_path: Path) -> Hvdkit:
    """Runs the command line with the stand-in as its mpirun, in an empty folder."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(MPIRUN.format(python=sys.executable))
    mpirun.chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()

    def run(
        *words: str, environ: dict[str, str] | None = None, stand_in: bool = True
    ) -> subprocess.CompletedProcess[str]:
        clean = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PBS_", "LSB_", "OMPI_", "HVDKIT_"))
        }
        options = ["--launcher-path", str(mpirun)] if stand_in else []
        return subprocess.run(
            [sys.executable, "-m", "hvdkit", "run", *options, *words],
            env={**clean, "PYTHONPATH": str(ROOT), **(environ or {})},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return run


def test_ranks_run_on_this_machine(hvdkit: Hvdkit) -> None:
    done = hvdkit(
        "-np", "2", "--", "python", "-c", "import os, sys; print(os.environ['OMPI_COMM_WORLD_RANK'], sys.executable)"
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", f"0 {sys.executable}", f"1 {sys.executable}"]


def test_the_two_dashes_may_be_left_out(hvdkit: Hvdkit) -> None:
    done = hvdkit("-np", "1", "sh", "-c", "echo $0 $1", "-np", "3")
    assert (done.returncode, done.stdout) == (0, "-np 3\n"), done.stderr


def test_without_np_every_slot_is_used(hvdkit: Hvdkit) -> None:
    done = hvdkit("-H", "localhost:3", "--", "sh", "-c", "echo $HOSTS")
    assert done.stdout == "localhost slots=3\n" * 3


def test_exit_code_and_last_words_of_the_rank_that_failed(hvdkit: Hvdkit) -> None:
    done = hvdkit(
        "-np",
        "2",
        "--",
        "python",
        "-c",
        "import os, sys; print('x'); sys.exit(7 * int(os.environ['OMPI_COMM_WORLD_RANK']))",
    )
    assert done.returncode == 7
    assert done.stderr.rstrip().endswith(
        "hvdkit: rank 1 on localhost ended with exit code 7; it was the first to fail. Its last lines:\n  | x"
    )


def test_the_host_file_is_removed(hvdkit: Hvdkit, tmp_path: Path) -> None:
    before = {"TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    assert hvdkit("-np", "1", "--", "true", environ=before).returncode == 0
    assert hvdkit("-np", "1", "--", "false", environ=before).returncode == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_dry_run_shows_all_and_starts_nothing(hvdkit: Hvdkit, tmp_path: Path) -> None:
    done = hvdkit("-H", "n1:2,n2:1", "--env", "V=a b'c", "--dry-run", "--", "touch", "it ran", environ={"A.B": "1"})
    assert done.returncode == 0, done.stderr
    command, _, rest = done.stdout.partition("\n\n")
    assert "--hostfile" in command and command.endswith("/touch 'it ran'")
    assert "n1 slots=2\nn2 slots=1\n" in rest and " V\n" in rest and "A.B" in rest
    assert not (tmp_path / "work" / "it ran").exists()


def test_dry_run_is_quoted_for_a_shell(hvdkit: Hvdkit) -> None:
    done = hvdkit("-np", "1", "--dry-run", "--", "echo", "a b", "$(id)", ";", "'")
    line = done.stdout.split("\n")[0]
    words = subprocess.run(
        ["sh", "-c", f'for w in {line}; do echo "$w"; done'], capture_output=True, text=True, check=True
    ).stdout
    assert words.endswith("echo\na b\n$(id)\n;\n'\n")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-np", "2"], 2, "after `--`"),
        (["-np", "2", "--"], 2, "after `--`"),
        (["--", "true"], 2, "how many processes"),
        (["-np", "0", "--", "true"], 2, "at least 1"),
        (["-np", "x", "--", "true"], 2, "'x' is not a valid integer"),
        (["-np", "4", "-H", "n1:2,n2:1", "--", "true"], 2, "offers 3 slots"),
        (["-H", "h1:2", "h2:2", "--", "true"], 2, "stray word 'h2:2'"),
        (["-H", "h1:2,", "--", "true"], 2, "empty entry 2"),
        (["-H", "$(id):2", "--", "true"], 2, "'$(id)'"),
        (["-H", "-oProxyCommand=id:1", "--", "true"], 2, "'-oProxyCommand'"),
        (["-H", "; rm -rf x", "--", "true"], 2, "stray word"),
        (["-H", "a\nb:1", "--", "true"], 2, "stray word"),
        (["--hostfile", "none", "--", "true"], 2, "none: the hostfile cannot be read: No such file"),
        (["--hostfile", "/dev/null", "--", "true"], 2, "no hosts"),
        (["-np", "2", "--", "python", "none.py"], 1, "the script 'none.py' does not exist"),
        (["-np", "2", "--", "no-such-program"], 1, "'no-such-program' was not found on PATH"),
        (["-np", "2", "--env", "CUDA_VISIBLE_DEVICES=0", "--", "true"], 2, "gpus="),
        (["-np", "2", "--nope", "--", "true"], 2, "No such option"),
        (["-np", "2", "--include", "n9", "--", "true"], 2, "no host 'n9'"),
    ],
)
def test_bad_input(
    words: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PBS_", "LSB_", "HVDKIT_HOSTS"))]:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as caught:
        main(["run", *words])
    shown = capsys.readouterr()
    assert caught.value.code == code, shown.err
    assert message in shown.err and "Traceback" not in shown.err
    assert shown.out == ""


def test_b7_inside_an_allocation(hvdkit: Hvdkit) -> None:
    slurm = {"SLURM_JOB_NODELIST": "s13n[09-11]", "SLURM_TASKS_PER_NODE": "8(x3)"}
    outside = hvdkit("-H", "s13n12:1", "--", "true", environ=slurm)
    assert outside.returncode == 2 and "s13n12 is not in this job's allocation" in outside.stderr
    inside = hvdkit("--dry-run", "--", "true", environ=slurm)
    assert "s13n09 slots=8\ns13n10 slots=8\ns13n11 slots=8\n" in inside.stdout


def test_an_empty_hostfile_of_an_allocation_is_no_reason_to_run_here(hvdkit: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("")
    done = hvdkit("-np", "2", "--", "true", environ={"PBS_NODEFILE": str(tmp_path / "nodes")})
    assert done.returncode == 2 and "no hosts" in done.stderr


def test_no_launcher(hvdkit: Hvdkit, tmp_path: Path) -> None:
    done = hvdkit("--launcher-path", str(tmp_path / "none"), "-np", "1", "--", "true", stand_in=False)
    assert done.returncode == 1 and "did not answer" in done.stderr


def test_words_of_the_command_arrive_one_by_one(hvdkit: Hvdkit) -> None:
    words = ["a b", "", ":", "--", "-np", "$(id)", "\n", "é", "'\""]
    done = hvdkit("-np", "1", "--", "python", "-c", "import sys; print(ascii(sys.argv[1:]))", *words)
    assert done.stdout == ascii(words) + "\n"
