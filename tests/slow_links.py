"""A decode step over two hosts whose link is slow: q first or not, staggered batches, messages in parts.

    python tests/slow_links.py --rates 20,100,1000,0 -- --case 16x256 --staggered 2 --mini-batches 2

Two network namespaces of one machine are the hosts (`launch_hosts`), and `tc` holds the link between them to a
rate in Mbit/s each way; 0: as fast as it goes. The model rank is on one, the attention rank on the other, on
CPUs over MPI. What is measured at each rate is `jaxlamina bench step` with the options after `--`. The
settings of Lamina 2025 Figure 14 (q first) and Lamina 2024 Figure 16 (streaming). Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from launch_hosts import Hosts, why_no_hosts, why_no_rates
from serving import ROOT, environment
from supervised import ON_CPUS, starter

DEADLINE_S = 1800
BENCH = ("--config", "smollm2-135m", "--dtype", "float32", "--no-unsplit")


def job(hosts: Hosts, **cluster: Any) -> list[str]:
    """`jaxlamina launch` of one model rank on the first host and one attention rank on the second, which has
    all the KV."""
    settings = {"control": f"{hosts.addresses[0]}:29400", "local_attention": 0} | cluster
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["launch", "--transport", "mpi", *ON_CPUS, *changes, "--starter", starter(hosts, 1, 1)]


def measured(hosts: Hosts, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxlamina", *job(hosts), "--", "bench", "step", *BENCH, *options, "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment(XLA_FLAGS=os.environ.get("XLA_FLAGS", "")),
        timeout=DEADLINE_S,
    )


def main() -> int:
    about, *_ = (__doc__ or "").partition("\n\n    ")
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="20,50,100,400,1000,0", help="Mbit/s, separated by commas")
    parser.add_argument("options", nargs="*", help="of `jaxlamina bench step`")
    asked = parser.parse_args()
    if (reason := why_no_hosts() or why_no_rates()) is not None:
        print(f"slow links cannot be measured here: {reason}", file=sys.stderr)
        return 2
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, Hosts(Path(folder)) as hosts:
        for rate in map(float, asked.rates.split(",")):
            hosts.limit(rate)
            done = measured(hosts, *asked.options)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return done.returncode
            record = json.loads(done.stdout.splitlines()[-1])
            found.append({"mbit_per_s": rate, "load": os.getloadavg()[0], **record})
            for result in record["results"]:
                way = f"{result['case']}, {result['way']}"
                print(f"{rate or 'no limit':>8} Mbit/s  {way:44} {result['ms']:8.2f} ms", flush=True)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
