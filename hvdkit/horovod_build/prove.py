"""Proves that an installed Horovod works, in new processes: each framework imports it, two ranks add up to three."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.horovod_build import mpi
from hvdkit.horovod_build.process import Answer, ask
from hvdkit.horovod_build.progress import Progress
from hvdkit.horovod_build.stamp import Stamp

TIMEOUT_S = 300
_MARK = "hvdkit-proof:"
_IMPORT = """
import json, horovod.MODULE as hvd
print("\\n" + MARK + json.dumps(
    dict(mpi=bool(hvd.mpi_built()), gloo=bool(hvd.gloo_built()), nccl=bool(hvd.nccl_built()))))
"""
_ALLREDUCE = {
    "torch": """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="proof").item()
""",
    "tensorflow": """
import tensorflow as tf
tf.config.set_visible_devices([], "GPU")
import horovod.tensorflow as hvd
hvd.init()
total = float(hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="proof")[0])
""",
}
_REPORT = """
print("\\n" + MARK + "%d of %d: %g" % (hvd.rank(), hvd.size(), total), flush=True)
hvd.shutdown()
"""


def prove(stamp: Stamp, launcher: Path | None, progress: Progress) -> None:
    """Run every proof for ``stamp``'s frameworks and controllers. Raises ``BuildError`` at the first that fails."""
    for name in stamp.frameworks:
        progress.phase(f"proving horovod.{name}: import")
        check_import(name, stamp.controllers)
        for controller in stamp.controllers:
            progress.phase(f"proving horovod.{name}: 2 ranks over {controller}")
            check_allreduce(name, controller, launcher)


def check_import(name: str, controllers: Sequence[str]) -> None:
    """Import the extension in a new process, and ask it which controllers it has."""
    script = _IMPORT.replace("MODULE", name).replace("MARK", repr(_MARK))
    answer = ask([sys.executable, "-c", script], env=proof_environment(), timeout_s=TIMEOUT_S)
    marked = _marked(answer)
    if not answer.ok or not marked:
        raise BuildError(f"horovod.{name} was built but cannot be imported:\n{_tail(answer)}")
    told = json.loads(marked[0])
    missing = [controller for controller in controllers if not told[controller]]
    if missing:
        raise BuildError(f"horovod.{name} was built without {' and '.join(missing)}, which was asked for")


def check_allreduce(name: str, controller: str, launcher: Path | None) -> None:
    """Two ranks, each with [rank + 1]: both must get 3."""
    with tempfile.TemporaryDirectory(prefix="hvdkit-proof-") as folder:
        script = Path(folder) / f"proof_{name}.py"
        script.write_text(_ALLREDUCE[name] + _REPORT.replace("MARK", repr(_MARK)))
        argv = [*launch_words(controller, launcher), sys.executable, str(script)]
        answer = ask(argv, env=proof_environment(controller), timeout_s=TIMEOUT_S)
    said = sorted(_marked(answer))
    if not answer.ok or said != ["0 of 2: 3", "1 of 2: 3"]:
        got = "; ".join(said) or "no result"
        raise BuildError(
            f"horovod.{name} over {controller}: the sum of [rank + 1] on 2 ranks must be 3 on both, got {got} "
            f"(exit code {answer.code})\n{_tail(answer)}"
        )


def launch_words(controller: str, launcher: Path | None) -> list[str]:
    """How two ranks start on this machine under a controller."""
    if controller == "mpi":
        assert launcher is not None
        return [str(launcher), "-n", "2"]
    return [str(Path(sysconfig.get_path("scripts")) / "horovodrun"), "--gloo", "-np", "2", "-H", "localhost:2"]


def proof_environment(controller: str = "") -> dict[str, str]:
    """The caller's environment without Horovod's and the launcher's settings, fit for two ranks on any machine."""
    dropped = ("HOROVOD_", "OMPI_COMM_", "PMI_", "PMIX_", "PYTHONSTARTUP")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    settings = {
        "PATH": mpi.search_path(),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120",
        # One core must do: Open MPI 4 and 5 refuse two ranks on it otherwise.
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if controller:
        settings |= {"HOROVOD_CONTROLLER": controller, "HOROVOD_CPU_OPERATIONS": controller}
    return {**kept, **settings}


def _marked(answer: Answer) -> list[str]:
    """What the ranks reported, with any prefix that the launcher put before a line."""
    return [line.split(_MARK, 1)[1].strip() for line in answer.output.splitlines() if _MARK in line]


def _tail(answer: Answer, lines: int = 15) -> str:
    return "\n".join(f"  {line}" for line in answer.output.strip().splitlines()[-lines:])
