"""What a saved position means: the plan's settings as plain values, and whether two of them belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.errors import UsageError

PlainState = dict[str, int | str | bool]

_FIX = {
    "length": "Resume with the data set that was trained on, or start anew.",
    "seed": "Give the saved seed, or start anew.",
    "shuffle": "Give the saved choice, or start anew.",
    "tail": "Give the saved tail, or start anew.",
    "order": "The order of samples changed between versions of hvdkit: resume with the old one, or start anew.",
    "batch_mode": "State the batch the same way, or allow the change on purpose.",
    "batch": "Give the saved batch, or allow the change on purpose.",
}


def check_same_training(saved: Mapping[str, Any], here: PlainState, *, allow_batch_change: bool) -> None:
    """Compare the state of a plan with the ``saved`` one; the rules are those of :meth:`ShardPlan.check_state`.

    Raises:
        UsageError: names the first difference with the saved and the present value.
    """
    names = ["length", "seed", "shuffle", "tail", "order"]
    if not allow_batch_change and saved.get("global_batch") != here["global_batch"]:
        names += ["batch_mode", "batch"]
    for name in names:
        if name not in saved:
            raise UsageError(
                f"the saved data state has no {name!r} (it has {sorted(saved)}); it is not one of ShardPlan."
            )
        if saved[name] != here[name]:
            raise UsageError(
                f"the saved data state has {name}={saved[name]!r}, this run has {name}={here[name]!r}. {_FIX[name]}"
            )
