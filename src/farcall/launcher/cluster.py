"""The workers of one program, which calls, watches and ends them. `launch.py` makes a cluster.

A `Cluster` is the program's own membership (it is the member ``driver``), an engine that starts processes, and a
supervisor that watches them. The group has no fixed size, so workers come, go and are replaced. Workers have the ranks
from 0 on; the driver's is above all of theirs.

Owns the order of start and end:

    start    this program becomes a member -> the engine starts processes -> they join -> each is prepared -> it runs
    end      no restart any more -> workers are asked to end -> the engine ends the rest -> this program leaves
"""

from __future__ import annotations

import atexit
import dataclasses
import io
import logging
import os
import pickle
import secrets
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from time import monotonic
from typing import Any, Self, TypeVar
from urllib.parse import quote

from farcall import api
from farcall.errors import LaunchFailed, RpcError, UnknownWorker
from farcall.launcher.engine import Engine, WorkerSpec
from farcall.launcher.launch import check_number
from farcall.launcher.lives import Restarts, State
from farcall.launcher.output import Output, WorkerOutput
from farcall.launcher.parcel import Parcel
from farcall.launcher.supervisor import END_S, Supervised, Supervisor
from farcall.launcher.table import LiveTable
from farcall.launcher.worker import DRIVER, end_worker, is_ready
from farcall.options import RpcBackendOptions
from farcall.protocol.member import incarnation_text
from farcall.protocol.membership.events import LinkGivenUp
from farcall.rpc.handles import Worker
from farcall.rpc.mapping import map_over
from farcall.rpc.retry import Retry
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_wait
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime, current_runtime
from farcall.runtime.node.current import slot
from farcall.runtime.rendezvous.meeting_place import MEMORY_SCHEME
from farcall.serialize.allowance import INSTALLED, Table
from farcall.serialize.code import MAIN
from farcall.serialize.functions import forget_names

DRIVER_RANK = 1_000_000
"""Above the rank of every worker."""
FIRST_CALL_S = 30.0
_LOOK_S = 0.5
PATIENCE_S = 1.0
"""How long a start may take before a terminal shows how far it is."""

S = TypeVar("S")
T = TypeVar("T")


class Cluster:
    """Workers that this program started. `farcall.launch` makes it.

    Mutable: the numbers given out so far, and whether it has ended.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        restarts: Restarts,
        on_start: Callable[[Worker], object] | None,
        start_timeout_s: float,
        logs: str | None,
        shows: bool,
        ship: bool,
        directory: str,
        environment: dict[str, str],
        port: int,
        options: RpcBackendOptions,
    ) -> None:
        if "tcp" not in options.allowed_transports:
            raise LaunchFailed('workers connect to this program over TCP: add "tcp" to the transports in its options')
        has_table = options.allowed is not None or INSTALLED.allowance is not None
        if ship and has_table:
            raise LaunchFailed(
                "ship=True sends code, which farcall.allow forbids: install the code on the workers' hosts"
            )
        self._on_start = on_start
        self._start_timeout_s = start_timeout_s
        self._environment = environment
        self._directory = directory
        self._parcel = Parcel(directory) if ship else None
        given = options.secret
        self._secret = secrets.token_hex(32) if given is None else given if isinstance(given, str) else given.decode()
        self.logs: str | None = logs
        """The folder with the output of workers, if that is kept."""
        if shows and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # or this program's lines would come after those of workers
        self._output = WorkerOutput(Output(sys.stdout) if shows else None, logs)
        self._awaited: tuple[float, list[Supervised]] | None = None  # workers that a thread waits for, and since when
        self._telling = threading.Lock()  # guards that: no status may be shown once nobody waits
        self._numbers = count()
        self._ended = threading.Event()
        self._ending = threading.RLock()  # held by the thread that ends the cluster, or by its signal handler
        self._is_over = False
        self._process = os.getpid()
        common = options.replace(secret=self._secret, secret_file=None)
        if has_table and options.observing.secret is None:  # each would have one of its own
            observing = dataclasses.replace(options.observing, secret=secrets.token_hex(32))
            common = common.replace(observing=observing)
        advertise = options.advertise or engine.driver_host
        # Workers come by the driver's address, so no file is needed, which would stay behind after SIGTERM.
        mine = common.replace(init_method=f"{MEMORY_SCHEME}://", advertise=advertise, port=port or options.port)
        self._options = pickle.dumps(common)
        with ExitStack() as undone:
            api.init_rpc(DRIVER, rank=DRIVER_RANK, rpc_backend_options=mine)
            undone.callback(_leave)
            self._node: Runtime = current_runtime()
            # The supervisor tells of deaths: it knows how a process ended, and which ones it ended itself.
            self._node.member_changes.loss_level = logging.INFO
            self._meet = _meeting_url(self._node.addresses)
            self._allowed = _allowed_at_workers()
            MAIN.is_alone = True
            forget_names()
            self._supervisor = Supervisor(engine, self, restarts=restarts, start_timeout_s=start_timeout_s)
            self._table = LiveTable(self, self._supervisor, self._node)
            self._unsubscribe = self._node.member_events.subscribe(self._supervisor.on_member)
            undone.pop_all()
        atexit.register(self.shutdown, graceful=False)

    def __getitem__(self, worker: str | int) -> Worker:
        """A handle of a worker, by name or rank."""
        for one in self._supervisor.workers():
            if worker in (one.name, one.rank):
                return Worker(one.name, node=self._node)
        names = ", ".join(one.name for one in self._supervisor.workers())
        raise UnknownWorker(f"this cluster has no worker {worker!r}: its workers are {names}")

    @property
    def workers(self) -> list[Worker]:
        """Handles of all workers that run, or are expected to, by rank. They stay good over restarts."""
        return [Worker(one.name, node=self._node) for one in self._supervisor.workers() if not one.life.is_over]

    def __len__(self) -> int:
        return len(self.workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers)

    def states(self) -> dict[str, str]:
        """The state of each worker, by name: starting, preparing, running, backing off, dead or ended."""
        return {one.name: str(one.state) for one in self._supervisor.workers()}

    def map(
        self,
        func: Callable[[S], T],
        items: Iterable[S],
        *,
        in_flight: int = 4,
        ordered: bool = True,
        timeout: float | None = UNSET_TIMEOUT,
        retry: Retry | None = Retry(),  # noqa: B008 (a frozen value)
        progress: bool = False,
    ) -> Generator[T, None, None]:
        """``func(item)`` for each of ``items``, on all workers; yields the results. See `farcall.map`.

        Workers that come meanwhile take part. The items of one that died are done again on others, three times at
        most: ``func`` may run more than once for an item. ``retry=None``: the error is raised instead.
        """
        return map_over(
            _Roster(self._supervisor, self._node),
            func,
            items,
            in_flight=in_flight,
            ordered=ordered,
            timeout=timeout,
            retry=retry,
            progress=progress,
        )

    def grow(self, workers: int = 1, *, quorum: int | None = None) -> list[Worker]:
        """Start so many more workers, and return them when they answer, or ``quorum`` of them.

        If that fails, or is interrupted, all of the new ones are ended: the cluster is as it was.
        """
        check_number(workers, quorum)
        numbers = [next(self._numbers) for _ in range(workers)]
        added = self._supervisor.add([(f"worker{number}", number) for number in numbers])
        try:
            self._wait_for(added, quorum or len(added), self._start_timeout_s + FIRST_CALL_S)
        except BaseException:
            self._supervisor.remove([one.name for one in added])
            raise
        self._supervisor.stop_waiting(added)
        return [Worker(one.name, node=self._node) for one in added]

    def shrink(self, workers: Worker | str | int | Iterable[Worker | str | int]) -> None:
        """End these workers, and return when they are gone. Their calls under way fail."""
        chosen = [workers] if isinstance(workers, Worker | str | int) else workers
        names = [self[one.name if isinstance(one, Worker) else one].name for one in chosen]
        self._supervisor.remove(names)
        gone = [one for one in self._supervisor.workers() if one.name in names]
        if not self._supervisor.wait(lambda: not any(one.has_process for one in gone), FIRST_CALL_S):
            late = ", ".join(one.name for one in gone if one.has_process)
            raise RpcError(f"the engine did not end {late} within {FIRST_CALL_S:g} s")

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every worker runs, those that are being started or restarted included; raises if one is dead."""
        limit_s = check_wait(timeout)
        expected = [one for one in self._supervisor.workers() if one.state is not State.ENDED]
        self._wait_for(expected, len(expected), None if limit_s == NEVER else limit_s)

    def shutdown(self, graceful: bool = True) -> None:
        """End all workers and leave; a second time does nothing, unless the first was interrupted.

        ``graceful``: they may end by themselves first.
        """
        if os.getpid() != self._process:
            return  # a forked child has no workers
        with self._ending:
            if self._is_over:
                return
            self._ended.set()
            self._unsubscribe()
            try:
                self._supervisor.close(graceful)
                self._is_over = True
            finally:
                if slot.runtime is self._node:
                    _leave()
                self._output.close()
                self._table.close()
            atexit.unregister(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(graceful=kind is None)

    def __repr__(self) -> str:
        states = list(self.states().values())
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"<Cluster: {'ended' if self._ended.is_set() else counts}>"

    def _repr_html_(self) -> str:
        return self._table.html()

    def _ipython_display_(self) -> None:
        self._table.show()

    def _wait_for(self, workers: list[Supervised], quorum: int, timeout_s: float | None) -> None:
        """Return when ``quorum`` of ``workers`` run; raise when they cannot any more, or late."""

        def running() -> int:
            # The membership may know of a death that the supervisor has not handled yet.
            members = {member.name for member in self._node.workers()}
            return sum(one.state is State.RUNNING and one.name in members for one in workers)

        def is_settled() -> bool:
            return running() >= quorum or sum(not one.life.is_over for one in workers) < quorum

        self._awaited = (monotonic(), workers)
        try:
            in_time = self._supervisor.wait(is_settled, timeout_s)
            while not in_time and any(one.state is State.PREPARING for one in workers):
                # It joined in time. Sending its files has a bound of its own; the user's `on_start` may take longer.
                in_time = self._supervisor.wait(is_settled, _LOOK_S)
        finally:
            with self._telling, suppress(OSError, ValueError):  # a terminal that went away
                self._awaited = None
                self._output.show_status("")
        if running() >= quorum:
            return
        # The news of a death may come before the last lines of its output, which the error shows.
        self._supervisor.wait(lambda: not any(one.has_process for one in workers if one.life.is_over), END_S)
        missing = {one.name: one.account() for one in workers if one.state is not State.RUNNING}
        told = "\n".join(f"{name} {account}" for name, account in missing.items())
        late = "" if in_time else f" within {timeout_s:g} s"
        cause = next((one.error for one in workers if one.error is not None), None)
        raise LaunchFailed(
            f"{len(missing)} of {len(workers)} workers are not running{late}:\n{told}", missing
        ) from cause

    # As the `Crew` of the supervisor.

    def make_spec(self, name: str, rank: int, life: int) -> WorkerSpec:
        return WorkerSpec(
            name=name,
            rank=rank,
            life=life,
            secret=self._secret,
            meet=self._meet,
            environment=self._environment,
            directory=None if self._parcel is not None else self._directory,
            path=() if self._parcel is not None else tuple(sys.path),
            start_timeout_s=self._start_timeout_s,
            options=self._options,
            allowed=self._allowed,
        )

    def prepare(self, name: str) -> None:
        worker = Worker(name, node=self._node)
        worker.options(timeout=FIRST_CALL_S).call(is_ready)
        if self._parcel is not None:
            self._parcel.send(worker)
        if self._on_start is not None:
            self._on_start(worker)

    def bury(self, incarnation: str) -> None:
        # Members find out by themselves as a rule; but not where its host answers and does not let them reach its port.
        watch = self._node.links.peers.watch
        for member in watch.members():
            if incarnation_text(member.incarnation) == incarnation:
                verdict = LinkGivenUp(member.incarnation, "its process was ended, and is replaced")
                self._node.call_soon(partial(watch.feed, verdict))

    def dismiss(self, name: str) -> None:
        try:
            Worker(name, node=self._node, timeout=FIRST_CALL_S).start(end_worker)
        except RpcError:
            pass  # it is gone

    def show(self, spec: WorkerSpec, data: bytes) -> None:
        if data:
            self._output.write(spec, spec.name, spec.rank, data)
        else:
            self._output.end(spec)

    def tick(self) -> None:
        self._output.show_unfinished()
        with self._telling:
            if self._awaited is not None and monotonic() > self._awaited[0] + PATIENCE_S:
                self._output.show_status(status_of(self._awaited[1]))


class _Roster:
    """The workers of a cluster that run now, for `map`."""

    look_s: float | None = _LOOK_S

    def __init__(self, supervisor: Supervisor, node: Runtime) -> None:
        self._supervisor = supervisor
        self._node = node

    def now(self) -> dict[Any, Worker]:
        running = (one for one in self._supervisor.workers() if one.state is State.RUNNING)
        return {(one.name, one.life.number): Worker(one.name, node=self._node) for one in running}

    def wait(self) -> bool:
        self._supervisor.wait(lambda: False, _LOOK_S)
        return any(not one.life.is_over for one in self._supervisor.workers())


def _meeting_url(addresses: Iterable[str]) -> str:
    """Where workers find the driver: its port, and its unix socket for those on this host."""
    found = list(addresses)
    ports = [one.removeprefix("tcp://") for one in found if one.startswith("tcp://")]
    paths = [quote(one.removeprefix("unix:")) for one in found if one.startswith("unix:")]
    return f"farcall://{','.join(ports)}" + "".join(f"?unix={path}" for path in paths[:1])


def _allowed_at_workers() -> Table | None:
    """The table of `farcall.allow`, for workers, which must allow the same; they cannot import ``__main__``."""
    if INSTALLED.allowance is None:
        return None
    table = INSTALLED.allowance.table()
    own = [name for name in table["functions"] if name.startswith("__main__:")]
    if own:
        raise LaunchFailed(
            f"farcall.allow names {', '.join(own)}, which workers cannot import: define it in a "
            "module, since farcall.allow forbids sending code"
        )
    return table


def _leave() -> None:
    """Leave the cluster; functions of ``__main__`` are no longer sent as code."""
    api.shutdown(graceful=False)
    MAIN.is_alone = False
    forget_names()


def status_of(workers: list[Supervised]) -> str:
    """A bar of the workers that run, and the progress of the first that does not."""
    running = sum(one.state is State.RUNNING for one in workers)
    done = 20 * running // len(workers)
    late = next((one for one in workers if one.state is not State.RUNNING), None)
    about = f"; {late.name}: {late.progress}" if late else ""
    return f"[{'#' * done}{'.' * (20 - done)}] {running} of {len(workers)} workers run{about}"
