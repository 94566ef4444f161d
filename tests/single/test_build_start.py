"""What a training process asks of the installed Horovod before it loads it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from hvdkit.build_stamp import STAMP_FILE, require_build
from hvdkit.errors import BuildError
from hvdkit.horovod_build import stamp as stamps


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of an installed Horovod."""
    spec = importlib.machinery.ModuleSpec("horovod", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return tmp_path


def write(folder: Path, **told: Any) -> None:
    (folder / STAMP_FILE).write_text(json.dumps(told))


def test_the_stamp_has_one_name() -> None:
    assert STAMP_FILE == stamps.STAMP_FILE


def test_a7_another_framework_version_is_named_with_rank_and_host(
    horovod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    write(horovod, frameworks={"torch": "2.12.0"}, abi=sysconfig.get_config_var("SOABI"))
    with pytest.raises(BuildError, match=r"rank 3 on .*torch 2\.12\.0, but torch 2\.13\.0\+cpu is installed"):
        require_build("torch", "2.13.0+cpu")


def test_a7_another_python(horovod: Path) -> None:
    write(horovod, frameworks={"torch": "2.13.0"}, abi="cpython-399")
    with pytest.raises(BuildError, match="built for cpython-399"):
        require_build("torch", "2.13.0")


def test_a5_a_framework_that_was_not_asked_for(horovod: Path) -> None:
    write(horovod, frameworks={"torch": "2.13.0"})
    with pytest.raises(BuildError, match=r"built without tensorflow.*--with tensorflow"):
        require_build("tensorflow", "2.21.0")


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_horovod_without_a_good_stamp_passes(horovod: Path, text: str | None) -> None:
    if text is not None:
        (horovod / STAMP_FILE).write_text(text)
    require_build("torch", "2.13.0")


def test_local_versions_do_not_count(horovod: Path) -> None:
    write(horovod, frameworks={"torch": "2.13.0"}, abi=sysconfig.get_config_var("SOABI"))
    require_build("torch", "2.13.0+cu130")


def test_no_horovod_is_an_import_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="hvdkit install-horovod --with torch"):
        require_build("torch", "2.13.0")
