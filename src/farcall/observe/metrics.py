"""`Metrics`: a worker's work so far in numbers, and how they are read from a node.

Calls only increment counters (`runtime/observing/counters.py`), and links their byte counts; everything else is
computed when someone asks. Knows nothing of how metrics are shown or sent.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterable
from operator import add
from pathlib import Path

import msgspec

from farcall.autograd.recorder import Recorder
from farcall.html import table
from farcall.observe.snapshot import PoolView, function_title, pool_view, queued_calls
from farcall.rpc.batches import Batches
from farcall.rpc.node_streams import Streams
from farcall.rpc.references import NodeReferences
from farcall.runtime.membership.events import MEMBER_EVENTS
from farcall.runtime.node import Runtime
from farcall.runtime.observing.counters import BOUNDS_S, FAILED, LOST, OTHERS, TIMED_OUT, FunctionCounters
from farcall.runtime.observing.event_log import INTERRUPTED, RECONNECTED
from farcall.runtime.peers.peer import RemotePeer
from farcall.weights.node import Weights
from farcall.weights.version import WeightsMetrics


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """Durations, counted in buckets that grow by 19 % each, from 1 us to 18 minutes.

    Its results are accurate to the width of a bucket.
    """

    buckets: dict[int, int]
    """The count of each bucket that is not empty; bucket ``i`` ends at ``1 us * 2 ** (i / 4)``."""

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self.buckets.values())

    @property
    def total_s(self) -> float:
        """The sum of the durations, approximately."""
        return sum(_middle_s(bucket) * count for bucket, count in self.buckets.items())

    def percentile(self, percent: float) -> float:
        """The duration, in seconds, that ``percent`` of them did not exceed; 0 for an empty histogram."""
        left = self.count * percent / 100
        for bucket, count in sorted(self.buckets.items()):
            left -= count
            if left <= 0:
                return _middle_s(bucket)
        return 0.0

    def __sub__(self, earlier: Histogram) -> Histogram:
        """The durations since ``earlier``, an older copy of this histogram."""
        return Histogram(dict(Counter(self.buckets) - Counter(earlier.buckets)))

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(dict(Counter(self.buckets) + Counter(other.buckets)))


class CallMetrics(msgspec.Struct, frozen=True, array_like=True):
    """Calls of one function to, or from, one peer."""

    peer: str
    function: str
    latency: Histogram
    """Of calls made: from call to answer. Of calls served: the function's run time, without the wait for a thread."""
    failed: int
    """The function raised."""
    timed_out: int
    lost: int
    """The peer was lost, or this node ended, before the answer came."""


class ChannelMetrics(msgspec.Struct, frozen=True, array_like=True):
    """Bytes exchanged with one peer over one channel."""

    peer: str
    channel: str
    """"unix" or "tcp"; "shared memory" or "device memory" for bytes passed by reference through such memory."""
    sent_bytes: int
    received_bytes: int


class BatchMetrics(msgspec.Struct, frozen=True, array_like=True):
    """Runs of one function that `farcall.batched` decorates."""

    function: str
    runs: int
    items: int
    """The arguments of all runs together: ``items / runs`` is the mean size of a batch."""
    largest: int
    waited_s: float
    """The sum of all items' waits for their batch to begin."""


class StreamMetrics(msgspec.Struct, frozen=True, array_like=True):
    """The streams of one worker, in both directions."""

    open: int = 0
    items_read: int = 0
    items_written: int = 0


class DeviceMemory(msgspec.Struct, frozen=True, array_like=True):
    """Device memory reserved for sending, see `docs/gpu.md`."""

    total_bytes: int = 0
    lent_bytes: int = 0
    """The part of it in blocks that peers have not returned yet."""
    idle_bytes: int = 0
    """The part of it in free blocks; the rest was never used, or is quarantined after a peer's death."""
    weights_bytes: int = 0
    """Device memory for versions of weights, not included above."""


class Metrics(msgspec.Struct, frozen=True, array_like=True):
    """One worker's work since its start, and its present state."""

    worker: str
    rank: int
    process_id: int
    host: str
    state: str
    taken_at: float
    """Seconds since the epoch."""
    up_s: float
    called: list[CallMetrics]
    """Calls made by this worker."""
    served: list[CallMetrics]
    """Calls that other workers, or this worker itself, made to this worker."""
    channels: list[ChannelMetrics]
    calls_in_flight: int
    """Calls made and not answered yet."""
    served_in_flight: int
    """Calls received and not answered yet."""
    pool: PoolView
    """The threads that run functions; its ``queued`` counts the calls that wait for one."""
    owned_references: int
    """Values of this worker to which references exist anywhere."""
    used_references: int
    """References held here to values of other workers."""
    contexts: int
    """Distributed autograd contexts alive here."""
    interruptions: int
    """Connections to live members that broke, as far as this end noticed before the peer reconnected."""
    reconnects: int
    """Connections re-established."""
    frames_sent_again: int
    """Messages retransmitted after a reconnect, because they may have been lost."""
    links_joined: int
    """Connections made on demand, to send something to a member without a standing connection."""
    links_parted: int
    """Connections closed because they were idle for long."""
    peers_lost: int
    """Members whose link is gone for ever although they did not announce their departure."""
    members: dict[str, int]
    """How often members have joined, left, become unresponsive, recovered, or been declared dead."""
    device_memory: DeviceMemory = DeviceMemory()
    unresponsive: dict[str, float] = {}
    """Members that answer nobody but are not declared dead, and for how many seconds."""
    batches: list[BatchMetrics] = []
    streams: StreamMetrics = StreamMetrics()
    weights: list[WeightsMetrics] = []
    weights_bytes: int = 0
    """Memory for versions of weights that this worker owns, even if only other workers read them."""
    cpu_s: float = 0.0
    """Processor time of the process, over all threads."""
    memory_bytes: int = 0
    """Resident memory of the process, shared memory included; 0: unknown on this system."""
    cluster_name: str = ""
    """The cluster's name from the options, if any."""

    def __repr__(self) -> str:
        made, served = (sum(one.latency.count for one in calls) for calls in (self.called, self.served))
        work = f"{made:,} calls made, {served:,} served"
        return f"<Metrics of {self.worker!r}: {self.state}, up {self.up_s:.0f} s, {work}>"

    def _repr_html_(self) -> str:
        head = ("", "peer", "function", "calls", "p50", "p99", "failed")
        rows = [
            (kind, one.peer, one.function, one.latency.count, *_percentiles(one.latency), one.failed)
            for kind, calls in (("made", self.called), ("served", self.served))
            for one in sorted(calls, key=lambda call: -call.latency.total_s)[:_MOST_SHOWN]
        ]
        return table(repr(self).strip("<>"), rows, head)


_MOST_SHOWN = 10


def _percentiles(latency: Histogram) -> tuple[str, str]:
    return f"{1e3 * latency.percentile(50):.3g} ms", f"{1e3 * latency.percentile(99):.3g} ms"


def collect(node: Runtime) -> Metrics:
    """Read the metrics of ``node`` now. From any thread; it holds no lock for more than an instant."""
    others = node.others()
    everyone = [node.me, *others]
    references = node.part(NodeReferences).counts()
    recorder = node.part_if_made(Recorder)
    batches = node.part_if_made(Batches)
    streams = node.part_if_made(Streams)
    weights = node.part_if_made(Weights)
    return Metrics(
        worker=node.info.name,
        rank=node.info.id,
        process_id=os.getpid(),
        host=socket.gethostname(),
        state=node.state,
        taken_at=time.time(),
        up_s=time.monotonic() - node.started_at,
        called=[one for peer in everyone for one in _calls(peer.info.name, peer.called)],
        served=[one for peer in everyone for one in _calls(peer.info.name, peer.served)],
        channels=[one for peer in others for one in _channels(peer)],
        calls_in_flight=len(node.calls),
        served_in_flight=len(node.server.active) + len(queued_calls(node)),
        pool=pool_view(node),
        owned_references=references.owned,
        used_references=references.users,
        contexts=0 if recorder is None else len(recorder.contexts.ids()),
        interruptions=node.event_log.count(INTERRUPTED),
        reconnects=node.event_log.count(RECONNECTED),
        frames_sent_again=node.connector.frames_sent_again,
        links_joined=node.connector.joined,
        links_parted=node.connector.parted,
        peers_lost=node.peers_lost,
        members={kind: node.event_log.count(kind) for kind in MEMBER_EVENTS},
        unresponsive={
            member.name: member.unresponsive_s for member in node.members_now() if member.unresponsive_s is not None
        },
        batches=[] if batches is None else [BatchMetrics(name, *one) for name, one in batches.counts.copy().items()],
        streams=StreamMetrics() if streams is None else StreamMetrics(*streams.counts()),
        weights=[] if weights is None else weights.metrics(),
        weights_bytes=0 if weights is None else weights.blocks.total_bytes,
        device_memory=DeviceMemory()
        if node.devices is None
        else DeviceMemory(*node.devices.stats(), 0 if weights is None else weights.twins.total_bytes),
        cpu_s=time.process_time(),
        memory_bytes=_resident_bytes(),
        cluster_name=node.options.observing.cluster_name or "",
    )


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _calls(peer: str, by_function: FunctionCounters) -> Iterable[CallMetrics]:
    by_title: dict[str, list[int]] = {}  # functions of one name, of two modules, say, are one series
    for function, counters in by_function.copy().items():
        title = "(others)" if function == OTHERS else function_title(function)
        so_far = by_title.get(title)
        by_title[title] = counters.copy() if so_far is None else list(map(add, so_far, counters))
    for title, counted in by_title.items():
        latency = Histogram({bucket: count for bucket, count in enumerate(counted[: len(BOUNDS_S) + 1]) if count})
        yield CallMetrics(peer, title, latency, counted[FAILED], counted[TIMED_OUT], counted[LOST])


def _channels(peer: RemotePeer) -> Iterable[ChannelMetrics]:
    if not peer.was_connected:
        return  # a member to which no connection was ever needed
    name, link = peer.info.name, peer.link
    yield ChannelMetrics(name, link.transport.describe().split()[0], *link.traffic[:2])
    if peer.shared_bytes_sent or peer.shared_bytes_received:
        yield ChannelMetrics(name, "shared memory", peer.shared_bytes_sent, peer.shared_bytes_received)
    devices = peer.devices
    if devices is not None and (devices.bytes_sent or devices.bytes_received):
        yield ChannelMetrics(name, "device memory", devices.bytes_sent, devices.bytes_received)


def _middle_s(bucket: int) -> float:
    """The middle of a bucket, on the logarithmic scale."""
    if bucket == 0:
        return BOUNDS_S[0]
    if bucket == len(BOUNDS_S):
        return BOUNDS_S[-1]
    return float((BOUNDS_S[bucket - 1] * BOUNDS_S[bucket]) ** 0.5)
