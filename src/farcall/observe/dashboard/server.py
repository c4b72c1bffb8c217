"""The web server of the live page: a few files, and the latest state as JSON.

Owns the addresses of the page (the table below) and the port. Answers ``GET`` only, and has no way to change anything.
Nothing on the page comes from elsewhere; headers have the browser refuse it if it did.

    address               content
    /, /style.css ...     the page (``page/``)
    /state.json?since=7   the latest state, and the points of time after the seventh
    /calls.json?from=&to= the functions that one worker calls on another
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from farcall.errors import InitError
from farcall.observe.dashboard.access import Access, Denied
from farcall.observe.dashboard.looks import Looks
from farcall.observe.observer import Observer
from farcall.runtime.rendezvous.addresses import is_loopback
from farcall.transport.descriptors import close_in_children

__all__ = ["Dashboard"]

logger: logging.Logger = logging.getLogger("farcall")

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE: Final = {file.name: file for file in (files(__package__) / "page").iterdir()}
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_IDLE_S: Final = 30.0


class _Server(ThreadingHTTPServer):
    """The server, with what its handlers need."""

    daemon_threads = True
    block_on_close = False  # a browser keeps its connection open

    def __init__(self, address: tuple[str, int], access: Access, looks: Looks) -> None:
        self.access = access
        self.looks = looks
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("the dashboard could not answer %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """The answers of one connection."""

    server: _Server
    server_version = "farcall"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_GET(self) -> None:
        host, proof = self.headers.get("Host", ""), self.headers.get("Authorization", "")
        try:
            self.server.access.check("GET", self.path, host, proof, time.time())
        except Denied as denied:
            more = {"WWW-Authenticate": denied.challenge} if denied.challenge else {}
            self._answer(denied.status, "text/plain; charset=utf-8", f"{denied}\n".encode(), more)
            return
        target = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(target.query).items()}
        if target.path == "/state.json":
            since = asked.get("since", "0")
            self._json(self.server.looks.state(int(since) if since.isdecimal() else 0))
        elif target.path == "/calls.json":
            self._json(self.server.looks.functions_between(asked.get("from", ""), asked.get("to", "")))
        else:
            name = target.path[1:] or "index.html"
            if name in _PAGE:
                self._answer(200, _TYPES[os.path.splitext(name)[1]], _PAGE[name].read_bytes())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"there is no such page\n")

    def _json(self, value: Any) -> None:
        self._answer(200, "application/json", json.dumps(value, separators=(",", ":")).encode())

    def _answer(self, status: int, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(more or {}), "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("dashboard: " + format, *args)


class Dashboard:
    """The page of one cluster, served until it is closed."""

    def __init__(self, connect: Callable[[], Observer], host: str, port: int, secret: bytes | None) -> None:
        """``connect`` finds the cluster; ``secret`` is the cluster's, if its user has chosen one."""
        if not is_loopback(host) and secret is None:
            raise InitError(
                f"the dashboard is served on {host} only behind the cluster's secret: set one (option secret, or "
                "FARCALL_SECRET), or leave the host out to serve on loopback"
            )
        self._looks = Looks(connect)
        try:
            self._server = _Server((host, port), Access(None if is_loopback(host) else secret), self._looks)
        except OSError as error:
            raise InitError(f"the dashboard cannot be served on {host}:{port}: {error}") from error
        self.port: int = int(self._server.server_address[1])
        shown = f"[{host}]" if ":" in host else host
        self.url: str = f"http://{shown}:{self.port}/"
        """Where to point a browser."""
        close_in_children(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="farcall-dashboard-web", daemon=True
        )

    def start(self) -> None:
        """Begin to serve, and to look."""
        self._looks.start()
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._looks.stop()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_IDLE_S)

    def close_after_fork(self) -> None:
        """In a forked child: the port is the parent's."""
        self._server.socket.close()
