"""What the ranks of one job know and nobody else: from a file, or from whoever starts them.

Knows where it is kept; how ranks prove to each other that they know it is `jaxlamina.job.control.seals`'s.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import JOB, Cluster

SAME_SECRET = (
    f"start all ranks by one launcher, or give all the same secret, by job_secret_file or as {JOB} in their "
    "environment"
)

_LEAST_BYTES, _MOST_BYTES = 16, 1 << 16


def secret_of(cluster: Cluster, environment: Mapping[str, str]) -> bytes:
    """What ``job_secret_file`` holds, else what the environment says, else b"": none.

    ``UserError`` for a file that cannot be read, that others than its user may read, or that is too short."""
    path = cluster.job_secret_file
    if path is None:
        return environment.get(JOB, "").encode(errors="surrogateescape")
    try:
        found = _read(path)
    except OSError as error:
        raise UserError(f"job_secret_file {path}: {error.strerror}") from None
    secret = found.strip()
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise UserError(
            f"job_secret_file {path} must hold {_LEAST_BYTES} to {_MOST_BYTES} bytes, without white space "
            f"around them: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
        )
    return secret


def _read(path: str) -> bytes:
    with open(path, "rb", opener=_at_once) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise UserError(f"job_secret_file {path} is no file")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(f"job_secret_file {path} may be read or changed by others: chmod 600 {path}")
        return file.read(_MOST_BYTES + 1)


def _at_once(path: str, flags: int) -> int:
    """A named pipe would be waited for, perhaps for ever."""
    return os.open(path, flags | os.O_NONBLOCK)
