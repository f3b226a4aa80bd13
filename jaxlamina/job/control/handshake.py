"""How a rank and rank 0 get to know each other, as the rank does it: Challenge, Hello, Admitted.

Until rank 0 has proven that it knows the job's secret, nothing that comes is taken for its word. Knows a
socket and these messages; nothing of what is said afterwards.
"""

from __future__ import annotations

import socket
import ssl
import time

import msgspec

from jaxlamina.errors import UserError
from jaxlamina.job.control.door import HELLO_BYTES
from jaxlamina.job.control.frames import LARGEST_BYTES, Frame, FrameError, FrameReader
from jaxlamina.job.control.messages import (
    Admitted,
    Challenge,
    Hello,
    Message,
    MessageError,
    Refused,
    decode,
    encode,
)
from jaxlamina.job.control.seals import Seals, new_nonce
from jaxlamina.job.secret import SAME_SECRET
from jaxlamina.job.tls import JobTls

_SHOWN = 400  # letters of what one says who has proven nothing


def introduce(
    sock: socket.socket, hello: Hello, secret: bytes, wait_s: float, rank_0: str, tls: JobTls | None = None
) -> tuple[socket.socket, FrameReader, Seals]:
    """By what the connection goes on, and what it is read and sealed by, once rank 0 has taken this rank in.

    ``rank_0``: how messages name it. ``tls``: this rank's, where the job has it. ``UserError`` where whoever
    listens there refuses, proves nothing, or says nothing within ``wait_s`` seconds; the socket is closed
    then.
    """
    until, reader = time.monotonic() + wait_s, FrameReader(HELLO_BYTES)
    try:
        challenge = _challenge(sock, reader, until, rank_0)
        if challenge.tls != (tls is not None):
            raise UserError(_one_has_tls(rank_0, challenge.tls))
        if tls is not None:
            sock, reader = tls.host(sock), FrameReader(HELLO_BYTES)  # nothing counts that came without
            _shake_hands(sock, until, rank_0)
        return sock, reader, _proven(sock, reader, hello, secret, challenge.nonce, until, rank_0)
    except TimeoutError:
        sock.close()
        line = f"{rank_0} was reached, but did not say within {wait_s:g} s that it takes this rank in"
        raise UserError(line) from None
    except (FrameError, MessageError) as error:
        sock.close()
        raise UserError(f"{rank_0} has gone: it sent what cannot be read ({error})") from error
    except OSError as error:
        sock.close()
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            # TLS 1.3 has the other end say so after the handshake.
            raise UserError(
                f"{rank_0} does not take this rank's TLS ({error.reason or error}): its control_cafile must "
                "know who has signed control_certfile here"
            ) from error
        why = f"lost its control connection ({error.strerror or error})"
        raise UserError(f"{rank_0} has gone: it {why}") from error
    except BaseException:
        sock.close()
        raise


def _challenge(sock: socket.socket, reader: FrameReader, until: float, rank_0: str) -> Challenge:
    challenge = decode(_next(sock, reader, until, rank_0).body)
    if not isinstance(challenge, Challenge):
        raise UserError(f"{rank_0} said {type(challenge).__name__} instead of Challenge")
    return challenge


def _one_has_tls(rank_0: str, has_it: bool) -> str:
    who = f"{rank_0} speaks TLS, and this rank has" if has_it else f"this rank speaks TLS, and {rank_0} has"
    return f"{who} no control_certfile: give all ranks one, or none"


def _shake_hands(sock: socket.socket, until: float, rank_0: str) -> None:
    assert isinstance(sock, ssl.SSLSocket)
    sock.settimeout(_left(until))
    try:
        sock.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"{rank_0} has a certificate that control_cafile here does not know ({error.verify_message})"
        ) from error


def _proven(
    sock: socket.socket,
    reader: FrameReader,
    hello: Hello,
    secret: bytes,
    theirs: bytes,
    until: float,
    rank_0: str,
) -> Seals:
    nonce = new_nonce()
    seals = Seals.of_rank(secret, nonce, theirs)
    for piece in seals.sealing.frame(encode(msgspec.structs.replace(hello, nonce=nonce))):
        sock.settimeout(_left(until))
        sock.sendall(piece)
    seals.sealing.sent()
    answer = _next(sock, reader, until, rank_0)
    if answer.seal is None:
        raise UserError(_unproven(decode(answer.body), bool(secret), rank_0))
    try:
        said = decode(seals.unsealing.body(answer))
    except FrameError as error:
        raise UserError(f"{rank_0} does not know this job's secret ({error}): {SAME_SECRET}") from error
    if isinstance(said, Refused):
        raise UserError(said.reason)
    if not isinstance(said, Admitted):
        raise UserError(f"{rank_0} said {type(said).__name__} instead of Admitted")
    reader.largest_bytes = LARGEST_BYTES
    return seals


def _unproven(said: Message, has_secret: bool, rank_0: str) -> str:
    if not isinstance(said, Refused):
        return f"{rank_0} said {type(said).__name__} without a proof that it is of this job"
    if not has_secret:
        return said.reason
    reason = f"{said.reason!r:.{_SHOWN}}"
    return f"{rank_0} turned this rank away, without a proof that it is of this job: {reason}"


def _next(sock: socket.socket, reader: FrameReader, until: float, rank_0: str) -> Frame:
    while (frame := next(reader.frames(), None)) is None:
        sock.settimeout(_left(until))
        data = sock.recv(HELLO_BYTES)
        if not data:
            raise UserError(f"{rank_0} has gone: it closed its control connection")
        reader.feed(data)
    return frame


def _left(until: float) -> float:
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left
