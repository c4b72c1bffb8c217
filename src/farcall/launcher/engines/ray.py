"""Workers by Ray: a placement group reserves the resources, and an actor in each bundle is the shell of one worker.

The worker is a process of its own below the actor: no code of farcall runs inside Ray, and none of Ray in the worker.
The actor starts it, passes its output on and tells its end.

    the secret              an argument of the actor's constructor, over Ray's connections (TLS: ``RAY_USE_TLS``);
                            then standard input of the worker
    the driver dies         Ray ends its job, and the actors with it; each held its worker's lifeline
    a node dies             Ray tells the actor's end; the lost bundle gets another node, if there is one
    an actor is killed      its worker ends with it

Thread rules
- One thread at a time calls ``start`` and ``end``; another one ``close``, if ``start`` hangs.
- One thread waits for Ray's answers, and it alone tells the watchers. The lock guards the tables.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Any, NamedTuple

from farcall.launcher.engine import EngineError, ProcessState, Watcher, WorkerSpec

LOOK_S = 0.2
"""How soon the thread that waits notices new workers."""
NEWS_S = 10.0
"""How long an actor waits for news of its worker before it answers that there are none."""
CLOSE_S = 20.0
_STRAY_OUTPUT_S = 2.0
_CHUNK_BYTES = 1 << 16
_CHUNKS = 64
_END = b""


@dataclass(eq=False)
class _Group:
    """Workers that were started together: one placement group."""

    placement: Any
    ready: Any
    """Ray's promise that it is there; None: it is."""
    bundles: dict[int, int]
    """The bundle of each rank."""


@dataclass(eq=False)
class _Life:
    """One life of a worker: it waits for its group, or has an actor and a question to it under way."""

    spec: WorkerSpec
    watcher: Watcher
    group: _Group
    actor: Any = None
    news: Any = None
    heard: int = 0
    """The number of the last news."""
    ended: bool = False
    """Was its end asked for?"""


class RayEngine:
    """An actor for each worker, in a Ray cluster that runs already.

    Args:
        resources: those of each worker, under Ray's names: ``{"GPU": 1}``; 1 CPU unless given.
        strategy: how bundles are spread over nodes: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"``, ``"STRICT_SPREAD"``.
        address: of the cluster; None: ``RAY_ADDRESS``, or the cluster that this machine belongs to.
    """

    driver_host: str | None = None

    def __init__(
        self, *, resources: Mapping[str, float] | None = None, strategy: str = "PACK", address: str | None = None
    ) -> None:
        try:
            import ray
        except ModuleNotFoundError as missing:
            raise EngineError('on="ray" needs Ray in this environment: pip install ray') from missing
        self._ray: Any = ray
        self._resources = {"CPU": 1, **(resources or {})}
        self._strategy = strategy
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                ray.init(address=address or os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
            except (ConnectionError, RuntimeError) as error:
                raise EngineError(f"no Ray cluster answers: {error}. Start one with `ray start --head`") from error
        self._lock = threading.Lock()
        self._groups: list[_Group] = []
        self._lives: dict[WorkerSpec, _Life] = {}
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        if self._closing:
            raise EngineError("this engine was closed; make a new one")
        fresh = [spec.rank for spec in specs if not any(spec.rank in group.bundles for group in self._groups)]
        if fresh:
            placement = self._ray.util.placement_group([self._resources] * len(fresh), strategy=self._strategy)
            bundles = {rank: number for number, rank in enumerate(sorted(fresh))}
            self._groups.append(_Group(placement, placement.ready(), bundles))
        words = ", ".join(f"{amount:g} {name}" for name, amount in self._resources.items())
        for spec in specs:
            group = next(group for group in self._groups if spec.rank in group.bundles)
            watcher.on_state(spec, ProcessState("queued", f"waiting for Ray to have {words} ({self._strategy})"))
            with self._lock:
                self._lives[spec] = _Life(spec, watcher, group, ended=self._closing)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="farcall-ray", daemon=True)
            self._thread.start()

    def end(self, specs: Sequence[WorkerSpec]) -> None:
        with self._lock:
            for spec in specs:
                life = self._lives.get(spec)
                if life is not None:
                    life.ended = True
                    if life.actor is not None:
                        self._ray.kill(life.actor)

    def close(self) -> None:
        with self._lock:
            self._closing = True  # workers that are started from now on end at once
            left = list(self._lives)
        self.end(left)
        try:
            if self._thread is not None:
                self._thread.join(CLOSE_S)
                if self._thread.is_alive():
                    names = ", ".join(spec.name for spec in self._lives)
                    raise EngineError(f"Ray did not end these within {CLOSE_S:.0f} s: {names}")
                self._thread = None
        finally:  # Ray ends the rest of them with their placement group, or their job
            while self._groups:
                self._ray.util.remove_placement_group(self._groups.pop().placement)
            if self._is_ours:
                self._ray.shutdown()

    def _watch(self) -> None:
        """The thread: make actors where a group is ready, ask each for news, pass them on."""
        while True:
            with self._lock:
                lives = list(self._lives.values())
            if self._closing and not lives:
                return
            for life in lives:
                if life.actor is None and life.ended:
                    self._tell_end(life, ProcessState("ended", "before it was started"))
            waiting = {group.ready: group for group in self._groups if group.ready is not None}
            asked = {life.news: life for life in lives if life.news is not None}
            refs = [*waiting, *asked]
            if not refs:
                sleep(LOOK_S)
            for ref in self._ray.wait(refs, timeout=LOOK_S)[0] if refs else ():
                if ref in waiting:
                    waiting[ref].ready = None
                else:
                    self._hear(asked[ref], ref)
            for life in lives:
                if life.actor is None and life.group.ready is None:
                    self._make_actor(life)

    def _make_actor(self, life: _Life) -> None:
        with self._lock:
            if life.ended:
                return
            spec, needed = life.spec, dict(self._resources)
            scheduling = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                life.group.placement, placement_group_bundle_index=life.group.bundles[spec.rank]
            )
            options = {"num_cpus": needed.pop("CPU"), "num_gpus": needed.pop("GPU", 0), "resources": needed}
            actor = self._ray.remote(_Shell).options(
                **options, scheduling_strategy=scheduling, max_restarts=0, max_concurrency=1
            )
            life.actor = actor.remote(spec.encode(), spec.command[1:])
            life.news = life.actor.news.remote(life.heard)
        life.watcher.on_state(spec, ProcessState("starting", "Ray starts an actor for it"))

    def _hear(self, life: _Life, ref: Any) -> None:
        try:
            news: _News = self._ray.get(ref)
        except self._ray.exceptions.ActorUnavailableError:
            # A connection broke. Either the actor lives, and answers the same again, or Ray finds out that it died.
            sleep(LOOK_S)
            life.news = life.actor.news.remote(life.heard)
            return
        except self._ray.exceptions.RayError as error:
            self._tell_end(life, ProcessState("ended", "" if life.ended else _last_line(error)))
            return
        if life.heard == 0:
            life.watcher.on_state(life.spec, ProcessState("running", news.place))
        life.heard = news.number
        if news.output:
            life.watcher.on_output(life.spec, news.output)
        if news.exit_code is not None:
            self._ray.kill(life.actor)
            self._tell_end(life, ProcessState("ended", "", news.exit_code))
            return
        life.news = life.actor.news.remote(life.heard)

    def _tell_end(self, life: _Life, state: ProcessState) -> None:
        with self._lock:
            del self._lives[life.spec]
        life.watcher.on_state(life.spec, state)


def _last_line(error: Exception) -> str:
    """The cause, which comes last in Ray's texts."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class _News(NamedTuple):
    """An actor's answer about its worker. A repeated question gets the same answer: the first may have been lost."""

    number: int
    output: bytes
    exit_code: int | None
    place: str


class _Shell:
    """The actor: one worker, its lifeline and its output. Made at a node of Ray's."""

    def __init__(self, spec: bytes, arguments: Sequence[str]) -> None:
        import ray

        self._output: queue.Queue[bytes] = queue.Queue(_CHUNKS)
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
        node = ray.get_runtime_context().get_node_id()
        self._last = _News(0, b"", None, f"Ray's node {node} on {os.uname().nodename}")
        reading = threading.Thread(target=self._read, daemon=True)
        reading.start()
        threading.Thread(target=self._reap, args=(reading,), daemon=True).start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(spec + b"\n")  # and stays open: it is the worker's lifeline
        except BrokenPipeError:
            pass  # the worker ended at once, and its output says why

    def news(self, heard: int) -> _News:
        """The worker's output since the news of this number; its exit code once it has ended and all was told."""
        if heard == self._last.number:
            found = []
            try:
                # The first news only say that it runs, at once.
                found = [self._output.get(timeout=NEWS_S)] if heard else []
                while not self._output.empty():
                    found.append(self._output.get())
            except queue.Empty:
                pass
            is_over = _END in found[-1:]
            exit_code = self._process.wait() if is_over else None
            self._last = _News(heard + 1, b"".join(found), exit_code, self._last.place)
        return self._last

    def _read(self) -> None:
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), _CHUNK_BYTES):
            self._output.put(data)

    def _reap(self, reading: threading.Thread) -> None:
        """When the worker has ended, kill its children while its number is still its own."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        reading.join(_STRAY_OUTPUT_S)  # a daemon of its own may hold its output
        self._output.put(_END)
