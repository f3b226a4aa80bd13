"""mpi4jax moves arrays between two real ranks from inside a jitted function: what the MPI transport will
stand on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 240


@pytest.mark.mpi
def test_two_ranks_exchange_arrays_inside_jit():
    command = ["mpirun", "-n", "2", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += [sys.executable, str(Path(__file__).with_name("mpi_exchange.py"))]
    # mpirun ends its ranks when it is ended, so the deadline leaves nothing behind.
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"exchanged 1024 numbers, last {((1023 + 1) * 2 + 1) * 4 + 2}" in done.stdout
