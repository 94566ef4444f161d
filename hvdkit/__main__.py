"""``python -m hvdkit`` is the ``hvdkit`` command."""

from hvdkit.cli.main import main

main()
