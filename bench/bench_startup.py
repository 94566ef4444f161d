"""How long ``import hvdkit`` and ``hvdkit --help`` take, beside a bare interpreter in the same run.

python -m bench.bench_startup
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from bench import runner

FIGURE = "start to end, s"
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import hvdkit": ["-c", "import hvdkit"],
    "hvdkit --help": ["-m", "hvdkit", "--help"],
    "import numpy": ["-c", "import numpy"],
}
BASELINE = "python -c pass"


def contender(words: list[str]) -> runner.Contender:
    """Runs this interpreter with ``words`` in a new process."""

    def run() -> Mapping[str, float]:
        # Bytecode is written as on a user's machine, whatever this shell's habit is.
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

        def once() -> None:
            subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, env=environ, check=True)

        return {FIGURE: runner.timed(once)}

    return run


def main() -> None:
    """Print the table; nothing is checked by absolute time."""
    arguments = runner.options(__doc__ or "", repeats=15).parse_args()
    contenders = {name: contender(words) for name, words in COMMANDS.items()}
    results = runner.interleave(contenders, repeats=arguments.repeats, warmup=arguments.warmup)
    runner.finish("start-up", results, BASELINE, arguments.json)


if __name__ == "__main__":
    main()
