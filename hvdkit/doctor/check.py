"""What one check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report. Where ``status`` is not ``"ok"`` there is a ``remedy``."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.status == "ok" or self.remedy, f"{self.name} is {self.status} without a remedy"


def report(checks: Sequence[Check]) -> dict[str, Any]:
    """The checks as plain values: ``{"ok": bool, "checks": [{"name", "status", "found", "remedy"}]}``."""
    return {"ok": all(c.status != "failed" for c in checks), "checks": [asdict(c) for c in checks]}
