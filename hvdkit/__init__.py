"""hvdkit: Horovod for today's PyTorch and TensorFlow. It installs, it launches, it trains right.

``import hvdkit`` loads no framework, no Horovod, no MPI and not even numpy: names are resolved when first used.
Training scripts import ``hvdkit.torch``, ``hvdkit.tf`` or ``hvdkit.tf.keras``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdkit.errors import HvdkitError as HvdkitError
    from hvdkit.schedule import Scaling as Scaling
    from hvdkit.schedule import Schedule as Schedule
    from hvdkit.sharding import ShardPlan as ShardPlan
    from hvdkit.world import World as World

__version__ = "0.1.0"

_HOME_OF = {
    "HvdkitError": "hvdkit.errors",
    "Scaling": "hvdkit.schedule",
    "Schedule": "hvdkit.schedule",
    "ShardPlan": "hvdkit.sharding",
    "World": "hvdkit.world",
}
__all__ = ["HvdkitError", "Scaling", "Schedule", "ShardPlan", "World", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'hvdkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
