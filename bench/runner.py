"""Runs contenders in turn, several times, and shows medians, spreads and ratios.

A contender is a function without arguments that returns figures, ``{"epoch, ns/sample": 41.0, …}``; lower is better in
all of them. Contenders take turns (a b c a b c …), so that a slow minute of the machine hits all alike, and the
first rounds only warm up. :func:`in_new_process` makes a contender of a module's own worker mode.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Figures = Mapping[str, float]
Contender = Callable[[], Figures]
Results = dict[str, dict[str, list[float]]]  # contender -> figure -> one value per round


def options(description: str, *, repeats: int = 5) -> argparse.ArgumentParser:
    """The options that all benchmarks share: ``--repeats``, ``--warmup``, ``--quick`` and ``--json FILE``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=repeats, help="measured rounds (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small inputs: shows that it works, not how fast it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single value there")
    return parser


def timed(function: Callable[[], object], calls: int = 1) -> float:
    """Seconds per call of ``function``."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def in_new_process(module: str, *arguments: str, timeout_s: float = 600) -> Contender:
    """A contender that runs ``python -m module arguments`` and reads the figures as JSON from its last line."""

    def run() -> Figures:
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True)
        figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return figures

    return run


def interleave(contenders: Mapping[str, Contender], *, repeats: int, warmup: int = 1) -> Results:
    """Every contender once per round, ``warmup`` rounds unseen and ``repeats`` rounds kept."""
    results: Results = {name: {} for name in contenders}
    for number in range(warmup + repeats):
        for name, contender in contenders.items():
            sys.stderr.write(f"\r\x1b[Kround {number + 1} of {warmup + repeats}: {name}")
            for figure, value in contender().items():
                if number >= warmup:
                    results[name].setdefault(figure, []).append(value)
    sys.stderr.write("\r\x1b[K")
    return results


def table(results: Results, baseline: str) -> str:
    """One block per figure: median, smallest and largest of each contender, and its ratio to the baseline's median."""
    figures = list(dict.fromkeys(figure for values in results.values() for figure in values))
    width = max(map(len, results))
    lines = []
    for figure in figures:
        lines.append(f"{figure}")
        base = results[baseline].get(figure)
        for name, values in results.items():
            if figure in values:
                median = statistics.median(values[figure])
                spread = f"{min(values[figure]):.4g} to {max(values[figure]):.4g}"
                ratio = f"{median / statistics.median(base):8.3g} x {baseline}" if base and name != baseline else ""
                lines.append(f"  {name:{width}}  {median:10.4g}  ({spread:22}){ratio}")
    return "\n".join(lines)


def finish(title: str, results: Results, baseline: str, json_file: Path | None) -> None:
    """Print the table and, if asked, write all values with the facts of the machine."""
    rounds = {len(values) for figures in results.values() for values in figures.values()}
    sys.stdout.write(f"{title}: median (smallest to largest) of {max(rounds, default=0)} rounds\n")
    sys.stdout.write(table(results, baseline) + "\n")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        record = {"title": title, "baseline": baseline, "machine": machine(), "results": results}
        json_file.write_text(json.dumps(record, indent=1) + "\n")


def machine() -> dict[str, str | float | Sequence[float]]:
    """What the figures depend on."""
    return {
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 0,
        "load": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
