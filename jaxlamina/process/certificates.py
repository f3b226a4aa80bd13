"""A certificate and its key for connections by TLS, or why there is none in the files."""

from __future__ import annotations

import ssl
from pathlib import Path

from jaxlamina.errors import UserError


def load_certificate(
    context: ssl.SSLContext, certificate: str | Path, key: str | Path | None, given: str
) -> None:
    """Into ``context``. ``UserError``, which begins with the words of who gave them, for files that are none;
    ``OSError`` for those that cannot be read."""
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # else it would ask at the terminal
    except ssl.SSLError as error:
        raise UserError(
            f"{given}: {error.reason or error}; they must be a certificate and its own key in PEM form, and "
            "the key without a passphrase"
        ) from None
