"""Gets Horovod's source distribution: by pip, with its hash checked, once."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.horovod_build import cache
from hvdkit.horovod_build.edits import HOROVOD_VERSION
from hvdkit.horovod_build.process import ask

SDIST = f"horovod-{HOROVOD_VERSION}.tar.gz"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


def sdist_path() -> Path:
    """Where the source distribution is kept. A file put there by hand serves as well, if its hash is right."""
    return cache.root() / "sdist" / SDIST


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(work: Path) -> Path:
    """The source distribution, from the cache or by pip with the user's own pip settings. Raises ``BuildError``."""
    kept = sdist_path()
    if kept.is_file() and file_sha256(kept) == SHA256:
        return kept
    folder = work / "download"
    folder.mkdir(parents=True, exist_ok=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SHA256}\n")
    # Without isolation pip needs no second download of setuptools to look at the package's name.
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"]
    argv = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), "-r", str(requirements)]
    answer = ask(argv, timeout_s=600)
    got = folder / SDIST
    if not answer.ok or not got.is_file():
        raise BuildError(
            f"pip could not fetch {SDIST}:\n{_errors(answer.output)}\n"
            f"  fix: repair pip's access to its index, or put the file at {kept}"
        )
    if file_sha256(got) != SHA256:
        raise BuildError(f"{SDIST} has sha256 {file_sha256(got)}, expected {SHA256}; it is not used")
    kept.parent.mkdir(parents=True, exist_ok=True)
    half = kept.with_name(f"{kept.name}.{work.name}")
    shutil.copyfile(got, half)
    half.rename(kept)
    return kept


def _errors(output: str) -> str:
    lines = [line for line in output.splitlines() if line.lstrip().lower().startswith("error")]
    return "\n".join(f"  {line.strip()}" for line in (lines or output.strip().splitlines()[-3:]))


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack into ``folder`` and return the source tree's root."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:  # Python 3.10 before 3.10.12; the hash was checked
            archive.extractall(folder)
    return folder / f"horovod-{HOROVOD_VERSION}"
