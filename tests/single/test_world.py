"""What the launcher declared against what Horovod says (case B5), and rank-aware logging."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit import log
from hvdkit.errors import WorldError
from hvdkit.world import LAUNCHERS, check_size, declared_world

SIZE_VARIABLES = [name for launcher in LAUNCHERS for name in launcher.size]


@pytest.mark.parametrize("variable", SIZE_VARIABLES)
def test_b5_one_process_where_two_were_declared(variable: str) -> None:
    with pytest.raises(WorldError) as error:
        check_size(1, {variable: "2"})
    assert "runs 1 process in" in str(error.value) and f"{variable}=2" in str(error.value)
    declared = check_size(2, {variable: "2"})
    assert declared is not None and declared.size == 2


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_b5_a_rank_without_a_size_is_half_set(launcher: object) -> None:
    with pytest.raises(WorldError, match="half of what"):
        declared_world({launcher.rank[0]: "0"})  # type: ignore[attr-defined]


def test_the_innermost_launcher_counts() -> None:
    environ = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    declared = declared_world(environ)
    assert declared is not None and (declared.size, declared.rank, declared.launcher.name) == (2, 1, "Open MPI mpirun")
    assert check_size(2, environ) == declared


def test_nothing_declared_and_elastic_jobs_pass() -> None:
    assert declared_world({}) is None and check_size(3, {}) is None
    assert check_size(3, {"HOROVOD_ELASTIC": "1", "HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}) is None


@given(st.sampled_from(SIZE_VARIABLES), st.text(max_size=5))
def test_any_text_is_a_size_or_a_clear_error(variable: str, text: str) -> None:
    try:
        declared = declared_world({variable: text})
    except WorldError as error:
        assert variable in str(error)
    else:
        assert declared is None if text == "" else declared is not None and declared.size == int(text) >= 1


def test_a_rank_outside_the_size() -> None:
    with pytest.raises(WorldError, match="ranks go from 0 to 1"):
        declared_world({"PMI_SIZE": "2", "PMI_RANK": "2"})


def test_only_rank_0_speaks_unless_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = log.get_logger("hvdkit.test")
    monkeypatch.setattr(logging.getLogger("hvdkit"), "level", logging.INFO)
    for rank in (0, 1):
        log.set_rank(rank)
        logger.info("told by %d", rank)
        logger.warning("wrong on %d", rank)
        log.print_on_rank0("printed by", rank)
    log.set_rank(None)
    out, err = capsys.readouterr()
    assert out == "printed by 0\n"
    assert [line.split("hvdkit ")[1] for line in err.splitlines()] == [
        "[0] INFO: told by 0",
        "[0] WARNING: wrong on 0",
        "[1] WARNING: wrong on 1",
    ]
