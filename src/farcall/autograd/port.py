"""The runtime as distributed autograd sees it: letters over links, work on the executor, waits that read.

A letter is one frame of its own kind. It is never answered, and nothing on its way waits for a thread that runs user
functions: the thread that reads it hands it to the contexts.

Graphs run on workers of the executor, or on the thread that called `backward`. Where the last part of a pass that a
peer's letter set off was quick, the next one is run by the I/O thread itself, as quick functions are
(`runtime/io/reader.py`): if it is slow after all, another thread takes the role over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter

from farcall.autograd.gradient_messages import encode_letters
from farcall.autograd.passes import Letter, Task
from farcall.errors import Delivery, PeerDead
from farcall.ids import WorkerInfo
from farcall.protocol.notes import ProfileWanted
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Node
from farcall.runtime.observing.profiling import PROFILING, CallProfile, RunProfile
from farcall.runtime.peers.peer import Peer
from farcall.serialize import withdraw

__all__ = ["NodePort"]

QUICK_S = 1e-3
"""A part of a pass that took less than this is expected to be as quick the next time."""


def origin_of(peer: Peer) -> int:
    """What the ids of a worker's contexts begin with: its rank, then 16 bits that tell incarnations apart.

    Two incarnations that share an origin by chance begin to count at different numbers.
    """
    rank = peer.info.id
    if peer.number == rank:
        return rank << 16  # in a group of fixed size, where a rank is never given away again
    return (rank & 0x7FFF) << 16 | (peer.incarnation & 0xFFFF)


class NodePort:
    """A `Port` over a node."""

    __slots__ = ("_gone", "_node", "_quick", "_reading")

    def __init__(self, node: Node) -> None:
        self._node = node
        self._quick: dict[int, bool] = {}  # by the worker whose letter set a graph off
        self._reading = _Reading()
        self._gone: dict[int, WorkerInfo] = {}

    @property
    def worker_id(self) -> int:
        return self._node.me.number

    @property
    def origin(self) -> int:
        return origin_of(self._node.me)

    def knows(self, peer: Peer) -> bool:
        return self._node.is_peer(peer)

    def workers(self) -> frozenset[int]:
        return frozenset(self._node.members())

    def info(self, worker_id: int) -> WorkerInfo | None:
        peer = self._node.numbered(worker_id)
        return self._gone.get(worker_id) if peer is None else peer.info

    def peer_gone(self, peer: Peer) -> None:
        """Nobody can be asked for its name any more."""
        self._gone[peer.number] = peer.info

    def send(self, worker_id: int, letters: Sequence[Letter]) -> None:
        node = self._node
        peer = node.numbered(worker_id)
        if peer is None:
            gone = self._gone.get(worker_id)
            raise PeerDead(f"{gone.name if gone else 'that worker'} is gone", Delivery.NOT_SENT, gone)
        frame = encode_letters(letters, peer)
        # Bounded: a peer that takes no bytes must fail the pass and not hang it.
        deadline = monotonic() + node.timeout_s if node.timeout_s else NEVER
        try:
            peer.send(frame, deadline)
        except BaseException:
            withdraw(frame)
            raise

    def submit(self, task: Task) -> None:
        tasks = self._reading.tasks
        if tasks is not None:
            tasks.append(task)
        else:
            self._node.executor.submit(_Work(self, -1, task))

    def take_letter(self, peer: Peer, deliver: Callable[[], None]) -> None:
        """Have a letter of ``peer`` delivered, on the thread that reads it, then see to what it set off."""
        tasks: list[Task] = []
        self._reading.tasks = tasks
        try:
            self.in_order(deliver)
        finally:
            self._reading.tasks = None
            sender = peer.number
            for task in tasks:
                work = _Work(self, sender, task)
                kept = peer.run_inline(work) if self._quick.get(sender) and task is tasks[-1] else None
                if kept is None:
                    self._node.executor.submit(work)
                elif not kept:
                    self._quick[sender] = False

    def in_order(self, work: Task) -> None:
        """Run ``work``; in a node with devices, on the streams that all work of autograd is on."""
        devices = self._node.devices
        if devices is None:
            work()
        else:
            devices.on_default_streams(work)

    def ran(self, sender: int, took_s: float) -> None:
        """A part of a pass was run; ``sender``'s letter had set it off."""
        self._quick[sender] = took_s < QUICK_S

    def take(self, tasks: SimpleQueue[Task], timeout_s: float | None, workers: frozenset[int]) -> Task:
        try:
            return tasks.get_nowait()
        except Empty:
            pass
        node = self._node
        with node.calls.waiting():
            others = workers - {self.worker_id}
            if len(others) == 1:
                # All that is to come comes over one link: reading it here saves a hop between threads.
                deadline = NEVER if timeout_s is None else monotonic() + timeout_s
                (worker_id,) = others
                peer = node.numbered(worker_id)
                if peer is not None:
                    peer.help_until(_Filled(tasks), deadline)
                if timeout_s is not None:
                    timeout_s = max(0.0, deadline - monotonic())
            return tasks.get(timeout=timeout_s)

    def now(self) -> float:
        return monotonic()

    def pass_ended(self) -> None:
        self._node.something_ended()

    def profile_call(self, worker_id: int, run: RunProfile | None) -> CallProfile | None:
        node = self._node
        peer = node.numbered(worker_id)
        # Of one that is gone there is nothing to record; the letter to it fails the pass.
        return None if peer is None else PROFILING.begin_call(node, peer, "backward", None, run)

    def profile_run(self, wanted: ProfileWanted | None) -> RunProfile | None:
        return PROFILING.begin_run(self._node.info, wanted)


class _Filled:
    """What the waiting thread waits for."""

    __slots__ = ("_tasks",)

    def __init__(self, tasks: SimpleQueue[Task]) -> None:
        self._tasks = tasks

    @property
    def arrived(self) -> bool:
        return not self._tasks.empty()


class _Reading(threading.local):
    """What the letter being delivered by this thread has set off."""

    tasks: list[Task] | None = None


class _Work:
    """A worker's part of a graph, as a task of the executor."""

    __slots__ = ("_port", "_sender", "_task")

    quick = False

    def __init__(self, port: NodePort, sender: int, task: Task) -> None:
        self._port = port
        self._sender = sender
        self._task = task

    def run(self, more: bool) -> None:
        started = perf_counter()
        self._port.in_order(self._task)
        self._port.ran(self._sender, perf_counter() - started)

    def drop(self) -> None:
        pass  # the node has ended, and every context with it
