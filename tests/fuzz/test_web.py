"""Requests of strangers to the web server behind the live page and the metrics."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.fuzz.mutations import mutate, rounds
from tests.kit.times import LONG_S
from tests.unit.observe.simulated import SimulatedObserver

from farcall.observe.dashboard.server import Dashboard
from farcall.observe.web_server import MOST_CONNECTIONS

CORPUS = [
    b"GET /TOKEN/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /state.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /TOKEN/state.json?since=7 HTTP/1.1\r\nHost: localhost:80\r\nAccept: */*\r\n\r\n",
    b"GET /TOKEN/calls.json?from=a&to=b HTTP/1.0\r\nHost: [::1]:80\r\n\r\n",
    b"GET /TOKEN/state.json?since=" + b"9" * 5000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\nhello",
    b"GET /TOKEN/ HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Digest " + b"a" * 15_000 + b"\r\n\r\n",
    b"GET //[ HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
]


def dialled(page: Dashboard) -> socket.socket:
    return socket.create_connection(("127.0.0.1", page.port), timeout=LONG_S)


def test_requests_get_an_answer_or_an_end_and_leave_nothing() -> None:
    page = Dashboard(lambda: SimulatedObserver(8), 0)  # type: ignore[arg-type, return-value]
    try:
        before = threading.active_count()
        token = page.url.split("/")[-2].encode()
        corpus = [request.replace(b"TOKEN", token) for request in CORPUS]
        for seed, chance in rounds(300):
            data = mutate(chance, chance.choice(corpus), corpus)
            with dialled(page) as stream, contextlib.suppress(ConnectionError):
                stream.sendall(data)
                with contextlib.suppress(OSError):  # ENOTCONN: the server has refused, and closed
                    stream.shutdown(socket.SHUT_WR)
                while stream.recv(1 << 16):
                    pass
            assert threading.active_count() <= before + MOST_CONNECTIONS, seed
        with dialled(page) as stream:
            stream.sendall(b"GET /%s/style.css HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n" % token)
            assert stream.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        page.close()
