"""Publications: a program's tensors become versions.

`Publication` drives the machine of one tenure (`protocol/weights/publisher.py`) and owns the blocks of its versions. A
push copies once, on the caller's thread, into a block that nobody reads; only then does anybody hear of the version. So
a publisher that dies amid a push leaves no trace of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from farcall.errors import SerializationError, Superseded
from farcall.ids import WorkerInfo
from farcall.protocol.frames import RESPONSE, Frame
from farcall.protocol.weights.publisher import Closed, PublisherMachine, PublisherState
from farcall.serialize import write_value
from farcall.weights.layout import Leaves, StoragePlan, name_of, plan_storages, signature_of, take_apart
from farcall.weights.manifest import Content, Layout, Manifest, Storage, TensorPlace, encode_manifest
from farcall.weights.memory import Block, aligned
from farcall.weights.version import Version, WeightsMetrics

if TYPE_CHECKING:
    from farcall.weights.node import Weights


class PublishedVersion:
    """A version at its publisher."""

    __slots__ = ("blocks", "data", "manifest")

    def __init__(self, manifest: Manifest, blocks: list[Block]) -> None:
        self.manifest: Manifest = manifest
        self.data: bytes = encode_manifest(manifest)
        self.blocks: list[Block] = blocks
        """In the order of the manifest's contents."""


class Publication:
    """What this worker publishes under a name; see `farcall.publish`.

    Mutable: the machine and the versions, under the node's lock; a lock of its own lets one push run at a time.
    """

    def __init__(self, weights: Weights, machine: PublisherMachine, source: Any, keep: int) -> None:
        """Made by `Weights.publish`."""
        self.keep: int = keep
        self.machine: PublisherMachine = machine
        self.versions: dict[int, PublishedVersion] = {}
        self.pushes: int = 0
        self._weights = weights
        self._source = source
        self._pushing = threading.Lock()
        self._planned: tuple[object, list[StoragePlan], list[TensorPlace]] = (None, [], [])

    @property
    def name(self) -> str:
        """What subscribers ask for."""
        return self.machine.name

    @property
    def version(self) -> Version | None:
        """The version pushed last."""
        number = self.machine.lender.newest
        return Version(self.machine.claim.epoch, number) if number else None

    @property
    def subscribers(self) -> dict[str, Version | None]:
        """The version that each subscriber had last, by the names of the workers."""
        with self._weights.lock:
            lender, epoch = self.machine.lender, self.machine.claim.epoch
            taken = {member: lender.taken.get(member) for member in lender.subscribers}
        found = {}
        for member, last in taken.items():
            peer = self._weights.peer(member)
            if peer is not None:
                found[peer.info.name] = None if last is None else Version(epoch, last[0])
        return found

    def push(self, *, only: Iterable[str] | None = None, dtype: torch.dtype | None = None) -> Version:
        """Make the values as they are now a version, and announce it; return once they are copied.

        Args:
            only: the names of the tensors that have changed. All others are shared with the version before.
            dtype: what floating-point tensors are converted to.
        """
        self.check()  # before the lock: in a forked child nobody would ever release it
        with self._pushing:
            self.check()  # again: it may have been closed meanwhile
            leaves = take_apart(self._source)
            made = self._fill(leaves, None if only is None else set(only), dtype)
            return self._weights.announce(self, made)

    def close(self) -> None:
        """Publish this no more. Subscribers get the newest version yet, and are told that no other follows.

        They keep the versions they have. Another publication of the name, of any worker, takes over.
        """
        if self._weights.node.why_ended is None:
            self._weights.publisher_event(self, Closed())
            with self._pushing:  # a push that runs ends now, and in vain
                self._source, self._planned = None, (None, [], [])

    def metrics(self) -> WeightsMetrics:
        """This name, for metrics. With the node's lock held."""
        machine = self.machine
        newest = self.versions.get(machine.lender.newest)
        return WeightsMetrics(
            self.name,
            "publishes",
            str(machine.state),
            machine.claim.epoch,
            machine.lender.newest,
            0 if newest is None else newest.manifest.layout.size_bytes,
            len(self.versions),
            self.pushes,
        )

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Publication of {self.name!r}: {self.machine.state}, version {self.version}>"

    def check(self) -> None:
        """Raise unless versions can be pushed."""
        self._weights.check_running()
        if self.machine.state is PublisherState.CLOSED:
            raise RuntimeError(f"the publication of {self.name!r} is closed")
        claim = self.machine.superseded_by
        if claim is not None:
            peer = self._weights.peer(claim.publisher)
            who: WorkerInfo | str = "another worker" if peer is None else peer.info.name
            raise Superseded(f"{who} has published {self.name!r} since (epoch {claim.epoch}): push there")

    def _fill(self, leaves: Leaves, only: set[str] | None, dtype: torch.dtype | None) -> PublishedVersion:
        """Copy what has changed into a block."""
        if only is not None and only - leaves.names:
            raise KeyError(f"{self.name!r} has no tensor {', '.join(sorted(only - leaves.names))}")
        plans, places = self._plan(leaves, dtype)
        values = _encode_values(leaves)
        with self._weights.lock:
            newest = self.versions.get(self.machine.lender.newest)
            kept = {} if newest is None or only is None else _unchanged(newest.manifest.layout, plans, leaves, only)
            shared: list[int] = []  # contents of the newest version that this one lies in, too
            contents: list[Content] = []
            blocks: list[Block] = []
            if newest is not None:
                before = [newest.manifest.layout.storages[index] for index in kept.values()]
                shared = sorted({storage.content for storage in before if storage.size_bytes})
                contents = [newest.manifest.contents[index] for index in shared]
                blocks = [newest.blocks[index] for index in shared]
            for block in blocks:
                self._weights.blocks.share(block)
        try:
            offsets, size = [], 0
            for index, plan in enumerate(plans):
                offsets.append(size)
                size += 0 if index in kept else aligned(plan.size_bytes)
            fresh: Block | None = None
            if size:
                fresh = self._weights.blocks.take(size)
                blocks.append(fresh)
                contents.append(Content(self._weights.me, fresh.block_id, fresh.fill, size))
            storages, checksums = [], []
            for index, plan in enumerate(plans):
                if not plan.size_bytes:
                    storages.append(Storage(0, 0, 0))
                    checksums.append(0)
                elif index in kept:
                    assert newest is not None
                    storage = newest.manifest.layout.storages[kept[index]]
                    storages.append(Storage(shared.index(storage.content), storage.offset, storage.size_bytes))
                    checksums.append(newest.manifest.checksums[kept[index]])
                else:
                    assert fresh is not None
                    view = fresh.view[offsets[index] : offsets[index] + plan.size_bytes]
                    storages.append(Storage(len(shared), offsets[index], plan.size_bytes))
                    checksums.append(plan.fill(view))
            if newest is not None and kept:
                places = _with_places_of(newest.manifest.layout, places, kept)
            layout = Layout(storages, places, list(leaves.containers.items()), list(leaves.values))
            return PublishedVersion(Manifest(contents, layout, checksums, *values), blocks)
        except BaseException:
            self._weights.blocks.release(blocks)
            raise

    def _plan(self, leaves: Leaves, dtype: torch.dtype | None) -> tuple[list[StoragePlan], list[TensorPlace]]:
        """The storages, and the places of tensors in them: those of the push before, if nothing has moved."""
        signature = (dtype, signature_of(leaves.tensors))
        if signature != self._planned[0]:
            plans = plan_storages(leaves.tensors, dtype)
            self._planned = (signature, plans, _places(leaves, plans))
        return self._planned[1], self._planned[2]


def _unchanged(layout: Layout, plans: list[StoragePlan], leaves: Leaves, only: set[str]) -> dict[int, int]:
    """Of each storage that is the same as in ``layout``: its place here, and there."""
    shapes = {place.name: (place.shape, place.storage) for place in layout.tensors}
    members: dict[int, set[str]] = {}
    for place in layout.tensors:
        members.setdefault(place.storage, set()).add(place.name)
    same = {}
    for index, plan in enumerate(plans):
        names = {name_of(path) for path in plan.members}
        before = {shapes[name][1] for name in names if name in shapes}
        if names & only or len(before) != 1:
            continue
        [storage] = before
        if members[storage] == names and all(
            shapes[name_of(path)][0] == tuple(leaves.tensors[path].shape) for path in plan.members
        ):
            same[index] = storage
    return same


def _encode_values(leaves: Leaves) -> tuple[bytes, list[bytes]]:
    if not leaves.values:
        return b"", []
    frame = Frame(RESPONSE)
    write_value(frame, list(leaves.values.values()))
    if frame.undo:
        raise SerializationError("references cannot be published: they belong to the worker they are sent to")
    return bytes(frame.payload), [bytes(buffer) for buffer in frame.buffers]


def _places(leaves: Leaves, plans: list[StoragePlan]) -> list[TensorPlace]:
    places = {}
    for index, plan in enumerate(plans):
        for path, (strides, offset) in plan.members.items():
            tensor = leaves.tensors[path]
            # Bytes of several dtypes in one storage are copied as bytes.
            dtype = tensor.dtype if plan.dtype is torch.uint8 else plan.dtype
            name = str(dtype).removeprefix("torch.")
            places[path] = TensorPlace(name_of(path), path, name, tuple(tensor.shape), strides, index, offset)
    return [places[path] for path in leaves.tensors]


def _with_places_of(old: Layout, places: list[TensorPlace], kept: Mapping[int, int]) -> list[TensorPlace]:
    """``places``, but those in storages that are kept as they were: the program's tensors may lie otherwise by now."""
    before = {place.name: place for place in old.tensors}
    return [
        msgspec.structs.replace(before[place.name], path=place.path, storage=place.storage)
        if place.storage in kept
        else place
        for place in places
    ]
