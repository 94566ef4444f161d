"""The benchmarks behind every speed figure in the README: ``python -m bench`` runs all, ``python -m bench.X`` one."""
