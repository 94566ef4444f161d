"""Jobs under a launcher of a few lines: exit codes, the rank that failed first, signals, nothing left behind.

The launcher stands in for mpirun: it starts ranks with Open MPI's variables and, told so, ends them when one fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hvdkit.launch import execute
from hvdkit.launch.command import WRAPPER
from hvdkit.launch.execute import describe_failure, failure_code
from hvdkit.launch.reports import RankReport, Reports, routes_back

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import os, signal, subprocess, sys, time
size, kind, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
environs = [{**os.environ, "OMPI_COMM_WORLD_RANK": str(r)} for r in range(size)]
ranks = [subprocess.Popen(command, env=environ, start_new_session=True) for environ in environs]
if kind == "leaves":  # as mpirun leaves an ssh that waits for a host that is gone
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", command[-1]], start_new_session=True)
if kind == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
codes = [None] * size
while None in codes:
    codes = [r.poll() for r in ranks]
    if kind == "kills" and any(codes):
        for r in ranks:
            if r.poll() is None:
                os.killpg(r.pid, signal.SIGTERM)
    time.sleep(0.02)
sys.exit(max(1 if c else 0 for c in codes))
"""


class Run:
    """A job of ``size`` ranks, each running ``script`` (with ``rank`` at hand), in a process of its own."""

    def __init__(
        self,
        tmp_path: Path,
        script: str,
        *,
        size: int = 2,
        kind: str = "kills",
        wrapper_options: str = "",
        settings: str = "",
    ) -> None:
        self.tag = f"hvdkit-test-{os.getpid()}-{time.monotonic_ns()}"
        (tmp_path / "launcher.py").write_text(LAUNCHER)
        (tmp_path / "rank.py").write_text(
            "import os, signal, sys, time\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n" + textwrap.dedent(script)
        )
        words = [sys.executable, str(tmp_path / "launcher.py"), str(size), kind, sys.executable, "-I", "-S", WRAPPER]
        words += [*wrapper_options.split(), "--", sys.executable, str(tmp_path / "rank.py"), self.tag]
        (tmp_path / "job.py").write_text(
            f"import os, sys\nfrom hvdkit.launch import execute\n{settings}\n"
            f"sys.exit(execute.run_job({words!r}, dict(os.environ), ['host%d' % i for i in range({size})]))\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, str(tmp_path / "job.py")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )

    def ranks(self) -> list[psutil.Process]:
        """The rank processes themselves, wrappers left out."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if self.tag in line and WRAPPER not in line and "launcher.py" not in " ".join(line):
                found.append(process)
        return found

    def wait_for(self, count: int) -> list[psutil.Process]:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            ranks = self.ranks()
            if len(ranks) == count:
                return ranks
            time.sleep(0.05)
        raise AssertionError(f"{len(self.ranks())} ranks run, {count} expected")

    def end(self, timeout_s: float = 60) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        assert self.ranks() == [], "a rank outlived its job"
        return self.process.returncode, out, err


def test_all_well(tmp_path: Path) -> None:
    code, out, err = Run(tmp_path, "print('rank', rank)", size=3).end()
    assert code == 0 and sorted(out.split("\n")) == ["", "rank 0", "rank 1", "rank 2"] and err == ""


def test_f1_exception_is_last_on_the_screen(tmp_path: Path) -> None:
    code, _, err = Run(
        tmp_path,
        "print('step 3')\nif rank == 1:\n    time.sleep(0.5)\n    raise RuntimeError('boom')\ntime.sleep(60)",
        size=3,
    ).end()
    assert code == 1
    last = err[err.index("hvdkit: rank") :]
    assert last.startswith("hvdkit: rank 1 on host1 ended with exit code 1")
    assert "  | step 3" in last and last.rstrip().endswith("| RuntimeError: boom")


def test_f1_exit_code_of_the_rank_is_the_jobs(tmp_path: Path) -> None:
    code, _, err = Run(tmp_path, "if rank == 1: sys.exit(3)\ntime.sleep(60)").end()
    assert code == 3 and "rank 1 on host1 ended with exit code 3" in err


def test_f1_killed_rank(tmp_path: Path) -> None:
    code, _, err = Run(tmp_path, "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)").end()
    assert code == 137 and "rank 0 on host0 was ended by SIGKILL" in err


def test_f1_killed_wrapper_takes_its_rank_with_it(tmp_path: Path) -> None:
    run = Run(tmp_path, "time.sleep(60)")
    victim = next(p for p in run.wait_for(2) if p.environ()["OMPI_COMM_WORLD_RANK"] == "1")
    victim.parent().kill()
    code, _, err = run.end()
    assert code != 0 and "rank 1 on host1 was lost" in err


def test_f1_a_later_failure_does_not_hide_the_first(tmp_path: Path) -> None:
    """Rank 0 dies of what rank 1 did, and is even the first to be gone: rank 1 still hangs in its clean-up."""
    script = """
        if rank == 1:
            import traceback
            try:
                raise ValueError('the cause')
            except ValueError:
                traceback.print_exc()
            time.sleep(1)
            sys.exit(5)
        time.sleep(0.5)
        sys.stderr.write('Traceback (most recent call last):\\n  HorovodInternalError: Horovod has been shut down\\n')
        sys.exit(1)
    """
    code, _, err = Run(tmp_path, script, kind="waits").end()
    assert (
        code == 5
        and "rank 1 on host1 ended with exit code 5" in err
        and "the cause" in err[err.index("hvdkit: rank") :]
    )


def test_f1_launcher_that_does_not_end_the_others(tmp_path: Path) -> None:
    script = "if rank == 1: sys.exit(4)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(300)"
    quick = "execute.LINGER_S, execute.KILL_S = 0.5, 1.0"
    code, _, err = Run(tmp_path, script, kind="ignores", settings=quick).end(20)
    assert code == 4 and "rank 1 on host1" in err


def test_the_whole_job_ends_in_time() -> None:
    """From the failure of a rank to the last KILL, with ranks and a launcher that ignore everything else."""
    assert execute.LINGER_S + 2 * execute.KILL_S < 20
    assert execute.GRACE_S + 4 + execute.KILL_S < 20


def test_only_the_last_twenty_lines(tmp_path: Path) -> None:
    _, _, err = Run(tmp_path, "for i in range(50): print('line', i)\nsys.exit(1)", size=1).end()
    shown = [line for line in err.split("\n") if line.startswith("  | ")]
    assert shown == [f"  | line {i}" for i in range(30, 50)]


def test_start_up_failures(tmp_path: Path) -> None:
    code, _, err = Run(tmp_path, "import no_such_module").end()
    assert code == 1 and "No module named 'no_such_module'" in err[err.index("hvdkit: rank") :]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_ranks_save_and_ends_the_job(tmp_path: Path, number: signal.Signals) -> None:
    script = """
        def save(number, frame):
            time.sleep(2 if rank == 0 else 0)
            print('saved', rank, flush=True)
            sys.exit(1)
        signal.signal(signal.SIGINT, save)
        signal.signal(signal.SIGTERM, save)
        print('ready', flush=True)
        while True: time.sleep(0.1)
    """
    run = Run(tmp_path, script)
    for _ in range(2):
        assert run.process.stdout is not None and run.process.stdout.readline() == "ready\n"
    run.process.send_signal(number)
    code, out, err = run.end()
    assert code == 128 + number
    assert sorted(out.split("\n")) == ["", "saved 0", "saved 1"], "the launcher killed a rank that was still saving"
    assert number.name in err


def test_user_signals_reach_every_rank_once(tmp_path: Path) -> None:
    script = """
        got = []
        signal.signal(signal.SIGUSR1, lambda n, f: got.append(n))
        print('ready', flush=True)
        while not got: time.sleep(0.05)
        time.sleep(0.5)
        print('got', len(got))
    """
    run = Run(tmp_path, script)
    for _ in range(2):
        assert run.process.stdout is not None
        run.process.stdout.readline()
    run.process.send_signal(signal.SIGUSR1)
    code, out, _ = run.end()
    assert code == 0 and out == "got 1\ngot 1\n"


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(300)",
        kind="ignores",
    )
    for _ in range(2):
        assert run.process.stdout is not None
        run.process.stdout.readline()
    start = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    code, _, _ = run.end()
    assert code == 130 and time.monotonic() - start < 8


def test_what_the_launcher_leaves_behind_ends_with_the_job(tmp_path: Path) -> None:
    code, out, _ = Run(tmp_path, "print('done')", size=1, kind="leaves").end()
    assert code == 0 and out == "done\n"


def test_a_rank_does_not_outlive_its_wrapper() -> None:
    words = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(300)", "no-wrapper"]
    wrapper = subprocess.Popen([sys.executable, "-I", "-S", WRAPPER, "--", *words], stdout=subprocess.PIPE)
    assert wrapper.stdout is not None and wrapper.stdout.readline() == b"up\n"
    (rank,) = psutil.Process(wrapper.pid).children()
    wrapper.kill()
    wrapper.communicate()
    assert psutil.wait_procs([rank], timeout=10)[1] == []


def test_ranks_end_when_the_launching_process_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, "time.sleep(300)", kind="ignores")
    run.wait_for(2)
    run.process.kill()
    run.process.wait()
    run.wait_for(0)


def test_processes_that_a_rank_leaves_behind_end_with_it(tmp_path: Path) -> None:
    script = """
        import subprocess
        subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)', sys.argv[1]])
        print('done')
    """
    code, out, _ = Run(tmp_path, script, size=1).end()
    assert code == 0 and out == "done\n"


def test_standard_input_reaches_the_rank(tmp_path: Path) -> None:
    run = Run(tmp_path, "print(sys.stdin.read().upper())", size=1)
    out, _ = run.process.communicate("hello", timeout=60)
    assert out == "HELLO\n"


def test_output_is_passed_on_as_it_is() -> None:
    data = bytes(range(256)) * 300 + b"no end of line"
    script = (
        "import sys; sys.stdout.buffer.write(bytes(range(256)) * 300 + b'no end of line')\n"
        "sys.stderr.buffer.write(b'\\f\\xe2\\x80\\xa8')"
    )
    words = [sys.executable, "-I", "-S", WRAPPER, "--", sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, timeout=60, check=True)
    assert done.stdout == data and done.stderr == "\f\u2028".encode()


def test_tags_and_log_files(tmp_path: Path) -> None:
    script = """
        sys.stdout.write('a\\nb\\nc')
        sys.stdout.flush()
        time.sleep(0.5)
        print('d')
        sys.stderr.write('e\\n')
    """
    code, out, err = Run(tmp_path, script, size=1, wrapper_options=f"--tag 1 --log-dir {tmp_path / 'logs'}").end()
    assert code == 0
    assert out == "[0] a\n[0] b\n[0] cd\n" and err == "[0] e\n"
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "a\nb\ncd\ne\n"


def test_an_unwritable_log_costs_no_training(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file, not a folder")
    code, out, err = Run(tmp_path, "print('a')", size=1, wrapper_options=f"--log-dir {tmp_path / 'logs'}").end()
    assert code == 0 and out == "a\n" and "no log for rank 0" in err


def test_gpus_of_the_host_list(tmp_path: Path) -> None:
    code, out, _ = Run(
        tmp_path, "print(rank, os.environ.get('CUDA_VISIBLE_DEVICES'))", size=3, wrapper_options="--gpus 0-1:0,2;2-2:5"
    ).end()
    assert code == 0 and sorted(out.split("\n")) == ["", "0 0,2", "1 0,2", "2 5"]


def test_the_way_back_is_not_shown_to_the_script(tmp_path: Path) -> None:
    _, out, _ = Run(tmp_path, "print('HVDKIT_CHANNEL' in os.environ)", size=1).end()
    assert out == "False\n"


def test_strangers_are_not_heard() -> None:
    import json
    import socket

    with Reports() as reports:
        port = int(reports.address.split(":")[1])
        for line in (
            b"junk\n",
            b"[]\n",
            b'{"event": "start", "token": "no", "rank": 0, "host": "x"}\n',
            b"\xff\xfe\n",
            b"null\n",
        ):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(
                    line + json.dumps({"event": "exit", "code": 1, "tail": "", "told_to_stop": False}).encode() + b"\n"
                )
                for _ in range(3):
                    reports.wait(0.05)
        assert reports.ranks == {} and reports.first_failure() is None


def report(rank: int, **values: object) -> RankReport:
    return RankReport(rank, "h", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reports", "first"),
    [
        ([report(0, ended_at=2, code=1), report(1, ended_at=1, code=3)], 1),
        ([report(0, ended_at=1, code=1, tail="HorovodInternalError"), report(1, ended_at=2, code=3)], 1),
        ([report(0, ended_at=1, code=143, told_to_stop=True), report(1, ended_at=2, code=9)], 1),
        ([report(0, traceback_at=1, ended_at=4, code=1), report(1, ended_at=2, code=3)], 0),
        (
            [
                report(0, traceback_at=1, ended_at=3, code=143, tail="HorovodInternalError"),
                report(1, ended_at=2, code=137),
            ],
            1,
        ),
        ([report(0, ended_at=1, code=1), report(1, ended_at=2, code=137)], 0),
        ([report(0, ended_at=1, code=0), report(1, ended_at=2, lost=True)], 1),
        ([report(0, ended_at=1, code=0)], None),
        ([], None),
    ],
)
def test_f1_who_failed_first(reports: list[RankReport], first: int | None) -> None:
    with Reports() as server:
        server.ranks = {r.rank: r for r in reports}
        found = server.first_failure()
    assert (None if found is None else found.rank) == first


def test_exit_code_of_a_failed_job_is_never_zero() -> None:
    assert failure_code(report(0, code=3), 1) == 3
    assert failure_code(report(0, code=143, told_to_stop=True), 6) == 6
    assert failure_code(report(0, lost=True), 0) == 137
    assert failure_code(report(0, lost=True, unreachable=True), 137) == 1


def test_a_lost_rank_is_described() -> None:
    with Reports() as server:
        text = describe_failure(report(7, lost=True), ["a"], server)
    assert "rank 7 on h was lost" in text and "wrote nothing" in text


def test_routes_back() -> None:
    assert routes_back(["127.0.0.1"]) == ["127.0.0.1"]
    assert routes_back(["no such host"])  # falls back to this machine's name
