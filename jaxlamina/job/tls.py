"""TLS on connections between ranks that a job opens itself, where its cluster has certificates: control, and
copies of KV.

Each end shows a certificate, and checks the other's against an authority. Hosts' names are not checked: that
a peer is of this job is proven by the job's secret, inside. Knows certificates and sockets; nothing of what
is said, and nothing of tensors' ways (NCCL, Gloo, MPI), which have none of this.
"""

from __future__ import annotations

import socket
import ssl
import threading
from typing import Any, NamedTuple, Self

from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.process.certificates import load_certificate

_RECORD_BYTES = 1 << 14


class TlsSocket(ssl.SSLSocket):
    """One that threads may read and write at once, and whose `BlockingIOError` is a plain socket's."""

    def __new__(cls, *args: Any, **how: Any) -> Self:
        self = super().__new__(cls, *args, **how)
        self._lock = threading.Lock()  # OpenSSL has none
        self._is_open = False
        return self

    _lock: threading.Lock
    _is_open: bool

    def has_shaken(self) -> bool:
        """Whether the handshake is done; of a socket that does not block: to be asked again when something
        has come."""
        if not self._is_open:
            try:
                self.do_handshake()
            except ssl.SSLWantReadError:
                return False
            self._is_open = True
        return True

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        with self._lock:
            try:
                return super().recv(buflen, flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        with self._lock:
            try:
                return super().recv_into(buffer, nbytes, flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def send(self, data: Any, flags: int = 0) -> int:
        """A record at most: what blocks has left in part, and the same must be sent next."""
        with self._lock:
            try:
                return super().send(memoryview(data)[:_RECORD_BYTES], flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        """Of the connection below, while others may read and write."""
        socket.socket.shutdown(self, how)


class JobTls(NamedTuple):
    """By which this process listens, and by which it connects."""

    listening: ssl.SSLContext
    connecting: ssl.SSLContext

    def guest(self, sock: socket.socket) -> TlsSocket:
        """One that has connected, which has not shaken hands yet. ``sock`` is its own from now on."""
        return self._of(self.listening, sock, server_side=True)

    def host(self, sock: socket.socket) -> TlsSocket:
        """One that it has connected to, before the handshake. ``sock`` is its own from now on."""
        return self._of(self.connecting, sock)

    @staticmethod
    def _of(context: ssl.SSLContext, sock: socket.socket, **how: Any) -> TlsSocket:
        found = context.wrap_socket(sock, do_handshake_on_connect=False, **how)
        assert isinstance(found, TlsSocket)
        return found


def tls_of(cluster: Cluster) -> JobTls | None:
    """None where the cluster has no certificate. ``UserError`` for files that cannot be used."""
    certificate, key = cluster.control_certfile, cluster.control_keyfile
    if certificate is None:
        return None
    authority = cluster.control_cafile or certificate
    made = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.sslsocket_class = TlsSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        files = f"control_certfile {certificate}" + ("" if key is None else f", control_keyfile {key}")
        try:
            load_certificate(context, certificate, key, files)
            files = f"control_cafile {authority}"
            context.load_verify_locations(authority)
        except ssl.SSLError as error:
            raise UserError(
                f"{files}: {error.reason or error}; it must hold certificates in PEM form"
            ) from None
        except OSError as error:
            raise UserError(f"{files}: {error.strerror}") from None
        made.append(context)
    made[0].num_tickets = 0  # nobody comes twice
    return JobTls(*made)
