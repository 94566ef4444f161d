"""Which variables travel to other hosts: a documented set, what is asked for, no secrets, no GPU masks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdkit.errors import UsageError
from hvdkit.launch.environment import (
    FORWARDED,
    FORWARDED_PREFIXES,
    GPU_MASKS,
    forwarded_environment,
    is_forwarded,
    is_secret,
    without_private,
)

DOCS = Path(__file__).parents[2] / "docs" / "launching.md"


def test_b8_odd_names_are_skipped_with_one_line() -> None:
    result = forwarded_environment({"A.B": "1", "BASH_FUNC_x%%": "() { :; }", "PATH": "/bin", "V": "a b'c"})
    assert result.names == ("PATH",)
    (note,) = result.notes
    assert "A.B" in note and "BASH_FUNC_x%%" in note
    assert set(result.environ) == {"PATH", "V"}


def test_b8_asked_for_variables_arrive_unchanged() -> None:
    value = "a b'c\"d\ne=f$(id)"
    result = forwarded_environment({"V": value}, ["V", "W=x=y z", "EMPTY="])
    assert result.names == ("EMPTY", "V", "W")
    assert {name: result.environ[name] for name in result.names} == {"V": value, "W": "x=y z", "EMPTY": ""}


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "HOROVOD_SECRET_KEY",
        "TF_PASSWORD",
        "NCCL_AUTH",
        "MY_PWD",
        "GITHUB_PAT",
        "SSH_AUTH_SOCK",
    ],
)
def test_b8_secrets(name: str) -> None:
    assert is_secret(name) and not is_forwarded(name)
    assert name not in without_private({name: "x"}, [])
    result = forwarded_environment({name: "x"}, [name])
    assert result.names == (name,) and "secret" in result.notes[0] and "x" not in result.notes[0].split()


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "HOROVOD_CYCLE_TIME",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "TF_KERAS",
        "LC_ALL",
        "CUDA_HOME",
    ],
)
def test_the_documented_set(name: str) -> None:
    assert is_forwarded(name) and not is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "HOME",
        "USER",
        "DISPLAY",
        "HOROVOD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
        "SLURM_PROCID",
        "TF_CONFIG",
        "HVDKIT_CHANNEL",
        "PWD",
    ],
)
def test_what_belongs_to_one_machine_or_one_rank_stays(name: str) -> None:
    assert not is_forwarded(name)


@pytest.mark.parametrize("name", sorted(GPU_MASKS))
def test_b8_gpu_masks_never_travel(name: str) -> None:
    assert not is_forwarded(name)
    assert name not in without_private({name: "0"}, [])
    with pytest.raises(UsageError, match="gpus="):
        forwarded_environment({name: "0"}, [name])


@pytest.mark.parametrize(
    ("request_text", "word"),
    [
        ("1X=2", "NAME"),
        ("", "NAME"),
        ("A B", "NAME"),
        ("A.B=1", "NAME"),
        ("NONE", "not set"),
        ("V=\0", "NUL"),
        ("OMPI_COMM_WORLD_RANK=1", "each rank"),
    ],
)
def test_requests_that_cannot_be_met(request_text: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        forwarded_environment({}, [request_text])


def test_the_docs_list_exactly_what_is_forwarded() -> None:
    section = DOCS.read_text().split("## What travels to other hosts")[1].split("\n## ")[0]
    names = set(re.findall(r"`([A-Z][A-Z0-9_]+\*?)`", section.split("never")[0]))
    assert names == FORWARDED | {f"{prefix}*" for prefix in FORWARDED_PREFIXES}
