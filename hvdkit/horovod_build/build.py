"""The whole of ``hvdkit install-horovod``: look, decide, build, install, prove. One function per way it can end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.horovod_build import cache, edits, install, mpi, probe, prove, recipe, source, wheel
from hvdkit.horovod_build import stamp as stamps
from hvdkit.horovod_build.progress import Progress, show_progress
from hvdkit.horovod_build.stamp import Stamp

Say = Callable[[str], None]


def why_not_satisfied(request: probe.Request, names: tuple[str, ...]) -> str:
    """Why the installed Horovod does not serve ``request``; empty where it does. Takes a fraction of a second."""
    try:
        stamp = stamps.read_stamp()
    except BuildError as error:
        return str(error).splitlines()[0]
    if stamp is None:
        return "Horovod is not installed" if stamps.package_folder() is None else "the installed Horovod has no stamp"
    mismatches = [m for m in stamps.compare(stamp, stamps.present()) if m.what != "MPI"]
    if mismatches:
        return str(mismatches[0])
    absent = [name for name in names if name not in stamp.frameworks]
    if absent:
        return f"the installed Horovod was built without {', '.join(absent)}"
    return _why_not_mpi(request, stamp) or _why_not_whole(request, stamp)


def _why_not_mpi(request: probe.Request, stamp: Stamp) -> str:
    found = None if request.mpi == "none" else mpi.find(request.mpi)
    if isinstance(found, mpi.MpiProblem):
        return found.problem
    built = f"{stamp.mpi_family} {stamp.mpi_version}".strip() or "no MPI"
    here = f"{found.family} {found.version}" if found else "no MPI"
    return f"the installed Horovod was built with {built}, wanted is {here}" if built != here else ""


def _why_not_whole(request: probe.Request, stamp: Stamp) -> str:
    if request.gpu not in ("auto", stamp.gpu):
        return f"the installed Horovod was built with --gpu {stamp.gpu}"
    if (stamp.horovod, stamp.recipe) != (edits.HOROVOD_VERSION, edits.digest(edits.EDITS)):
        return "the installed Horovod was built by another recipe"
    if stamps.read_proof().get("key") != stamp.key:
        return "the installed Horovod has not been proven to work"
    if not install.is_whole():
        return "files of the installed Horovod are missing or changed"
    missing = install.missing_of(metadata.requires("horovod") or [])
    return f"the installed Horovod needs {', '.join(missing)}" if missing else ""


def install_horovod(request: probe.Request, say: Say) -> None:
    """Do all of it. Raises ``BuildError`` with everything missing, the first real error, or the proof that failed."""
    names = probe.wanted_frameworks(request)
    with cache.locked(
        cache.environment_lock(), lambda: say("another installation into this environment is running; waiting")
    ):
        reason = "--force" if request.force else why_not_satisfied(request, names)
        if not reason:
            stamp = stamps.read_stamp()
            assert stamp is not None
            say(f"Horovod is installed and fits: nothing to do (--force builds it again)\n{summary(stamp)}")
            return
        say(f"installing Horovod: {reason}")
        cache.sweep()
        facts = probe.probe(request)
        probe.require(facts)
        plan = recipe.make_plan(facts)
        _warn_of_loss(names, say)
        say(recipe.describe(plan))
        with show_progress() as progress:
            stamp = _build_and_install(plan, request, progress)
        say(f"Horovod is installed and proven\n{summary(stamp)}")


def plan_only(request: probe.Request, say: Say) -> None:
    """``--dry-run``: print what would be done. Writes nothing anywhere."""
    names = probe.wanted_frameworks(request)
    reason = "--force" if request.force else why_not_satisfied(request, names)
    facts = probe.probe(request)
    probe.require(facts)
    plan = recipe.make_plan(facts)
    say(recipe.describe(plan))
    say(f"  source       {source.sdist_path()} (sha256 {source.SHA256[:12]}…; by pip where it is not there)")
    say(f"  command      {sys.executable} -c (setuptools.build_meta.build_wheel), then pip install of the wheel")
    if not reason:
        say("Horovod is installed and fits: nothing would be done")
    elif plan.wheel and not request.force:
        say(f"would install the wheel from the cache and prove it ({reason})")
    else:
        say(f"would build, install and prove Horovod ({reason})")


def _warn_of_loss(names: tuple[str, ...], say: Say) -> None:
    try:
        stamp = stamps.read_stamp()
    except BuildError:
        return  # said already, as the reason for this installation
    lost = [name for name in (stamp.frameworks if stamp else ()) if name not in names]
    if lost:
        every = ",".join([*names, *lost])
        say(
            f"note: the Horovod installed now serves {', '.join(lost)} too, the new one will not; "
            f"--with {every} keeps both"
        )


def _build_and_install(plan: recipe.Plan, request: probe.Request, progress: Progress) -> Stamp:
    launcher = plan.facts.mpi.mpirun if plan.facts.mpi else None
    with cache.work_folder(cache.environment_lock().name) as work:
        built = wheel.obtain(plan, work, progress, force=request.force)
        stamp = wheel.read_stamp(built)
        progress.phase("installing")
        try:
            install.install(built, work / "former", partial(_prove_and_mark, stamp, launcher, progress))
        except BuildError as error:
            # The wheel stays: whoever installs it proves it anew, and most often the machine has to be mended, not it.
            raise BuildError(
                f"{error}\n  the environment is as it was; the wheel is in the cache (--force builds it anew)"
            ) from error
    return stamp


def _prove_and_mark(stamp: Stamp, launcher: Path | None, progress: Progress) -> None:
    prove.prove(stamp, launcher, progress)
    install.mark_proven(stamp)


def summary(stamp: Stamp) -> str:
    """What the installed Horovod is, for a person."""
    frameworks = ", ".join(f"{name} {version}" for name, version in stamp.frameworks.items())
    lines = [
        f"  Horovod {stamp.horovod} for {frameworks}, Python {stamp.python}",
        f"  controllers  {', '.join(stamp.controllers)}"
        + (f" ({stamp.mpi_family} {stamp.mpi_version})" if stamp.mpi_family else "; MPI was left out"),
        f"  GPU          {stamp.gpu}",
        f"  edits        {', '.join(stamp.edits)}",
    ]
    if "tensorflow-without-xla" in stamp.left_out:
        lines.append("  left out     Horovod operations inside XLA programs (this TensorFlow lacks a header they need)")
    return "\n".join(lines)
