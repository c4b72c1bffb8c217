"""Regular looks at a cluster, for the page: the thread that asks, and the latest state.

Owns the connection to the cluster, the rhythm and the history. One thread looks; threads of the web server read the
state, which is replaced as a whole. While no browser has the page open, the thread looks seldom, to have a history to
show. Looking takes at most a third of its time, however large the cluster is.

    state        event                        then
    unconnected  connected                    connected: looks
    unconnected  failed                       unconnected: says why, tries again in a second
    connected    a question failed            unconnected: perhaps another member answers
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from msgspec.structs import asdict

from farcall.errors import RpcError
from farcall.observe.dashboard import digest
from farcall.observe.metrics import Metrics
from farcall.observe.observer import Observer
from farcall.observe.rates import cluster_title, pairs_of_looks, rows
from farcall.observe.snapshot import WorkerSnapshot
from farcall.observe.troubles import find_troubles, still_threads
from farcall.transport.interface import TransportError

logger: logging.Logger = logging.getLogger("farcall")

EVERY_S: Final = 1.0
SELDOM_S: Final = 10.0
WATCHED_S: Final = 30.0
"""The page is open if it has asked within this time."""
RETRY_S: Final = 1.0
MATRIX_S: Final = 10.0
"""Rates of pairs are of this time: of many workers, few call each other in one second."""
MOST_POINTS: Final = 600
STOP_S: Final = 5.0


class Looks:
    """The latest state of a cluster, and its history."""

    def __init__(self, connect: Callable[[], Observer]) -> None:
        """``connect`` runs on the thread that looks, whenever there is no connection."""
        self._connect = connect
        self._observer: Observer | None = None
        self._stopping = threading.Event()
        self._asked = threading.Event()
        self._asked_at = monotonic()
        self._before: list[Metrics] = []
        self._recent: deque[tuple[float, list[Metrics]]] = deque()
        self._snapshots: list[WorkerSnapshot] = []
        self._points: deque[dict[str, Any]] = deque(maxlen=MOST_POINTS)
        self._number = 0
        self._state: dict[str, Any] = {"error": "it has not been looked at yet", "workers": []}
        self._metrics: list[Metrics] = []
        self._thread = threading.Thread(target=self._run, name="farcall-dashboard", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the looks. From any thread but the one that looks."""
        self._stopping.set()
        self._asked.set()
        observer = self._observer
        if observer is not None:
            observer.interrupt()
        self._thread.join(STOP_S)

    # ------------------------------------------------------------------ for the web server

    def state(self, since: int) -> dict[str, Any]:
        """The latest state, and the points of time after number ``since``."""
        self._asked_at = monotonic()
        self._asked.set()
        points = [point for point in list(self._points) if point["number"] > since]
        return {**self._state, "now": time.time(), "points": points}

    def functions_between(self, caller: str, callee: str) -> list[dict[str, Any]]:
        """The functions that one worker calls on another."""
        return digest.functions_between(self._metrics, caller, callee, self._snapshots)

    # ------------------------------------------------------------------ the thread that looks

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = monotonic()
            try:
                if self._observer is None:
                    self._observer = self._connect()
                    self._before = []
                    self._recent.clear()
                self._look(self._observer)
                pause_s = max(EVERY_S, 3 * (monotonic() - began)) - (monotonic() - began)
            except (RpcError, TransportError, ValueError) as error:
                logger.debug("the dashboard cannot reach the cluster: %s", error)
                self._state = {**self._state, "error": str(error)}
                self._disconnect()
                pause_s = RETRY_S
            self._pause(pause_s)
        self._disconnect()

    def _disconnect(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.close()

    def _pause(self, pause_s: float) -> None:
        """Wait until the next look is due, or somebody opens the page after a while."""
        if self._stopping.wait(pause_s) or monotonic() - self._asked_at < WATCHED_S:
            return
        self._asked.clear()
        if not self._stopping.is_set():
            self._asked.wait(SELDOM_S - pause_s)

    def _look(self, observer: Observer) -> None:
        heard = observer.metrics()
        snapshots = observer.snapshots()
        happened = observer.events()
        before, self._before = self._before, heard.answers
        still = still_threads(self._snapshots, snapshots.answers)
        self._snapshots = snapshots.answers
        self._metrics = heard.answers
        self._number += 1
        found = rows(before, heard.answers)
        sent = digest.channels(before, heard.answers)
        seconds = max((seconds for _, _, seconds in pairs_of_looks(before, heard.answers)), default=1e-3)
        if before:  # a first look has nothing to compare with
            self._points.append({"number": self._number, **digest.point(time.time(), found, sent)})
        self._state = {
            "error": "",
            "cluster": cluster_title(heard.cluster_id, heard.answers),
            "number": self._number,
            "looked_at": time.time(),
            "workers": digest.workers(found, heard.silent),
            "pairs": digest.pairs(self._some_time_ago(heard.answers), heard.answers, snapshots.answers),
            "functions": digest.functions(before, heard.answers, seconds, snapshots.answers),
            "channels": sent,
            "weights": digest.weights(before, heard.answers),
            "waiting": digest.waiting(snapshots.answers),
            "troubles": [asdict(trouble) for trouble in find_troubles(snapshots.answers, still)],
            "events": digest.events(happened.answers),
        }

    def _some_time_ago(self, now: list[Metrics]) -> list[Metrics]:
        """The look of MATRIX_S ago, or the first one since; of the first look itself, nothing."""
        at = monotonic()
        while len(self._recent) > 1 and at - self._recent[1][0] >= MATRIX_S:
            self._recent.popleft()
        then = self._recent[0][1] if self._recent else []
        self._recent.append((at, now))
        return then
