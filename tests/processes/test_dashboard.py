"""The live page in a real browser, clicked through while a cluster works, waits, fails and loses a member.

Pictures are left in the test's folder, or where ``FARCALL_SCREENSHOTS`` says.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from tests.processes.browser import Browser, find_chromium
from tests.unit.observe.simulated import SimulatedObserver

import farcall
from farcall.observe import web_server
from farcall.observe.dashboard.server import Dashboard
from farcall.options import ObservingOptions, RpcBackendOptions
from farcall.testing.cluster import WorkerProcess, finish, start_cluster

PATIENCE_S = 250.0
SIZE = 4
TABS = ["overview", "workers", "matrix", "functions", "memory", "waiting", "events"]

needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium here: install one (Debian: chromium), or set FARCALL_CHROMIUM"
)


# ---------------------------------------------------------------------- a cluster at work


def add(left: int, right: int) -> int:
    return left + right


def echo(value: torch.Tensor) -> torch.Tensor:
    return value


def around(route: list[str]) -> int:
    return int(farcall.rpc_sync(route[0], around, args=(route[1:],))) + 1 if route else 0


def bad_batch() -> None:
    raise ValueError("a <b>bad</b> batch")


def wait_for_file(path: str) -> None:
    wait_for(Path(path).exists)


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def work(rank: int, done: str) -> None:
    """Each member calls the next ones, in all ways; w0 also waits for something that takes long."""
    names = [f"w{(rank + step) % SIZE}" for step in range(1, SIZE)]
    tensor = torch.ones(1 << 16)
    kept = farcall.remote(names[0], echo, args=(tensor,))
    waiting = farcall.rpc_async("w1", wait_for_file, args=(done,), timeout=PATIENCE_S) if rank == 0 else None
    while not Path(done).exists():
        for name in names:
            try:
                farcall.rpc_sync(name, add, args=(1, 2))
                farcall.rpc_sync(name, echo, args=(tensor,))
            except farcall.errors.RpcError:
                names = [other for other in names if other != name]  # one of them will be killed
        if len(names) == SIZE - 1:
            try:
                farcall.rpc_sync(names[0], around, args=(names[1:],))
                with pytest.raises(ValueError, match="bad"):
                    farcall.rpc_sync(names[0], bad_batch)
            except farcall.errors.RpcError:
                pass
        time.sleep(0.005)
    if waiting is not None:
        waiting.wait()
    del kept
    os._exit(0)  # a member is missing: there is no graceful end to agree on


@contextmanager
def running(folder: Path) -> Iterator[list[WorkerProcess]]:
    done = folder / "done"
    members = start_cluster(
        SIZE,
        work,
        str(done),
        observing=ObservingOptions(runtime_directory=str(folder / "run")),
        secret="a long secret of a test",
    )
    try:
        yield members
    finally:
        done.touch()
        finish(members, may_fail=range(SIZE))


@contextmanager
def command(folder: Path) -> Iterator[str]:
    """`farcall dashboard`; the address that it prints."""
    run = folder / "run"
    wait_for(lambda: len(list(run.glob("*.node"))) == SIZE)
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "farcall", "dashboard"],
        env={**os.environ, "FARCALL_RUNTIME_DIRECTORY": str(run)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{43}/", process.stdout.readline())
        assert found
        yield found[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


def pictures(folder: Path) -> Path:
    chosen = Path(os.environ.get("FARCALL_SCREENSHOTS", folder / "pictures"))
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


def picture_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])  # type: ignore[return-value]


def shows(browser: Browser, selector: str, pattern: str) -> None:
    """Wait until an element says something."""
    browser.wait_for(f"/{pattern}/.test(document.querySelector({json.dumps(selector)})?.innerText ?? '')")


@contextmanager
def served(size: int) -> Iterator[Dashboard]:
    """The page of a cluster that exists in numbers only."""
    page = Dashboard(lambda: SimulatedObserver(size), 0)  # type: ignore[arg-type, return-value]
    try:
        yield page
    finally:
        page.close()


# ---------------------------------------------------------------------- in a browser


@needs_chromium
@pytest.mark.timeout(600)
def test_clicking_through_a_running_cluster(tmp_path: Path) -> None:
    shots = pictures(tmp_path)
    with running(tmp_path) as members, command(tmp_path) as address, Browser(tmp_path) as browser:
        browser.prefer("light")
        browser.open(address)
        shows(browser, "#health", "4 running")
        shows(browser, "#live", "live")
        assert browser.evaluate("document.querySelectorAll('#squares button').length") == SIZE
        browser.wait_for("document.querySelectorAll('[data-chart=latency] path').length === 3")
        browser.wait_for("(document.querySelector('[data-chart=calls] path')?.getAttribute('d') ?? '').includes('L')")
        browser.wait_for("parseFloat(document.querySelector('#tiles strong').innerText) > 0")
        browser.screenshot(shots / "overview-light.png")
        assert picture_size(shots / "overview-light.png") == (1440, 900)

        browser.click("nav [data-tab=workers]")
        shows(browser, "#worker-table", "w3")
        browser.click("#worker-table [data-sort=calls]")
        browser.wait_for("document.querySelector('[data-sort=calls]').ariaSort === 'descending'")
        browser.write("#worker-filter", "w2")
        shows(browser, "#worker-shown", "1 of 4")
        browser.click("#worker-table tbody tr")
        shows(browser, "#worker-name", "w2")
        shows(browser, "#worker-called", "echo")
        shows(browser, "#worker-served", "around")
        browser.screenshot(shots / "worker-light.png")
        browser.click("#worker-close")

        browser.click("nav [data-tab=matrix]")
        browser.click("#matrix-canvas", 0.5, 0.3)
        shows(browser, "#pair h2", r"w\d → w\d")
        browser.screenshot(shots / "matrix-light.png")

        browser.click("nav [data-tab=functions]")
        shows(browser, "#function-table", "around")
        browser.click("nav [data-tab=memory]")
        shows(browser, "#owners", "w0")
        shows(browser, "#channel-table", "shared memory")

        browser.click("nav [data-tab=waiting]")
        shows(browser, "#waiting-list", "w0 → w1 wait_for_file")
        browser.click("#waiting-list summary")
        shows(browser, "#waiting-list details[open] .ends", r"in wait_for\b")
        browser.screenshot(shots / "waiting-light.png")

        # It goes dark: by a click, and it is still so after the page is loaded again.
        before = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.click("#theme")
        browser.click("#theme")
        shows(browser, "#theme", "dark")
        browser.wait_for(f"getComputedStyle(document.body).backgroundColor !== {json.dumps(before)}")
        browser.open(address + "#events")
        shows(browser, "#theme", "dark")
        shows(browser, "#event-list", "bad_batch")
        shows(browser, "#event-list", "a <b>bad<.b> batch")  # what users write is text

        members[3].kill()
        shows(browser, "#event-list", "dead")
        shows(browser, "#health", "3 running")
        browser.click("[data-kind=members]")
        browser.wait_for("!document.querySelector('#event-list').innerText.includes('bad_batch')")
        browser.screenshot(shots / "events-dark.png")
        browser.click("nav [data-tab=overview]")
        browser.screenshot(shots / "overview-dark.png")
        assert browser.complaints == []


@needs_chromium
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [16, 200])
def test_every_view_of_a_large_cluster(tmp_path: Path, size: int) -> None:
    shots = pictures(tmp_path)
    with served(size) as page, Browser(tmp_path) as browser:
        for theme in ("light", "dark"):
            browser.prefer(theme)
            browser.open(page.url)
            browser.wait_for(f"document.querySelectorAll('#squares button').length === {size}")
            browser.wait_for("document.querySelector('[data-chart=calls] path') !== null")
            for tab in TABS:
                browser.click(f"nav [data-tab={tab}]")
                browser.wait_for(f"!document.getElementById('{tab}').hidden")
                # Nothing sticks out: the page never scrolls sideways.
                assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab
                browser.screenshot(shots / f"{size}-{theme}-{tab}.png")
            browser.click("nav [data-tab=matrix]")
            assert browser.evaluate("document.getElementById('matrix-canvas').width") > 4 * size
        # Nor does the table of workers inside of it, on a laptop.
        browser.resize(1280, 800)
        browser.click("nav [data-tab=workers]")
        browser.wait_for("document.querySelector('#worker-table td.bad') !== null")
        assert browser.evaluate("document.querySelector('#workers .scroll').scrollWidth") <= browser.evaluate(
            "document.querySelector('#workers .scroll').clientWidth"
        )
        browser.screenshot(shots / f"{size}-1280-workers.png")
        browser.click("nav [data-tab=workers]")
        browser.wait_for(f"document.querySelectorAll('#worker-table tbody tr').length === {size}")
        assert browser.complaints == []


@needs_chromium
@pytest.mark.timeout(600)
def test_a_click_counts_though_news_come_in_the_middle_of_it(tmp_path: Path) -> None:
    """Whoever holds the button down for a tenth of a second meets news every tenth time."""
    looks = "performance.getEntriesByType('resource').filter((one) => one.name.includes('state.json')).length"
    with served(8) as page, Browser(tmp_path) as browser:
        browser.open(page.url + "#workers")
        browser.press("#worker-table tbody tr")
        before = browser.evaluate(looks)
        browser.wait_for(f"{looks} > {before} + 2")
        browser.release()
        shows(browser, "#worker-name", r"\w")
        browser.click("#worker-close")
        shown = "document.querySelector('#worker-table tbody').innerText"
        before = browser.evaluate(shown)
        browser.wait_for(f"{shown} !== {json.dumps(before)}")  # and news are shown again


# ---------------------------------------------------------------------- without one


def fetch(address: str, **headers: str) -> tuple[int, Any, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_the_page_and_nothing_else_is_served() -> None:
    with served(8) as page:
        status, headers, body = fetch(page.url)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        for name in re.findall(r'(?:href|src)="([a-z.]+)"', body.decode()):
            assert fetch(page.url + name)[0] == 200, name
        assert "workers" in json.loads(fetch(page.url + "state.json?since=nonsense")[2])
        assert json.loads(fetch(page.url + "calls.json?from=nobody&to=")[2]) == []
        for path in ("server.py", "page/app.js", "..%2fserver.py", "../server.py", "%2e%2e/server.py"):
            assert fetch(page.url + path)[0] == 404, path
        assert fetch(page.url, Host="evil.example")[0] == 403
        request = urllib.request.Request(page.url, data=b"x", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request, timeout=PATIENCE_S)


def test_it_is_served_on_loopback_only() -> None:
    with served(8) as page:
        assert page.url.startswith("http://127.0.0.1:")
        port = f":{page.port:04X}"
        tables = [Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()]
        assert [row[1] for row in rows if row[3] == "0A" and row[1].endswith(port)] == ["0100007F" + port]


def test_its_address_is_where_it_is_served_whatever_the_node_advertises() -> None:
    page = Dashboard(lambda: SimulatedObserver(8), 0, name="10.0.0.1")  # type: ignore[arg-type, return-value]
    try:
        assert fetch(page.url)[0] == 200
    finally:
        page.close()


def test_other_users_of_the_machine_do_not_know_its_address() -> None:
    with served(8) as page:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{43}/", page.url)
        root = f"http://127.0.0.1:{page.port}/"
        for wrong in ("", "state.json", "index.html", "calls.json?from=&to=", f"{'A' * 43}/", "%2e/", "\u00e9/"):
            assert fetch(root + quote(wrong, safe="/?=&%"))[0] == 404, wrong
        with served(8) as another:
            assert fetch(root + another.url.split("/")[-2] + "/")[0] == 404


def test_what_others_send_costs_the_server_little() -> None:
    """Of old inputs: a long proof kept the interpreter for half a minute, and one that is not ASCII raised."""
    with served(8) as page:
        address = ("127.0.0.1", page.port)
        began = time.process_time()
        for line in (
            b"Authorization: Digest " + b"a" * 65_000,
            b"Authorization: Digest nonce=" + b"\xff" * 100,
            b"Host: " + b"[" * 10_000,
            b"\r\n".join(b"X-%d: %s" % (number, b"y" * 100) for number in range(1000)),
        ):
            with socket.create_connection(address, timeout=PATIENCE_S) as stream, contextlib.suppress(ConnectionError):
                stream.sendall(b"GET / HTTP/1.1\r\n" + line + b"\r\n\r\n")
                with contextlib.suppress(OSError):  # ENOTCONN: the server has refused, and closed
                    stream.shutdown(socket.SHUT_WR)
                while stream.recv(1 << 16):
                    pass
        assert time.process_time() - began < 5.0
        assert fetch(page.url)[0] == 200


def test_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(8) as page:
        before = threading.active_count()
        idle = [socket.create_connection(("127.0.0.1", page.port), timeout=PATIENCE_S) for _ in range(100)]
        wait_for(lambda: len(page._server._server.quiet_since) == web_server.MOST_CONNECTIONS)
        assert threading.active_count() <= before + web_server.MOST_CONNECTIONS
        monkeypatch.setattr(web_server, "QUIET_S", 0.1)
        idle[0].send(b"G")  # and who sends a byte now and then is not there for good
        for stream in idle:
            with contextlib.suppress(ConnectionError):
                assert stream.recv(1) == b""
            stream.close()
        wait_for(lambda: not page._server._server.quiet_since)  # their threads are a little later
        monkeypatch.undo()  # an answer may take longer than that on a busy machine
        assert fetch(page.url)[0] == 200


def test_a_node_serves_it_if_asked_to(tmp_path: Path) -> None:
    options = RpcBackendOptions(
        init_method=f"file://{tmp_path}/meet", observing=ObservingOptions(dashboard_port=0, observable=False)
    )
    with farcall.Node("alone", 0, 1, options) as node:
        assert node.dashboard_url is not None

        def seen() -> bool:
            with urllib.request.urlopen(f"{node.dashboard_url}state.json", timeout=PATIENCE_S) as answer:
                state = json.load(answer)
            return [worker["name"] for worker in state["workers"]] == ["alone"] and not state["error"]

        wait_for(seen)
        address = node.dashboard_url
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=PATIENCE_S)
