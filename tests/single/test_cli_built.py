"""What Horovod was built with, read from its library files; and the warning where another MPI starts the job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdkit.cli.built import horovod_mpi, mismatch


@pytest.fixture
def horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package called horovod in front of any real one; returns where its library belongs."""
    package = tmp_path / "horovod"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('Horovod must not be imported to be asked')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    return package / "torch" / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so"


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        (b"\0libmpi.so.40\0libc.so.6\0", "openmpi"),
        (b"\0libmpi.so.12\0", "mpich"),
        (b"\0libmpi_ibm.so.3\0", "other"),
        (b"\0libc.so.6\0", "none"),
    ],
)
def test_the_mpi_of_horovod(horovod: Path, needed: bytes, expected: str) -> None:
    horovod.write_bytes(b"\x7fELF" + needed)
    assert horovod_mpi() == expected


def test_a_horovod_without_a_library(horovod: Path) -> None:
    assert horovod_mpi() is None


def test_b5_horovod_built_with_another_mpi_than_the_launchers(horovod: Path) -> None:
    horovod.write_bytes(b"\x7fELF\0libmpi.so.12\0")
    line = mismatch("openmpi")
    assert line is not None and "MPICH" in line and "Open MPI" in line and "install-horovod" in line
    for family in ("mpich", "intel", "horovodrun"):
        assert mismatch(family) is None
