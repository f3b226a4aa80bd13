"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(
    folder: Path, name: str, *options: str, by: tuple[Path, Path] | None = None
) -> tuple[Path, Path]:
    """A certificate and its key, signed ``by`` another one, or by itself. ``options``: of the key."""
    files = folder / f"{name}.pem", folder / f"{name}.key"
    where = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    of_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *(options or ("-nodes",))]
    signed = [] if by is None else ["-CA", by[0], "-CAkey", by[1]]
    words = ["openssl", "req", "-x509", *of_key, "-days", "2", *where, *signed]
    words += ["-out", files[0], "-keyout", files[1]]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    return files
