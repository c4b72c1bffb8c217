"""A cluster in a notebook: a table of its workers, which refreshes while the cluster lives.

The thread of the newest table updates it; it ends with the cluster, or when a newer table is shown.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from farcall.errors import RpcError
from farcall.html import table
from farcall.launcher.lives import State
from farcall.launcher.supervisor import Supervisor
from farcall.launcher.worker import describe
from farcall.rpc.future import Future
from farcall.rpc.handles import Worker
from farcall.runtime.node import Runtime

REFRESH_S = 1.0
ANSWER_S = 0.5
"""How long a table waits for the answers of workers."""
HEAD = ("worker", "rank", "state", "restarts", "host", "process", "calls served", "memory")


class LiveTable:
    """The newest table of a cluster on a notebook's page."""

    def __init__(self, cluster: object, supervisor: Supervisor, node: Runtime) -> None:
        self._cluster = cluster
        self._supervisor = supervisor
        self._node = node
        self._stop = threading.Event()

    def html(self) -> str:
        """A row for each worker, with its answers about itself if they come in time."""
        known = self._supervisor.workers()
        asked: dict[str, Future[tuple[str, int, int, int]]] = {}
        rows: list[Sequence[object]] = []
        for one in known:
            if one.state is State.RUNNING:
                with suppress(RpcError):  # it has just died, or this program is ending
                    asked[one.name] = Worker(one.name, node=self._node, timeout=ANSWER_S).start(describe)
        for one in known:
            told: tuple[object, ...] = ("", "", "", "")
            if one.name in asked:
                with suppress(RpcError):  # or it is busy: its state says more than this
                    host, process, served, memory = asked[one.name].result()
                    told = (host, process, served, f"{memory / (1 << 20):.0f} MiB")
            rows.append((one.name, one.rank, one.state, one.life.number, *told))
        return table(repr(self._cluster), rows, HEAD)

    def show(self) -> None:
        """Show it in the notebook's current cell, and keep it up to date."""
        self._stop.set()
        stop = self._stop = threading.Event()
        display: Any = importlib.import_module("IPython.display")
        shown = display.display(display.HTML(self.html()), display_id=True)

        def refresh() -> None:
            before = ""
            while True:
                ends = stop.wait(REFRESH_S)
                now = self.html()
                if now != before:
                    shown.update(display.HTML(now))
                if ends:
                    return
                before = now

        if shown is not None:
            threading.Thread(target=refresh, name="farcall-table", daemon=True).start()

    def close(self) -> None:
        """The cluster ends: the table stays as it is then."""
        self._stop.set()
