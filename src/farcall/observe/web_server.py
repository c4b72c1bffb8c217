"""A small web server for the live page and the metrics: ``http.server``, with limits on what strangers can cost.

Owns the port, its thread and the connections. Answers ``GET`` only. It serves at most MOST_CONNECTIONS at a time, each
on a thread, and refuses further ones. The head of a request has at most MOST_HEAD_BYTES, and a connection over which no
request was answered for QUIET_S is closed. Knows neither the pages nor their readers.

A page on the internet can have a browser connect to loopback under a name of its own choice (DNS rebinding). So a
server on loopback answers only requests that name a loopback host.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

from farcall.runtime.rendezvous.addresses import is_loopback
from farcall.transport.descriptors import close_in_children

logger: logging.Logger = logging.getLogger("farcall")

MOST_CONNECTIONS: Final = 32
MOST_HEAD_BYTES: Final = 16 * 1024
QUIET_S: Final = 30.0
_LOOK_S: Final = 0.2
_STOP_S: Final = 2.0


class Request(NamedTuple):
    """One request of a client."""

    target: str
    accept: str


class Answer(NamedTuple):
    """The answer to one request."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200


Protect: TypeAlias = Callable[[socket.socket], socket.socket]


class WebServer:
    """One port, served until ``close``."""

    def __init__(
        self, name: str, host: str, port: int, answer: Callable[[Request], Answer], *, protect: Protect | None = None
    ) -> None:
        """The server calls ``answer`` on its own threads. Raises ``OSError`` if the port cannot be bound.

        ``protect`` puts TLS over a connection; it must not wait. None: connections stay as they are.
        """
        self._server = _Server((host, port), answer, protect)
        self.port: int = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_LOOK_S,), name=name, daemon=True)
        close_in_children(self)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and end all connections."""
        self._server.shutdown()
        self._server.server_close()
        self._server.show_out(NOBODY_S)
        self._thread.join(_STOP_S)

    def close_after_fork(self) -> None:
        """In a forked child: close the copy of the parent's listening socket."""
        self._server.socket.close()


NOBODY_S: Final = -1.0
"""The limit for `show_out` that ends every connection."""


class _Server(ThreadingHTTPServer):
    """The HTTP server. Mutable, under a lock: the open connections, and since when each is quiet."""

    daemon_threads = True
    block_on_close = False  # a browser keeps its connection open
    request_queue_size = 2 * MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int], answer: Callable[[Request], Answer], protect: Protect | None) -> None:
        self.answer = answer
        self.is_on_loopback = is_loopback(address[0])
        self._protect = protect
        self.quiet_since: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        stream, address = super().get_request()
        return stream if self._protect is None else self._protect(stream), address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self.quiet_since) >= MOST_CONNECTIONS
            if not is_full:
                self.quiet_since[request] = monotonic()
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self.quiet_since.pop(request, None)
        super().shutdown_request(request)

    def answered(self, request: socket.socket) -> None:
        """Restart the quiet time of a connection: a request was answered."""
        with self._lock:
            if request in self.quiet_since:
                self.quiet_since[request] = monotonic()

    def service_actions(self) -> None:
        self.show_out(QUIET_S)

    def show_out(self, quiet_s: float) -> None:
        """End the connections that have been quiet for longer than ``quiet_s``; their threads close them."""
        now = monotonic()
        with self._lock:
            late = [request for request, since in self.quiet_since.items() if now - since > quiet_s]
            for request in late:
                try:
                    socket.socket.shutdown(request, socket.SHUT_RDWR)  # bypass TLS, which its own thread may be using
                except OSError:
                    pass  # the connection is gone already

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a web page could not be served to %s", client_address, exc_info=True)


class _Head:
    """A reader of request heads that limits their size. Mutable: the bytes left for the present request."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = MOST_HEAD_BYTES

    def begin(self) -> None:
        """Begin the next request, with a fresh limit."""
        self._left = MOST_HEAD_BYTES

    def readline(self, size: int = -1) -> bytes:
        line = self._stream.readline(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(line)
        if self._left <= 0:
            raise ConnectionError("the head of the request is too long")
        return line

    def close(self) -> None:
        self._stream.close()

    @property
    def closed(self) -> bool:
        return self._stream.closed


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: _Server
    server_version = "farcall"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = QUIET_S

    def setup(self) -> None:
        super().setup()
        self._head = _Head(self.rfile)  # type: ignore[arg-type]
        self.rfile = self._head  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        self._head.begin()
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True
        self.server.answered(self.connection)

    def do_GET(self) -> None:
        head = self.headers
        if head.get("Content-Length") or head.get("Transfer-Encoding"):
            self.close_connection = True  # the rest of the request is not read
        if self.server.is_on_loopback and not names_loopback(head.get("Host", "")):
            answer = _ELSEWHERE
        else:
            answer = self.server.answer(Request(self.path, head.get("Accept", "")))
        self.send_response(answer.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        # Leave out the request line, which may contain a token.
        logger.debug("web: a request from %s", self.client_address[0])


_HOST: Final = re.compile(r"(?:\[([0-9a-f:]+)\]|([a-z0-9.-]+))(?::[0-9]+)?", re.IGNORECASE)


def names_loopback(host: str) -> bool:
    """Does the header ``Host`` name this machine by a loopback name?"""
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found[1] or found[2])


_ELSEWHERE: Final = Answer(b"this is served to loopback names only, such as http://127.0.0.1\n", status=403)
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
