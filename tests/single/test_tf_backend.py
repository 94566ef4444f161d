"""Keras on another backend and tf-keras 2 are refused with the reason, before anything heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)


@pytest.mark.parametrize("module", ["hvdkit.tf", "hvdkit.tf.keras"])
def test_another_keras_backend_is_refused(module: str) -> None:
    result = run(f"import {module}", KERAS_BACKEND="torch")
    assert result.returncode == 1
    assert (
        "UsageError: Keras runs on the 'torch' backend" in result.stderr and "KERAS_BACKEND=tensorflow" in result.stderr
    )


def test_abort_imports_no_framework() -> None:
    code = (
        "import sys, hvdkit.abort; assert not {'tensorflow', 'keras', 'torch', 'horovod', 'mpi4py'} & set(sys.modules)"
    )
    assert run(code).returncode == 0
