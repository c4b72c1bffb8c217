"""A cluster of any size that exists in numbers only, as an `Observer` sees it; and what a browser says to a server."""

from __future__ import annotations

import random
import time
from bisect import bisect_right

from farcall.observe.answering import WorkerEvents
from farcall.observe.metrics import CallMetrics, ChannelMetrics, Histogram, Metrics
from farcall.observe.observer import Answers
from farcall.observe.snapshot import OutgoingCall, PoolView, ServedCall, StackLine, ThreadView, WorkerSnapshot
from farcall.protocol.observing import WorkerState
from farcall.runtime.observing.counters import BOUNDS_S
from farcall.runtime.observing.event_log import LoggedEvent

FUNCTIONS = ("forward", "backward_step", "ParameterServer.fetch_parameters", "heartbeat")
STACK = [StackLine("/home/me/train.py", 57, "step"), StackLine("/home/me/train.py", 112, "main")]


class SimulatedObserver:
    """Workers ``w0``, ``w1`` ...; every third calls all others, the rest a few. The last is gone, one is silent."""

    member = "trainer000"

    def __init__(self, size: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._started_at = time.monotonic() - 4000.0
        self.names = [f"trainer{rank:03d}" for rank in range(size)]
        self._calls: dict[tuple[int, int, str], tuple[dict[int, int], int]] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        self._silent = [WorkerState(self.names[-1], size - 1, "the peer closed the connection")]
        self._silent += [WorkerState(self.names[-2], size - 2)]
        self._pairs = self._choose_pairs(size - 2)

    def _choose_pairs(self, size: int) -> dict[tuple[int, int], float]:
        pairs: dict[tuple[int, int], float] = {}
        for caller in range(size):
            called = range(size) if caller % 3 == 0 else self._random.sample(range(size), min(size, 6))
            for callee in called:
                pairs[caller, callee] = self._random.lognormvariate(3.0, 1.5)
        return pairs

    def _go_on(self) -> None:
        wave = 1.0 + 0.5 * random.Random(int(time.monotonic())).random()
        for (caller, callee), rate in self._pairs.items():
            function = FUNCTIONS[(caller + callee) % len(FUNCTIONS)]
            buckets, failed = self._calls.get((caller, callee, function), ({}, 0))
            buckets = dict(buckets)
            for _ in range(3):
                bucket = bisect_right(BOUNDS_S, self._random.lognormvariate(-8.0 + callee % 5, 0.8))
                buckets[bucket] = buckets.get(bucket, 0) + max(1, int(rate * wave / 3))
            failed += self._random.random() < 0.002
            self._calls[caller, callee, function] = (buckets, failed)
            self._bytes[caller, callee] = self._bytes.get((caller, callee), 0) + int(rate * 4096 * wave)

    def metrics(self) -> Answers[Metrics]:
        self._go_on()
        called: dict[int, list[CallMetrics]] = {}
        served: dict[int, list[CallMetrics]] = {}
        channels: dict[int, list[ChannelMetrics]] = {}
        for (caller, callee, function), (buckets, failed) in self._calls.items():
            latency = Histogram(buckets)
            called.setdefault(caller, []).append(CallMetrics(self.names[callee], function, latency, failed, 0, 0))
            served.setdefault(callee, []).append(CallMetrics(self.names[caller], function, latency, failed, 0, 0))
        for (caller, callee), count in self._bytes.items():
            kind = "unix" if caller // 8 == callee // 8 else "tcp"
            channels.setdefault(caller, []).append(ChannelMetrics(self.names[callee], kind, count, count // 2))
            if kind == "unix":
                shared = ChannelMetrics(self.names[callee], "shared memory", 6 * count, count)
                channels[caller].append(shared)
        answers = [
            Metrics(
                worker=name,
                rank=rank,
                process_id=1000 + rank,
                host=f"node{rank // 8:02d}",
                state="running",
                taken_at=time.time(),
                up_s=time.monotonic() - self._started_at,
                called=called.get(rank, []),
                served=served.get(rank, []),
                channels=channels.get(rank, []),
                calls_in_flight=self._random.randrange(12),
                served_in_flight=self._random.randrange(12),
                pool=PoolView(16, 16, 16 if rank == 3 else self._random.randrange(16), 0, 40 * (rank == 3)),
                owned_references=self._random.randrange(400),
                used_references=self._random.randrange(400),
                contexts=rank % 3,
                interruptions=0,
                reconnects=int(rank % 11 == 0),
                frames_sent_again=0,
                links_joined=0,
                links_parted=0,
                peers_lost=0,
                members={},
                cpu_s=(0.1 + 0.2 * (rank % 7)) * (time.monotonic() - self._started_at),
                memory_bytes=(200 + 37 * (rank % 11)) << 20,
                cluster_name="night run",
            )
            for rank, name in enumerate(self.names[:-2])
        ]
        return Answers("4f0c2b9d", answers, self._silent)

    def snapshots(self) -> Answers[WorkerSnapshot]:
        answers = []
        for rank, name in enumerate(self.names[:-2]):
            moving = self._random.randrange(1 << 40)
            thread = ThreadView(7, f"farcall-worker-{name}", 1.0, rank, STACK)
            to = (rank + 1) % (len(self.names) - 2)
            caller = (rank - 1) % (len(self.names) - 2)
            calls = [OutgoingCall(rank, self.names[to], FUNCTIONS[rank % 4], 0.01 * 1.1**rank % 40, 60.0, 7)]
            served = [ServedCall(caller, self.names[caller], FUNCTIONS[caller % 4], "running", 0.2, 8)]
            pool = PoolView(16, 16, 4, 1, 0)
            threads = [thread, ThreadView(8, "farcall-worker", 1.0, moving, STACK[::-1])]
            answers.append(WorkerSnapshot(name, rank, 1000 + rank, "node00", "running", pool, calls, served, threads))
        return Answers("4f0c2b9d", answers, self._silent)

    def events(self) -> Answers[WorkerEvents]:
        now = time.time()
        first, last = self.names[0], self.names[-1]
        happened = [
            LoggedEvent(now - 300, "joined", self.names[1]),
            LoggedEvent(now - 120, "interrupted", self.names[2], text="connection reset by peer"),
            LoggedEvent(now - 119, "reconnected", self.names[2]),
            LoggedEvent(now - 60, "unresponsive", last),
            LoggedEvent(now - 57, "dead", last, text="nobody has heard of it for 5 s"),
            LoggedEvent(now - 20, "failed", self.names[3], "forward", "ValueError: <b>bad batch</b> & more", 17),
            LoggedEvent(now - 4, "timed out", self.names[4], "ParameterServer.fetch_parameters", "after 30 s"),
        ]
        return Answers("4f0c2b9d", [WorkerEvents(first, happened)], self._silent)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass
