"""Trains the digits on 2 ranks in every framework through every launcher, and shows what came out. `make demo` runs it.

    python examples/demo.py [--with torch,tensorflow] [--ranks 2] [--output demo-results]

Writes results.json and curves.png to the output folder; the exit code is not 0 if a run fails or learns too little.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"torch": "examples/torch/digits.py", "tensorflow": "examples/tf/digits.py"}
NAMES = {"torch": "PyTorch", "tensorflow": "Keras"}
LAUNCHERS = ("mpirun", "horovodrun")
LEAST_ACCURACY = 0.95
# One thread per rank: the ranks share the cores. And without TensorFlow's start-up messages.
SETTINGS = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}


def main() -> None:
    """Run the demo; exits with 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="frameworks", default="torch,tensorflow", help="frameworks, comma separated")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "demo-results")
    args = parser.parse_args()
    frameworks = args.frameworks.split(",")
    unknown = [name for name in frameworks if name not in SCRIPTS]
    if unknown:
        parser.error(f"--with names {', '.join(unknown)}; expected some of {', '.join(SCRIPTS)}")
    args.output.mkdir(parents=True, exist_ok=True)
    rows = [run(f, launcher, args.ranks, args.output) for f in frameworks for launcher in LAUNCHERS]
    (args.output / "results.json").write_text(json.dumps(rows, indent=1))
    good = [row for row in rows if "history" in row]
    if good:
        draw(good, args.output / "curves.png")
    show(rows, args.output / "curves.png")
    failed = [row for row in rows if not row["weights_equal"] or row["accuracy"] < LEAST_ACCURACY]
    sys.exit(1 if failed else 0)


def run(framework: str, launcher: str, ranks: int, output: Path) -> dict[str, Any]:
    """One training job; a row of the table."""
    report = output / f"{framework}-{launcher}.json"
    report.unlink(missing_ok=True)
    print(f"== {NAMES[framework]} through {launcher}", flush=True)
    command = [sys.executable, "-m", "hvdkit", "run", "-np", str(ranks), "--hostfile", "hostfiles/localhost"]
    if ranks != 2:  # the file holds two slots
        command[-2:] = ["-H", f"localhost:{ranks}"]
    command += ["--launcher", launcher, "--", "python", SCRIPTS[framework], "--report", str(report)]
    start = time.perf_counter()
    code = call(command)
    row: dict[str, Any] = {"framework": NAMES[framework], "launcher": launcher, "ranks": ranks}
    row["total_seconds"] = time.perf_counter() - start
    if code != 0 or not report.exists():
        return {**row, "weights_equal": False, "accuracy": 0.0, "exit_code": code}
    measured = json.loads(report.read_text())
    row["samples_per_second"] = measured["samples"] / measured["seconds"]
    # The example compares the weights of all ranks before it writes its report, and fails where they differ.
    row.update(weights_equal=True, accuracy=measured["history"][-1]["accuracy"], **measured)
    return row


def call(command: list[str]) -> int:
    """The command's exit code. An interrupt or a polite end goes to the job first, which ends its ranks."""
    job = subprocess.Popen(command, cwd=ROOT, env={**SETTINGS, **os.environ}, start_new_session=True)

    stopped_by: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped_by.append(number)
        job.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    code = job.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if stopped_by:
        sys.exit(128 + stopped_by[0])
    return code


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss and accuracy curves of all runs as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    styles = {"mpirun": "-", "horovodrun": "--"}
    colours = {"PyTorch": "tab:red", "Keras": "tab:orange"}
    for axis, key, title in zip(axes, ("loss", "accuracy"), ("training loss", "test accuracy"), strict=True):
        for row in rows:
            values = [point[key] for point in row["history"]]
            label = f"{row['framework']}, {row['launcher']}"
            axis.plot(
                range(1, len(values) + 1), values, styles[row["launcher"]], color=colours[row["framework"]], label=label
            )
        axis.set(title=f"{title}, {rows[0]['ranks']} ranks", xlabel="epoch")
        axis.grid(alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_yscale("log")
    axes[1].axhline(LEAST_ACCURACY, color="grey", lw=0.8)
    axes[1].set_ylim(0.8, 1.0)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def show(rows: list[dict[str, Any]], picture: Path) -> None:
    """The table that closes the demo."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="scikit-learn's digits, 1,797 images")
    for heading in ("framework", "launcher"):
        table.add_column(heading)
    for heading in ("ranks", "seconds", "samples/s", "test accuracy", "weights equal on all ranks"):
        table.add_column(heading, justify="right")
    for row in rows:
        if "history" in row:
            speed, accuracy = f"{row['samples_per_second']:,.0f}", f"{row['accuracy']:.4f}"
        else:
            speed, accuracy = "-", f"failed, exit code {row['exit_code']}"
        equal = "yes" if row["weights_equal"] else "NO"
        seconds = f"{row['total_seconds']:.1f}"
        table.add_row(row["framework"], row["launcher"], str(row["ranks"]), seconds, speed, accuracy, equal)
    console = Console(width=max(100, Console().width))
    console.print(table)
    low = [row for row in rows if row["accuracy"] < LEAST_ACCURACY]
    if low:
        console.print(f"{len(low)} of {len(rows)} runs did not reach a test accuracy of {LEAST_ACCURACY}.")
    if any("history" in row for row in rows):
        console.print(f"curves: {os.path.relpath(picture)}", soft_wrap=True)


if __name__ == "__main__":
    main()
