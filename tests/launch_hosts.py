"""Two "hosts" on one machine: network namespaces with an address, a hostname and a loopback each, joined by a
cable that can be cut.

What a host does not share with another here: addresses, ports, names, variables, and whose children processes
are; and the second one's /dev/shm. What it does: other files and process numbers. Needs root and `ip`. Knows
nothing of MPI beyond the agent by which mpirun reaches another host.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

# What ssh would do: `agent HOST COMMAND…`. A daemon starts it, which is none of ours to wait for or to kill.
AGENT = """#!{python} -ES
import json, socket, sys
with socket.socket(socket.AF_UNIX) as daemon:
    daemon.connect({path!r})
    socket.send_fds(daemon, [json.dumps(sys.argv[1:]).encode()], [0, 1, 2])
    sys.exit(int(daemon.recv(16) or 255))
"""


def why_no_hosts() -> str | None:
    """What keeps this machine from having two, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"no {tool}: apt-get install iproute2 util-linux hostname"
    name = f"jlt{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def why_no_rates() -> str | None:
    """What keeps a link's rate from being limited, or None."""
    return None if shutil.which("tc") else "no tc: apt-get install iproute2"


class Hosts:
    """Two of them; use as a context manager. ``addresses`` and ``names`` go together. ``memory``: what the
    second one has as /dev/shm, which the first one's processes could not reach if they had not this path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"jl{os.getpid()}{side}" for side in "ab"]
        self.addresses = ["10.77.31.1", "10.77.31.2"]
        self.agent = folder / "agent"
        self.memory = folder / "memory"
        self._daemon = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Self:
        a, b = self.names
        self.memory.mkdir()
        try:
            for name in self.names:
                _ip("netns", "add", name)
            _ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
            for name, address in zip(self.names, self.addresses, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                for link in ("cable", "lo"):
                    _ip("-n", name, "link", "set", link, "up")
        except BaseException:
            self.__exit__()
            raise
        path = str(self.folder / "daemon")
        self._daemon.bind(path)
        self._daemon.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        self.agent.write_text(AGENT.format(python=sys.executable, path=path))
        self.agent.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        self._daemon.close()
        for side, name in enumerate(self.names):
            for pid in self.pids(side):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # until it is closed
            while True:
                asked, _ = self._daemon.accept()
                threading.Thread(target=self._run, args=(asked,), daemon=True).start()

    def _run(self, asked: socket.socket) -> None:
        with asked:
            said, files, _, _ = socket.recv_fds(asked, 2**16, 3)
            host, *words = json.loads(said)
            name = self.names[self.addresses.index(host)]
            has_memory = name == self.names[1]
            process = subprocess.Popen(
                _on(name, "eval", words, self.memory if has_memory else Path("/dev/shm")),
                stdin=files[0],
                stdout=files[1],
                stderr=files[2],
                cwd="/",
                env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                start_new_session=True,
            )
            for file in files:
                os.close(file)
            code = process.wait()
            with contextlib.suppress(OSError):  # nobody waits for it any more
                asked.send(str(code % 256).encode())

    def pids(self, side: int) -> list[int]:
        """Processes on a host."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.names[side]], check=False, capture_output=True, text=True
        )
        return [int(word) for word in done.stdout.split()]

    def cut(self) -> None:
        """Every packet is dropped, and nobody is told: all go to a card that is not there."""
        for name, other in zip(self.names, reversed(self.addresses), strict=True):
            nowhere = ("lladdr", "02:00:00:00:00:01", "dev", "cable", "nud", "permanent")
            _ip("-n", name, "neigh", "replace", other, *nowhere)

    def mend(self) -> None:
        for name, other in zip(self.names, reversed(self.addresses), strict=True):
            _ip("-n", name, "neigh", "del", other, "dev", "cable")

    def limit(self, mbit_per_s: float) -> None:
        """Holds the cable to a rate each way; 0: to none."""
        for name in self.names:
            on = ("qdisc", "dev", "cable", "root")
            subprocess.run(["tc", "-n", name, on[0], "del", *on[1:]], check=False, capture_output=True)
            if not mbit_per_s:
                continue
            rate = ("rate", f"{mbit_per_s:g}mbit", "burst", "32kbit", "latency", "400ms")
            subprocess.run(["tc", "-n", name, on[0], "add", *on[1:], "tbf", *rate], check=True)

    def hostfile(self, *slots: int) -> Path:
        """One that gives each host so many ranks."""
        path = self.folder / "hosts"
        lines = [f"{ip} slots={n}\n" for ip, n in zip(self.addresses, slots, strict=True)]
        path.write_text("".join(lines))
        return path

    def on_first(self, *command: str) -> list[str]:
        """The command line that runs ``command`` on the first host."""
        return _on(self.names[0], "exec", command, Path("/dev/shm"))


def _on(name: str, how: str, words: Sequence[str], memory: Path) -> list[str]:
    """What runs ``words`` on a host: ``exec`` as they are, ``eval`` by a shell."""
    script = f'hostname "$0"; mount --bind {shlex.quote(str(memory))} /dev/shm; {how} "$@"'
    apart = ("unshare", "--uts", "--mount")
    return ["ip", "netns", "exec", name, *apart, "sh", "-c", script, name, *words]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
