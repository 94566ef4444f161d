"""Is there a Horovod, and was it built for the framework that runs? Asked before Horovod's library is loaded.

``hvdkit install-horovod`` leaves a stamp in the installation. A library that was built against another framework fails
in the depths of C++, or worse does not, so each rank compares the stamp with what it runs, whoever started it.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import sysconfig
from pathlib import Path
from typing import Any

from hvdkit.errors import BuildError, NotInstalledError
from hvdkit.log import current_rank

STAMP_FILE = "hvdkit_stamp.json"  # as hvdkit.horovod_build.stamp writes it


def require_build(framework: str, version: str) -> None:
    """Return quietly if an installed Horovod fits ``framework`` in ``version``, or was not built by hvdkit.

    Versions are compared without their local part: ``2.13.0+cpu`` is ``2.13.0``.

    Raises:
        NotInstalledError: there is no Horovod (also an ``ImportError``).
        BuildError: it was built for another version, another Python or without ``framework``; with both, and the rank.
    """
    remedy = f"run `hvdkit install-horovod --with {framework}`"
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        raise NotInstalledError(f"hvdkit needs Horovod, which is not installed here: {remedy}.")
    stamp = _read(Path(spec.origin).parent / STAMP_FILE)
    if stamp is None:
        return
    here = f"rank {current_rank()} on {socket.gethostname()}"
    built = stamp.get("frameworks", {}).get(framework)
    if built is None:
        raise BuildError(f"the Horovod of {here} was built without {framework}: {remedy}.")
    if built.partition("+")[0] != version.partition("+")[0]:
        raise BuildError(
            f"the Horovod of {here} was built with {framework} {built}, but {framework} {version} is installed: "
            f"install {framework} {built} again, or {remedy}."
        )
    abi = str(sysconfig.get_config_var("SOABI"))
    if stamp.get("abi", abi) != abi:
        raise BuildError(f"the Horovod of {here} was built for {stamp['abi']}, but this Python is {abi}: {remedy}.")


def _read(path: Path) -> dict[str, Any] | None:
    """The stamp; None where there is none, or one that `hvdkit doctor` would call damaged."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None
