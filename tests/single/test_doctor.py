"""The doctor's judgement, on stamps and facts that the tests make; real ranks are in tests/cluster."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdkit.cli.doctor import command
from hvdkit.doctor import checks, ranks
from hvdkit.doctor.check import Check, report
from hvdkit.horovod_build import stamp as stamps


def make_stamp(now: stamps.Present) -> stamps.Stamp:
    return stamps.Stamp(
        horovod="0.28.1", key="k", python=now.python, abi=now.abi, machine=now.machine, libc="glibc 2.36",
        frameworks=dict(now.frameworks), compiler="g++ 12", cmake="3.25", mpi_family=now.mpi_family,
        mpi_version=now.mpi_version, mpicxx="/x/bin/mpicxx", gpu="none", controllers=("mpi", "gloo"), edits=(),
    )  # fmt: skip


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> stamps.Present:
    """A Horovod that was built for exactly what is here: torch 2.13.0 and Open MPI 5.0.11."""
    here = stamps.present({"torch": "2.13.0"})
    here = dataclasses.replace(here, mpi_family="openmpi", mpi_version="5.0.11")
    monkeypatch.setattr(stamps, "present", lambda: here)
    monkeypatch.setattr(stamps, "package_folder", lambda: tmp_path)
    monkeypatch.setattr(checks.metadata, "version", lambda name: "0.28.1")
    (tmp_path / stamps.STAMP_FILE).write_text(make_stamp(here).to_json())
    return here


def failed(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found if check.status == "failed"}


def test_matching_stamp_is_ok(now: stamps.Present) -> None:
    found = list(checks._horovod())
    assert not failed(found)
    assert "frameworks, Python and MPI are those of the build" in [c.found for c in found]


def test_a7_wrong_framework_version_in_the_stamp(
    now: stamps.Present, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = dataclasses.replace(make_stamp(now), frameworks={"torch": "2.12.0"})
    (tmp_path / stamps.STAMP_FILE).write_text(stamp.to_json())
    check = failed(list(checks._horovod()))["build and now: torch"]
    assert "torch 2.12.0" in check.found and "torch 2.13.0" in check.found
    assert "hvdkit install-horovod" in check.remedy
    monkeypatch.setattr(checks, "_versions", lambda: iter(()))
    result = CliRunner().invoke(command, ["--json", "--quick"], standalone_mode=False)
    assert result.return_value == 1
    told = json.loads(result.output)
    assert told["ok"] is False
    assert any("2.12.0" in c["found"] and c["status"] == "failed" for c in told["checks"])


def test_built_with_another_mpi_than_the_one_launched(now: stamps.Present, tmp_path: Path) -> None:
    stamp = dataclasses.replace(make_stamp(now), mpi_version="4.1.4")
    (tmp_path / stamps.STAMP_FILE).write_text(stamp.to_json())
    check = failed(list(checks._horovod()))["build and now: MPI"]
    assert "openmpi 4.1.4" in check.found and "openmpi 5.0.11" in check.found


def test_damaged_stamp_and_absent_horovod(now: stamps.Present, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / stamps.STAMP_FILE).write_text("{")
    assert "install-horovod --force" in failed(list(checks._horovod()))["Horovod"].remedy
    monkeypatch.setattr(stamps, "package_folder", lambda: None)
    assert failed(list(checks._horovod()))["Horovod"].found == "not installed"


def test_report_names_every_remedy() -> None:
    told = report([Check("a", "ok", "fine"), Check("b", "failed", "broken", "mend it")])
    assert told == {
        "ok": False,
        "checks": [
            {"name": "a", "status": "ok", "found": "fine", "remedy": ""},
            {"name": "b", "status": "failed", "found": "broken", "remedy": "mend it"},
        ],
    }
    with pytest.raises(AssertionError):
        Check("c", "failed", "broken")


def rank(host: str, **versions: str) -> dict[str, object]:
    return {"host": host, "python": "3.11.7", "mpi": "Open MPI v5.0.11", "versions": versions}


def test_a7_ranks_with_unlike_versions_are_named() -> None:
    same = [rank("n1", torch="2.13.0"), rank("n2", torch="2.13.0")]
    assert ranks.differences(same) == []
    unlike = [rank("n1", torch="2.13.0"), rank("n1", torch="2.13.0"), rank("n2", torch="2.12.0", keras="3.15")]
    assert ranks.differences(unlike) == [
        "keras: none on rank 0 (n1), 3.15 on rank 2 (n2)",
        "torch: 2.13.0 on rank 0 (n1), 2.12.0 on rank 2 (n2)",
    ]


def test_mpi_probe_without_output_fails_with_the_reason(tmp_path: Path) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text("#!/bin/sh\necho there are not enough slots\nexit 5\n")
    launcher.chmod(0o755)
    check = ranks.check_mpi(launcher)
    assert check.status == "failed" and check.found == "exit code 5: there are not enough slots"


def test_two_jobs_of_one_process_do_not_pass_for_two_ranks(tmp_path: Path) -> None:
    line = json.dumps({"ranks": [rank("n1")], "allreduce_8_bytes_s": 1e-6, "allreduce_16_mib_bus_bytes_per_s": 1.0})
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\nfor i in 1 2; do echo '{ranks.MARK}{line}'; done\n")
    launcher.chmod(0o755)
    check = ranks.check_mpi(launcher)
    assert check.status == "failed" and "2 jobs of 1 process" in check.found
