"""The live page on loopback: a few files, and the latest state as JSON.

Owns the addresses of the page (the table below). Has no way to change anything. Nothing on the page comes from
elsewhere; headers have the browser refuse it if it did.

    address               content
    /, /style.css ...     the page (``page/``)
    /state.json?since=7   the latest state, and the points of time after the seventh
    /calls.json?from=&to= the functions that one worker calls on another

It is seen by everybody on this host, and by nobody else: there is no password, hence no way to guess one. Over a
network, run ``farcall dashboard --connect`` where the browser is, or bring the port there with a tunnel (``ssh -L``).
A page on the internet can have a browser connect to loopback under a name of its own choice (DNS rebinding), so a
request must name a loopback host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from farcall.errors import InitError
from farcall.observe.dashboard.looks import Looks
from farcall.observe.observer import Observer
from farcall.observe.web_server import Answer, Request, WebServer
from farcall.runtime.rendezvous.addresses import is_loopback

__all__ = ["Dashboard"]

HOST: Final = "127.0.0.1"
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

    def __init__(self, connect: Callable[[], Observer], port: int) -> None:
        """``connect`` finds the cluster."""
        self._looks = Looks(connect)
        try:
            self._server = WebServer("farcall-dashboard-web", HOST, port, self._answer)
        except OSError as error:
            raise InitError(f"the dashboard cannot be served on {HOST}:{port}: {error}") from error
        self.port: int = self._server.port
        self.url: str = f"http://{HOST}:{self.port}/"
        """Where to point a browser."""

    def start(self) -> None:
        """Begin to serve, and to look."""
        self._looks.start()
        self._server.start()

    def close(self) -> None:
        """Stop."""
        self._looks.stop()
        self._server.close()

    def _answer(self, request: Request) -> Answer:
        if not names_loopback(request.host):
            return Answer(b"this page is served to loopback names only, such as http://127.0.0.1\n", status=403)
        try:
            target = urlsplit(request.target)
            asked = {name: values[0] for name, values in parse_qs(target.query).items()}
        except ValueError:
            return Answer(b"there is no such page\n", status=404)
        if target.path == "/state.json":
            since = asked.get("since", "0")
            is_number = since.isascii() and since.isdecimal() and len(since) <= _MOST_DIGITS
            return _json(self._looks.state(int(since) if is_number else 0))
        if target.path == "/calls.json":
            return _json(self._looks.functions_between(asked.get("from", ""), asked.get("to", "")))
        name = target.path[1:] or "index.html"
        if name in _PAGE:
            return Answer(_PAGE[name].read_bytes(), _TYPES[os.path.splitext(name)[1]])
        return Answer(b"there is no such page\n", status=404)


def names_loopback(host: str) -> bool:
    """Does the header ``Host`` name this machine by a loopback name?"""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _json(value: Any) -> Answer:
    return Answer(json.dumps(value, separators=(",", ":")).encode(), "application/json")
