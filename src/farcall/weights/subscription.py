"""Subscriptions: the versions of a name at this node, and their use by programs.

`NameVersions` exists once per node and name. It drives the machine (`protocol/weights/subscriber.py`) and has the
memory of each version. `Subscription` is the program's object; several may share one `NameVersions`.

Locks: the node's lock (`node.py`) guards the machine and the table of versions. No thread sends, copies or waits while
it holds that lock. A version that a program reads is *held*: the machine does not drop it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from farcall.channel.host_memory import leased
from farcall.destructors import destructor
from farcall.errors import CorruptWeights, Delivery, PublicationClosed, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.weights.messages import Claim, Key
from farcall.protocol.weights.subscriber import Held, LetGo, SubscriberMachine, SubscriberState
from farcall.rpc.outcome import LoopGate
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_wait
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.weights.loading import Slices, load
from farcall.weights.twins import Twins
from farcall.weights.version import HeldVersion, Version, WeightsMetrics

if TYPE_CHECKING:
    from farcall.weights.node import Weights


class NameVersions:
    """The versions of one name at this node.

    Mutable: the machine, the versions and the counters, under the node's lock; the gates of waiting threads, without.
    """

    def __init__(self, weights: Weights, name: str, serials: Iterator[int]) -> None:
        self.weights: Weights = weights
        self.name: str = name
        self.machine: SubscriberMachine = SubscriberMachine(name, serials)
        self.versions: dict[Key, HeldVersion] = {}
        self.arrived: int = 0
        """How many versions have become the newest one."""
        self.users: int = 0
        """How many subscriptions are open."""
        self.why_not: str | None = None
        """Why the last version sent did not arrive; None once a later one has arrived."""
        self._gates: dict[Gate | LoopGate, None] = {}

    def tell(self) -> None:
        """Wake all waiters, which look at the state again. Any thread may call this; it takes no lock."""
        for gate in list(self._gates):
            gate.open()

    @contextmanager
    def news_opens(self, gate: Gate | LoopGate) -> Iterator[None]:
        """While the block runs, each `tell` opens ``gate``."""
        self._gates[gate] = None
        try:
            yield
        finally:
            del self._gates[gate]

    def newest(self) -> HeldVersion | None:
        """The newest ready version."""
        key = self.machine.newest
        return None if key is None else self.versions.get(key)

    def metrics(self) -> WeightsMetrics:
        """The metrics of this name. The caller holds the lock."""
        key, held = self.machine.newest, self.newest()
        return WeightsMetrics(
            self.name,
            "subscribes",
            str(self.machine.state),
            0 if key is None else key.claim.epoch,
            0 if key is None else key.number,
            0 if held is None else held.manifest.layout.size_bytes,
            len(self.versions),
            self.arrived,
        )

    @contextmanager
    def reading(self, version: Version | None) -> Iterator[HeldVersion]:
        """Hold a version, by default the newest one, while the block runs."""
        self.weights.check_running()  # before the lock: in a forked child its holder may not exist
        with self.weights.lock:
            held = self._find(version)
            self.machine.handle(Held(held.key))
        try:
            yield held
        finally:
            self.weights.subscriptions.event(self, LetGo(held.key))

    def _find(self, version: Version | None) -> HeldVersion:
        self.weights.check_running()  # again, under the lock: a node that ends clears its versions
        ready = [self.versions[key] for key in self.machine.ready]
        found = [held for held in ready if version is None or held.version == version]
        if not found:
            what = "no version" if version is None else f"no version {version}"
            kept = f"; there are {', '.join(str(held.version) for held in ready)}" if ready else ""
            raise LookupError(f"{what} of {self.name!r} has arrived{kept}: call wait() first")
        if found[-1].fault:
            raise CorruptWeights(f"version {found[-1].version} cannot be read: {found[-1].fault}")
        return found[-1]

    def views(self, held: HeldVersion) -> list[memoryview]:
        """Views of the blocks of a version. They hold the version until the last tensor over them has died."""
        views = []
        for block in held.blocks:
            # A separate copy-on-write mapping: a program's writes to these tensors affect no other reader.
            view, lease = leased(block.private_view(), self.weights.subscriptions.on_view_death, (self, held.key))
            with self.weights.lock:
                self.machine.handle(Held(held.key))
            self.weights.subscriptions.leases[id(lease)] = lease
            views.append(view)
        return views


class Subscription:
    """A program's access to the versions of a name; see `farcall.subscribe`.

    Mutable: whether it is open, and the claim whose end the program knows.
    """

    def __init__(self, versions: NameVersions) -> None:
        self._versions = versions
        self._is_open = True
        machine = versions.machine
        # The claim whose end was reported to the program, or that had ended before it subscribed.
        self._told = machine.claim if machine.state is SubscriberState.ENDED else None

    @property
    def name(self) -> str:
        """The name subscribed to."""
        return self._versions.name

    @property
    def version(self) -> Version | None:
        """The newest version that this worker can read; None before the first."""
        held = self._versions.newest()
        return None if held is None else held.version

    @property
    def versions(self) -> list[Version]:
        """All versions that this worker can read, the newest last."""
        with self._versions.weights.lock:
            return [Version(key.claim.epoch, key.number) for key in self._versions.machine.ready]

    @property
    def publisher(self) -> WorkerInfo | None:
        """The publisher of the name; None: it has no publisher, or its publisher is gone."""
        machine = self._versions.machine
        claim = machine.claim
        if claim is None or machine.state is not SubscriberState.SUBSCRIBED:
            return None
        peer = self._versions.weights.peer(claim.publisher)
        return None if peer is None else peer.info

    def wait(self, newer_than: Version | None = None, timeout: float | None = UNSET_TIMEOUT) -> Version:
        """Wait for a version newer than ``newer_than``, or for any version without that; return the newest.

        ``timeout``: seconds; None for no limit; by default that of calls. Raises `RpcTimeout`; and `PublicationClosed`,
        once, when the publisher has closed its publication and its last version is not newer. The next call waits for
        another publisher.
        """
        deadline, timeout_s = self._deadline(timeout)
        versions, told = self._versions, self._told
        found = self._newer(newer_than, told)
        if found is None:
            gate = Gate()
            with versions.weights.node.calls.waiting(), versions.news_opens(gate):
                while (found := self._newer(newer_than, told)) is None:
                    if not gate.wait(-1 if deadline == NEVER else max(0.0, deadline - monotonic())):
                        raise self._too_late(newer_than, timeout_s)
        return found

    async def _next(self, newer_than: Version | None) -> Version:
        loop, told = asyncio.get_running_loop(), self._told
        while True:
            gate = LoopGate(loop)
            with self._versions.news_opens(gate):
                found = self._newer(newer_than, told)
                if found is not None:
                    return found
                await gate.passed

    async def __aiter__(self) -> AsyncIterator[Version]:
        """Yield each newest version when it becomes ready, beginning with the present one; skip superseded ones.

        The iteration ends after the last version of a closed publication; a new iteration waits for the next publisher.
        """
        version: Version | None = None
        while True:
            try:
                version = await self._next(version)
            except PublicationClosed:
                return
            yield version

    def get(self, version: Version | None = None) -> Any:
        """The tensors of a version, by default the newest, nested as they were published; without a copy.

        They lie in memory shared with the publisher, copy on write: a write to one is visible through these tensors
        only. The version stays in memory while one of its tensors lives; clone a tensor to keep it for long.
        """
        with self._reading(version) as held:
            return held.nested(held.tensors(self._versions.views(held)))

    def load_into(self, target: Any, *, slices: Slices | None = None, version: Version | None = None) -> Version:
        """Copy a version, all of it or nothing, into the tensors of ``target``, in place; return the version.

        ``target`` is a module, or dicts of tensors. The version must have each of its tensors, with the same shape, or
        with that of its ``slices`` (``{"mlp.up.weight": (slice(0, 2048), slice(None))}``). Floating-point dtypes are
        converted. Copies to devices run on the current stream, behind its earlier work, and this call waits for them.
        """
        with self._reading(version) as held:
            load(held, target, slices, self._twins)
            return held.version

    def verify(self, version: Version | None = None) -> Version:
        """Compare all bytes of a version with the checksums of its push; `CorruptWeights` names the tensor."""
        with self._reading(version) as held:
            held.verify()
            return held.version

    def close(self) -> None:
        """End the subscription: whoever waits with it gets a `RuntimeError`. Tensors of `get` stay valid."""
        if self._is_open:
            self._is_open = False
            self._versions.tell()  # threads and coroutines may wait with this subscription, perhaps without a limit
            if self._versions.weights.node.why_ended is None:
                self._versions.weights.subscriptions.end(self._versions)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @destructor
    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self._versions.weights.subscriptions.end_later(self._versions)

    def __repr__(self) -> str:
        if not self._is_open:
            return f"<Subscription to {self.name!r}: closed>"
        who = self.publisher
        by = f"published by {who.name}" if who is not None else "without a publisher"
        return f"<Subscription to {self.name!r}: version {self.version}, {by}>"

    def _reading(self, version: Version | None) -> AbstractContextManager[HeldVersion]:
        return self._open().reading(version)

    @property
    def _twins(self) -> Twins:
        return self._versions.weights.twins

    def _open(self) -> NameVersions:
        if not self._is_open:
            raise RuntimeError(f"the subscription to {self.name!r} is closed")
        return self._versions

    def _newer(self, newer_than: Version | None, told: Claim | None) -> Version | None:
        """The newest version, if newer than ``newer_than``; raises if its claim has ended, unless that is ``told``."""
        versions = self._open()
        versions.weights.check_running()
        # Read `is_over` before the newest version: a claim that is over has its last version by then. In the other
        # order the last version could become ready in between, and the caller would never see it.
        over = versions.machine.claim if versions.machine.is_over else None
        held = versions.newest()
        if held is not None and (newer_than is None or held.version > newer_than):
            return held.version
        if over is not None and over != told:
            self._told = over
            last = "it has pushed nothing" if held is None else f"its last version is {held.version}"
            raise PublicationClosed(f"the publisher of {self.name!r} has closed it, and {last}: wait again for another")
        return None

    def _deadline(self, timeout: float | None) -> tuple[float, float]:
        default_s = self._versions.weights.node.timeout_s or NEVER
        timeout_s = default_s if timeout is UNSET_TIMEOUT else check_wait(timeout)
        return monotonic() + timeout_s, timeout_s

    def _too_late(self, newer_than: Version | None, timeout_s: float) -> RpcTimeout:
        what = f"no version of {self.name!r}" + ("" if newer_than is None else f" newer than {newer_than}")
        who = self.publisher
        if who is not None:
            why = f"{who.name} publishes it, and has pushed none that arrived here"
        elif self._versions.machine.claim is None:
            why = "nobody has published it"
        else:
            ended = self._versions.machine.state is SubscriberState.ENDED
            why = f"its publisher {'has closed it' if ended else 'is gone'}, and no other has taken over"
        if self._versions.why_not is not None:
            why = f"{why}; {self._versions.why_not}"
        return RpcTimeout(f"{what} came within {timeout_s:g} s: {why}", Delivery.NOT_SENT)
