"""Benches of a bench: jobs of `jaxlamina` that are compared, each with some of this machine's devices.

Knows processes and environments; nothing of what is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from jaxlamina.process.gpus import MEMORY_SHARE, visible_gpus

_GPU_SHARE = "0.92"  # of each GPU's memory: KV fills what weights leave
_COLLECT_S = 15.0  # for a job to end that was told to
_SHOWN = 300  # letters of why a job failed


@dataclass(frozen=True)
class ComparedJob:
    """One process, or one job of ranks: the words after ``jaxlamina``, and its environment over ours."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def launched(a: int, b: int, changes: Sequence[str], *options: str, on_gpus: bool) -> tuple[str, ...]:
    """The words before a command that ``a`` model workers and ``b`` attention workers run, all on devices of
    one kind. ``changes``: of the cluster, as ``--set`` has them."""
    platform = "cuda" if on_gpus else "cpu"
    platforms = [f'{key}="{platform}"' for key in ("model_platform", "attention_platform")]
    settings = [word for change in (*platforms, *changes) for word in ("--set", change)]
    return ("launch", "--dop", f"{a},{b}", "--transport", "xla", *options, *settings, "--")


def only(gpus: Sequence[int] | range) -> dict[str, str]:
    """Of the GPUs that this process may use, these."""
    names = visible_gpus(os.environ) or [str(i) for i in range(max(gpus) + 1)]
    return {MEMORY_SHARE: _GPU_SHARE, "CUDA_VISIBLE_DEVICES": ",".join(names[i] for i in gpus)}


def pretended(n: int) -> dict[str, str]:
    """So many devices of a CPU."""
    if n == 1:
        return {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={n}"
    return {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}


class EndedJob(NamedTuple):
    """What a job wrote; ``code``: None of one that was too late, and was ended; ``err``: before that."""

    code: int | None
    out: str
    err: str


class StartedJob(NamedTuple):
    """A process, and the files that it writes to: nobody has to read for it to go on."""

    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]


def run_at_once(jobs: Sequence[ComparedJob], within_s: float) -> Generator[EndedJob]:
    """Starts all; gives each as it ended, in their order. Closed before that, it ends the others."""
    until = time.monotonic() + within_s
    started: list[StartedJob] = []
    try:
        for job in jobs:
            started.append(start(job))
        for one in started:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, until - time.monotonic()))
            code, n_said = one.process.poll(), os.fstat(one.err.fileno()).st_size
            end(one.process)
            yield EndedJob(code, _written(one.out), _written(one.err, n_said if code is None else -1))
    finally:
        for one in started:
            end(one.process)


def start(job: ComparedJob) -> StartedJob:
    words = [sys.executable, "-m", "jaxlamina", *job.words]
    out, err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (closed when read)
    environment = {**os.environ, **job.environment}
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    return StartedJob(process, out, err)


def _written(file: IO[bytes], n_bytes: int = -1) -> str:
    with file:
        file.seek(0)
        return file.read(n_bytes).decode(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_COLLECT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def late(ended: EndedJob, within_s: float) -> str:
    """Of a job that was too late: where it was."""
    where = f"; the last that it said: {reason(ended.err)}" if ended.err.strip() else ""
    return f"not done within {within_s:g} s{where}"


def reason(said: str) -> str:
    """The last line of what a job that failed said."""
    lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
    return f"{lines[-1]:.{_SHOWN}}"
