"""Two "hosts" on one machine: network namespaces with an address, a hostname and a loopback each, joined by a
cable.

What a host does not share with another here: addresses, ports, names. What it does: files and process
numbers. Needs root and `ip`. Knows nothing of MPI beyond the agent by which mpirun reaches another host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

# What ssh would do: `agent HOST COMMAND…`. In the namespace of that address, under that host's name.
AGENT = """#!/bin/sh
host=$1; shift
case $host in
{cases}
*) echo "no such host: $host" >&2; exit 1 ;;
esac
exec ip netns exec "$name" unshare --uts sh -c 'hostname "$0"; eval "$@"' "$name" "$@"
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


class Hosts:
    """Two of them; use as a context manager. ``addresses`` and ``names`` go together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"jl{os.getpid()}{side}" for side in "ab"]
        self.addresses = ["10.77.31.1", "10.77.31.2"]
        self.agent = folder / "agent"

    def __enter__(self) -> Self:
        a, b = self.names
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
        cases = [f"{ip}) name={name} ;;" for ip, name in zip(self.addresses, self.names, strict=True)]
        self.agent.write_text(AGENT.format(cases="\n".join(cases)))
        self.agent.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def hostfile(self, *slots: int) -> Path:
        """One that gives each host so many ranks."""
        path = self.folder / "hosts"
        lines = [f"{ip} slots={n}\n" for ip, n in zip(self.addresses, slots, strict=True)]
        path.write_text("".join(lines))
        return path

    def on_first(self, *command: str) -> list[str]:
        """The command line that runs ``command`` on the first host."""
        return ["ip", "netns", "exec", self.names[0], "unshare", "--uts", "sh", "-c",
                'hostname "$0"; exec "$@"', self.names[0], *command]  # fmt: skip


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
