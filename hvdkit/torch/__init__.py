"""hvdkit for PyTorch: every name of ``horovod.torch``, and what makes N processes equal to one.

A script moves over by changing ``import horovod.torch as hvd`` to ``import hvdkit.torch as hvd``. Names that are right
in Horovod are Horovod's own objects; those in ``FIXED_NAMES`` keep their signatures and are put right.
"""

from __future__ import annotations

import torch

from hvdkit.build_stamp import require_build

require_build("torch", torch.__version__)

import horovod.torch as _horovod  # noqa: E402
from horovod.torch import *  # noqa: E402, F403

from hvdkit.log import print_on_rank0  # noqa: E402
from hvdkit.torch.buffers import average_buffers  # noqa: E402
from hvdkit.torch.collectives import gather_objects  # noqa: E402
from hvdkit.torch.console import progress  # noqa: E402
from hvdkit.torch.data import DataLoader  # noqa: E402
from hvdkit.torch.initial_state import broadcast_optimizer_state, broadcast_parameters  # noqa: E402
from hvdkit.torch.metrics import reduce_metrics  # noqa: E402
from hvdkit.torch.optimizer import DistributedOptimizer  # noqa: E402
from hvdkit.torch.runtime import init, world  # noqa: E402
from hvdkit.torch.schedule import LRSchedule  # noqa: E402
from hvdkit.torch.sync import check_in_sync  # noqa: E402
from hvdkit.torch.sync_norm import SyncBatchNorm  # noqa: E402
from hvdkit.torch.training_state import TrainingState  # noqa: E402
from hvdkit.world import World  # noqa: E402

# Names of Horovod that are hvdkit's own here, with the reason.
FIXED_NAMES = {
    "init": "checks the size, names the device and lets a failing rank end the job",
    "DistributedOptimizer": "keeps the optimizer's state and counts gradients by samples",
    "SyncBatchNorm": "works on the CPU too, and counts every sample once",
    "broadcast_parameters": "finds ranks that differ before it sends, and sends every dtype and layout",
    "broadcast_optimizer_state": "creates missing state without a step, for every optimizer",
}
# The order of this list is the alphabet's; Horovod's names join it below.
__all__ = [
    "DataLoader",
    "DistributedOptimizer",
    "LRSchedule",
    "SyncBatchNorm",
    "TrainingState",
    "World",
    "average_buffers",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_in_sync",
    "gather_objects",
    "init",
    "print_on_rank0",
    "progress",
    "reduce_metrics",
    "world",
]
# Names that hvdkit.tf has no counterpart of, with the reason.
ONLY_TORCH = {
    "average_buffers": "Keras keeps moving statistics as variables, which its callbacks average",
    "gather_objects": "Python objects are gathered by allgather_object in TensorFlow",
}
# Names that Horovod does not have; the same ones in hvdkit.tf, where the loader is called ``dataset``.
HVDKIT_NAMES = tuple(name for name in __all__ if name not in FIXED_NAMES and name not in ONLY_TORCH)

_NAMES_OF_HOROVOD = [name for name in dir(_horovod) if not name.startswith("_")]
for _name in _NAMES_OF_HOROVOD:
    globals().setdefault(_name, getattr(_horovod, _name))
__all__ += [name for name in _NAMES_OF_HOROVOD if name not in FIXED_NAMES]
