"""The Keras scripts of the README and of examples/tf, started as a user starts them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = "examples/tf/digits.py"
Run = Callable[..., str]


def test_both_sides_of_the_readme_diff_run(
    python: Run, readme_diff: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    before, after = readme_diff("tf diff")
    score = "\nprint('right', model.evaluate(images / 16, labels, verbose=0)[1])\n"
    (tmp_path / "before.py").write_text(before + score)
    (tmp_path / "after.py").write_text(after + score)
    plain = python("before.py", cwd=tmp_path)
    many = python("-m", "hvdkit", "run", "-np", "2", "--", "python", "after.py", cwd=tmp_path)
    shown = re.findall(r"right ([\d.]+)", many)
    assert len(shown) == 2 and len(set(shown)) == 1, "both ranks must end with the same model"
    assert abs(float(shown[0]) - float(re.findall(r"right ([\d.]+)", plain)[0])) < 0.05


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_digits_on_any_number_of_ranks(python: Run, ranks: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    python("-m", "hvdkit", "run", "-H", f"localhost:{ranks}", "--", "python", SCRIPT, "--report", str(report))
    told = json.loads(report.read_text())
    assert told["ranks"] == ranks
    assert told["history"][-1]["accuracy"] >= 0.95


def test_plain_twin_learns_as_much(python: Run) -> None:
    out = python("examples/tf/plain_digits.py")
    assert float(re.findall(r"val_accuracy: ([\d.]+)", out)[-1]) >= 0.95
