"""Fixtures for jobs that are really started: on this machine, and on three hosts in network namespaces.

Where a machine cannot do what a test needs, the test is skipped with the reason; under CI=true that is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[2]


def _cannot(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"under CI=true nothing may be skipped: {reason}")
    pytest.skip(reason)


def _clean_environ(**changes: str) -> dict[str, str]:
    prefixes = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "PBS_", "LSB_", "HOROVOD_", "HVDKIT_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **changes}


@pytest.fixture(scope="session")
def cannot() -> Callable[[str], NoReturn]:
    """Skips with a reason, or fails where the tests must be complete."""
    return _cannot


@pytest.fixture(scope="session")
def clean_environ() -> Callable[..., dict[str, str]]:
    """Makes an environment for a job: this one without what a launcher or a scheduler left in it, plus changes."""
    return _clean_environ


@pytest.fixture(scope="session")
def hvdkit_run() -> Any:
    """A function that runs ``hvdkit run``: (*words, before=argv to run it under, timeout_s, **environ) -> result."""

    def run(
        *words: str, before: tuple[str, ...] = (), timeout_s: float = 120, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, sys.executable, "-m", "hvdkit", "run", *words],
            env=_clean_environ(**environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def python(clean_environ: Callable[..., dict[str, str]]) -> Callable[..., str]:
    """A function that runs this interpreter with words, which must succeed, and returns its standard output."""

    def run(*words: str, cwd: Path = ROOT) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(
            command, cwd=cwd, env=clean_environ(), capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def readme_diff() -> Callable[[str], tuple[str, str]]:
    """A function: the script before and after, from the README's diff behind a mark."""

    def both_sides(mark: str) -> tuple[str, str]:
        found = re.search(rf"<!-- {mark} -->\n```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        assert found, f"the README has no diff behind {mark}"
        lines = found[1].splitlines()
        before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
        after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
        return before + "\n", after + "\n"

    return both_sides


@pytest.fixture(scope="session")
def hosts_module() -> Any:
    """tests/cluster/hosts.py: test folders are no packages, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("hvdkit_test_hosts", Path(__file__).with_name("hosts.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def cluster(hosts_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three hosts that are up, and down again whatever happens."""
    reason = hosts_module.missing()
    if reason is not None:
        _cannot(reason)
    up = hosts_module.Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        up.start()
        yield up
    finally:
        up.stop()
