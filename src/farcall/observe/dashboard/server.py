"""The live page: a few files, and the latest state as JSON.

Owns the addresses of the page (the table below). Has no way to change anything. Nothing on the page comes from
elsewhere; headers have the browser refuse it if it did.

    address                       content
    /TOKEN/, /TOKEN/style.css ... the page (``page/``)
    /TOKEN/state.json?since=7     the latest state, and the points of time after the seventh
    /TOKEN/calls.json?from=&to=   the functions that one worker calls on another

The token cannot be guessed: the address is the permission, and there is no other authentication. It keeps other users
of this host out, too. Other hosts get the page over TLS only, with the certificate of this host.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from farcall.errors import InitError
from farcall.observe.dashboard.looks import Looks
from farcall.observe.observer import Observer
from farcall.observe.web_server import Answer, Request, WebServer
from farcall.runtime.rendezvous.addresses import is_loopback
from farcall.transport.tls import Tls

LOOPBACK: Final = "127.0.0.1"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE: Final = {file.name: file for file in (files(__package__) / "page").iterdir()}
_MOST_DIGITS: Final = 18


class Dashboard:
    """The page of one cluster, served until it is closed."""

    def __init__(
        self,
        connect: Callable[[], Observer],
        port: int,
        host: str = LOOPBACK,
        *,
        tls: Tls | None = None,
        name: str = "",
    ) -> None:
        """``connect`` finds the cluster. ``name``: that of this host, for browsers elsewhere."""
        self._looks = Looks(connect)
        self._prefix = f"/{secrets.token_urlsafe(32)}/"
        encrypts = not is_loopback(host)
        if encrypts and (tls is None or not tls.serves_web()):
            raise InitError(
                f"the dashboard needs TLS on {host}: give certificates (TlsOptions, FARCALL_TLS_CA, "
                "FARCALL_TLS_CERT, FARCALL_TLS_KEY; `farcall certificates` makes them), or serve it on loopback"
            )
        try:
            protect = None if tls is None or not encrypts else partial(tls.web, for_members=False)
            self._server = WebServer("farcall-dashboard-web", host, port, self._answer, protect=protect)
        except OSError as error:
            raise InitError(f"cannot serve the dashboard on {host}:{port}: {error}") from error
        self.port: int = self._server.port
        everywhere = host in ("0.0.0.0", "::")
        shown = (name or (socket.gethostname() if everywhere else host)) if encrypts else host
        place = f"[{shown}]" if ":" in shown else shown
        self.url: str = f"http{'s' if encrypts else ''}://{place}:{self.port}{self._prefix}"
        """Where to point a browser."""
        self._looks.start()

    def close(self) -> None:
        """Stop."""
        self._looks.stop()
        self._server.close()

    def _answer(self, request: Request) -> Answer:
        try:
            target = urlsplit(request.target)
            asked = {name: values[0] for name, values in parse_qs(target.query).items()}
        except ValueError:
            return _NO_PAGE
        prefix = self._prefix
        if not hmac.compare_digest(target.path[: len(prefix)].encode("utf-8", "replace"), prefix.encode()):
            return _NO_PAGE
        name = target.path[len(prefix) :] or "index.html"
        if name == "state.json":
            since = asked.get("since", "0")
            is_number = since.isascii() and since.isdecimal() and len(since) <= _MOST_DIGITS
            return _json(self._looks.state(int(since) if is_number else 0))
        if name == "calls.json":
            return _json(self._looks.functions_between(asked.get("from", ""), asked.get("to", "")))
        if name in _PAGE:
            return Answer(_PAGE[name].read_bytes(), _TYPES[os.path.splitext(name)[1]])
        return _NO_PAGE


_NO_PAGE: Final = Answer(b"there is no such page\n", status=404)


def _json(value: Any) -> Answer:
    return Answer(json.dumps(value, separators=(",", ":")).encode(), "application/json")
