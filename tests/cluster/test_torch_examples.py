"""The PyTorch scripts of the README and of examples/torch, started as a user starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(*words: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=ENVIRON, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def both_sides(mark: str) -> tuple[str, str]:
    """The script before and after, from the README's diff behind ``mark``."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"<!-- {mark} -->\n```diff\n(.*?)```", text, re.DOTALL)
    assert found, f"the README has no diff behind {mark}"
    lines = found[1].splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return before + "\n", after + "\n"


def test_both_sides_of_the_readme_diff_run(tmp_path: Path) -> None:
    before, after = both_sides("torch diff")
    score = (
        "\nx, y = data.tensors"
        "\nwith torch.no_grad():"
        "\n    print('right', (model(x).argmax(1) == y).float().mean().item())\n"
    )
    (tmp_path / "before.py").write_text(before + score)
    (tmp_path / "after.py").write_text(after + score)
    plain = run("before.py", cwd=tmp_path)
    many = run("-m", "hvdkit", "run", "-np", "2", "--", "python", "after.py", cwd=tmp_path)
    shown = re.findall(r"right ([\d.]+)", many)
    assert len(shown) == 2 and len(set(shown)) == 1, "both ranks must end with the same model"
    assert abs(float(shown[0]) - float(re.findall(r"right ([\d.]+)", plain)[0])) < 0.05


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_digits_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    script = ["python", "examples/torch/digits.py", "--report", str(report)]
    run("-m", "hvdkit", "run", "-H", f"localhost:{ranks}", "--", *script)
    told = json.loads(report.read_text())
    assert told["ranks"] == ranks
    assert told["history"][-1]["accuracy"] >= 0.95


def test_plain_twin_learns_as_much() -> None:
    out = run("examples/torch/plain_digits.py")
    assert float(re.findall(r"accuracy ([\d.]+)", out)[-1]) >= 0.95
