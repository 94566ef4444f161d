"""Three hosts on one machine: network namespaces with their own names, addresses and sshd.

Needs root, iproute2 and openssh-server. Loaded by the fixtures of this folder; each object has names of its own, so
two test runs may go on side by side, and what an earlier run left behind is not touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NAMES = ("n1", "n2", "n3")
# A sshd that reads nothing from /etc: its own keys, no PAM, one key that may log in.
_SSHD = """Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
PermitUserEnvironment no
"""
_SSH = """Host *
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /dev/null
  LogLevel ERROR
  BatchMode yes
  {identity}
"""


def missing() -> str | None:
    """Why this machine cannot play three hosts, or None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("sshd", "openssh-server"), ("ssh-keygen", "openssh-client")):
        if _find(program) is None and not _install(package):
            return f"{program} is not installed and apt-get could not install {package}"
    if subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False).returncode != 0:
        return "this kernel gives no network namespaces"
    return None


class Cluster:
    """The hosts ``n1``, ``n2`` and ``n3``, which know each other by name and let each other in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"hvk{os.getpid() % 100_000}"
        self.bridge = f"{self.mark}br"
        self.net = f"10.{97 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self.key = folder / "key"
        self.daemons: list[subprocess.Popen[bytes]] = []

    def namespace(self, name: str) -> str:
        return f"{self.mark}{name}"

    def address(self, name: str) -> str:
        return f"{self.net}.{NAMES.index(name) + 1}"

    def start(self) -> None:
        for key in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        (self.folder / "sshd_config").write_text(_SSHD.format(folder=self.folder))
        Path("/run/sshd").mkdir(exist_ok=True)
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "link", "set", self.bridge, "up")
        for number, name in enumerate(NAMES):
            self._start_host(number, name)
        for name in NAMES:
            self._wait_for_ssh(name)

    def stop(self) -> None:
        """Take everything down; runs to its end whatever is missing."""
        for name in NAMES:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in self.daemons:
            daemon.kill()
            daemon.wait()
        for name in NAMES:
            subprocess.run(
                [_find("ip") or "ip", "netns", "del", self.namespace(name)], capture_output=True, check=False
            )
            shutil.rmtree(Path("/etc/netns") / self.namespace(name), ignore_errors=True)
        subprocess.run([_find("ip") or "ip", "link", "del", self.bridge], capture_output=True, check=False)

    def pids(self, name: str) -> list[int]:
        """Every process on a host, sshd included."""
        listed = subprocess.run(
            [_find("ip") or "ip", "netns", "pids", self.namespace(name)], capture_output=True, text=True, check=False
        )
        return [int(word) for word in listed.stdout.split()]

    def jobs(self, word: str) -> dict[str, list[str]]:
        """host -> command lines on it that have ``word`` in them."""
        found: dict[str, list[str]] = {}
        for name in NAMES:
            for pid in self.pids(name):
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if word in line:
                        found.setdefault(name, []).append(line)
        return found

    def command(self, name: str, *words: str) -> list[str]:
        """``words`` as an argv that runs them on a host, under its name."""
        uts = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]
        return [_find("ip") or "ip", "netns", "exec", self.namespace(name), *uts, *words]

    @contextlib.contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """The host's network is down inside the block."""
        self.unplug(name)
        try:
            yield
        finally:
            _run("ip", "-n", self.namespace(name), "link", "set", "eth0", "up")

    def unplug(self, name: str) -> None:
        _run("ip", "-n", self.namespace(name), "link", "set", "eth0", "down")

    def _start_host(self, number: int, name: str) -> None:
        space, outer = self.namespace(name), f"{self.mark}v{number}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", outer, "master", self.bridge, "up")
        _run("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        etc = Path("/etc/netns") / space
        (etc / "ssh").mkdir(parents=True)
        hosts = [f"{self.address(other)} {other} {other}.cluster.example" for other in NAMES]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        (etc / "ssh" / "ssh_config").write_text(_SSH.format(identity=f"IdentityFile {self.key}"))
        sshd = _find("sshd")
        assert sshd is not None
        words = self.command(name, sshd, "-D", "-e", "-f", str(self.folder / "sshd_config"))
        with (self.folder / f"sshd-{name}.log").open("wb") as log:
            self.daemons.append(subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def _wait_for_ssh(self, name: str) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            tried = subprocess.run(
                self.command(NAMES[0], "ssh", name, "hostname"), capture_output=True, text=True, check=False, timeout=20
            )
            if tried.stdout.strip() == name:
                return
            time.sleep(0.2)
        log = (self.folder / f"sshd-{name}.log").read_text()
        raise RuntimeError(f"no ssh to {name}: {tried.stderr}\n{log}")


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _install(package: str) -> bool:
    """Debian's package, where apt-get is there and may."""
    if shutil.which("apt-get") is None:
        return False
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (
        ["apt-get", "install", "-y", "-q", package],
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-y", "-q", package],
    ):
        done = subprocess.run(words, env=environ, capture_output=True, check=False, timeout=300)
        if done.returncode == 0 and "install" in words:
            return True
    return False


def _run(program: str, *rest: str) -> None:
    words = (_find(program) or program, *rest)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
