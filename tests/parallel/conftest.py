"""Runs under mpirun, horovodrun or alone; every test here holds at any number of processes.

One framework per process: run the files ``test_torch_*`` and ``test_tf_*`` in separate jobs, as the Makefile does.
A rank that waits for one that failed is ended by the timeout, which takes the whole job with it.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "20")
os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "60")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(120, method="thread"))
