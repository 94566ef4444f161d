"""The code of docs/torch.md runs as it stands there, on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import hvdkit.torch as hvd

hvd.init()
PAGE = Path(__file__).resolve().parents[2] / "docs" / "torch.md"


def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    assert names["run"].epoch == 4  # three in the first block, one in the block on accumulation
    assert 0 <= names["values"]["accuracy"] <= 1
    hvd.check_in_sync(names["model"])
