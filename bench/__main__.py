"""``python -m bench [OPTIONS]``: every benchmark in turn, each in its own process; values go to ``bench-results/``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = Path("bench-results")


def main() -> int:
    """Run all; the exit code is that of the first that failed, or 0."""
    codes = []
    for file in sorted(HERE.glob("bench_*.py")):
        sys.stdout.write(f"\n== {file.stem}\n")
        sys.stdout.flush()
        command = [
            sys.executable,
            "-m",
            f"bench.{file.stem}",
            "--json",
            str(RESULTS / f"{file.stem}.json"),
            *sys.argv[1:],
        ]
        codes.append(subprocess.run(command, check=False).returncode)
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main())
