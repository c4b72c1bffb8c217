"""Publications: a program's tensors become versions.

`Publication` drives the machine of one tenure (`protocol/weights/publisher.py`) and owns the blocks of its versions. A
push copies once, on the caller's thread, into a block without readers, and announces the version only afterwards. So a
publisher that dies during a push leaves no trace of it.
"""

from __future__ import annotations

import itertools
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
from farcall.weights.filling import alignment, fill
from farcall.weights.layout import Leaves, StoragePlan, name_of, plan_storages, signature_of, take_apart
from farcall.weights.manifest import Content, Layout, Manifest, Storage, TensorPlace, encode_manifest
from farcall.weights.memory import Block, aligned
from farcall.weights.version import Version, WeightsMetrics

if TYPE_CHECKING:
    from farcall.weights.node import Weights


class PublishedVersion:
    """A version at its publisher: its manifest, the encoded manifest, and its blocks."""

    __slots__ = ("blocks", "data", "manifest")

    def __init__(self, manifest: Manifest, blocks: list[Block]) -> None:
        self.manifest: Manifest = manifest
        self.data: bytes = encode_manifest(manifest)
        self.blocks: list[Block] = blocks
        """In the order of the manifest's contents."""


class Publication:
    """The weights that this worker publishes under a name; see `farcall.publish`.

    Mutable: the machine and the versions, under the node's lock; the plan of the last push, under a lock of its own,
    which lets one push run at a time.
    """

    def __init__(self, weights: Weights, machine: PublisherMachine, source: Any, keep: int) -> None:
        """For `Weights.claim` only."""
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
        """The name that subscribers ask for."""
        return self.machine.name

    @property
    def version(self) -> Version | None:
        """The version pushed last."""
        number = self.machine.lender.newest
        return Version(self.machine.claim.epoch, number) if number else None

    @property
    def subscribers(self) -> dict[str, Version | None]:
        """The last version that each subscriber has reported, by the names of the workers."""
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
        """Publish the current values as a new version; return once they are copied and announced.

        Args:
            only: the names of the tensors that have changed. All others are shared with the previous version.
            dtype: the dtype that floating-point tensors are converted to.
        """
        self.check()  # before the lock: in a forked child its holder may not exist, and it would never be released
        with self._pushing:
            self.check()  # again: another thread may have closed the publication while this one waited
            leaves = take_apart(self._source)
            made = self._fill(leaves, None if only is None else set(only), dtype)
            return self._weights.announce(self, made)

    def close(self) -> None:
        """Stop publishing. Subscribers still get the newest version, and the notice that no other follows.

        They keep the versions they have. A later publication of the name, by any worker, takes over.
        """
        if self._weights.node.why_ended is None:
            self._weights.publisher_event(self, Closed())
            with self._pushing:  # waits for a running push, which fails when it announces its version
                self._source, self._planned = None, (None, [], [])

    def metrics(self) -> WeightsMetrics:
        """The metrics of this name. The caller holds the node's lock."""
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
        """Raise unless this publication can push versions."""
        self._weights.check_running()
        if self.machine.state is PublisherState.CLOSED:
            raise RuntimeError(f"the publication of {self.name!r} is closed")
        claim = self.machine.superseded_by
        if claim is not None:
            if claim.publisher == self._weights.me:
                raise Superseded(
                    f"this worker has published {self.name!r} again since (epoch {claim.epoch}): push to that one"
                )
            peer = self._weights.peer(claim.publisher)
            who: WorkerInfo | str = "another worker" if peer is None else peer.info.name
            raise Superseded(f"{who} has published {self.name!r} since (epoch {claim.epoch}): push there")

    def _fill(self, leaves: Leaves, only: set[str] | None, dtype: torch.dtype | None) -> PublishedVersion:
        """Copy the changed storages into blocks, one for each device, and make a version with the unchanged ones."""
        if only is not None and only - leaves.names:
            raise KeyError(f"{self.name!r} has no tensor {', '.join(sorted(only - leaves.names))}")
        plans, places = self._plan(leaves, dtype)
        values = _encode_values(leaves)
        with self._weights.lock:
            subscribers = self.machine.lender.subscribers
            newest = self.versions.get(self.machine.lender.newest)
            kept = {} if newest is None or only is None else _unchanged(newest.manifest.layout, plans, leaves, only)
            shared: list[int] = []  # contents of the newest version that this version shares
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
            # Storages of each device get a block of their own, which may have a twin on that device.
            changed: dict[int, list[int]] = {}
            for index, plan in enumerate(plans):
                if plan.size_bytes and index not in kept:
                    changed.setdefault(plan.device, []).append(index)
            found = dict.fromkeys(range(len(plans)), (Storage(0, 0, 0), 0))  # each storage with its checksum
            for index, place in kept.items():
                assert newest is not None
                storage = newest.manifest.layout.storages[place]
                if storage.size_bytes:
                    content = shared.index(storage.content)
                    found[index] = msgspec.structs.replace(storage, content=content), newest.manifest.checksums[place]
            for device, indices in changed.items():
                sizes = (aligned(plans[index].size_bytes, alignment(device)) for index in indices)
                *offsets, size = itertools.accumulate(sizes, initial=0)
                block = self._weights.take_block(size, device)
                blocks.append(block)
                contents.append(Content(self._weights.me, block.block_id, block.fill, size))
                self._weights.twins.prepare(block, device, subscribers)
                sums = fill(block, device, [(plans[index], at) for index, at in zip(indices, offsets, strict=True)])
                for index, offset, checksum in zip(indices, offsets, sums, strict=True):
                    found[index] = Storage(len(contents) - 1, offset, plans[index].size_bytes), checksum
            if newest is not None and kept:
                places = _with_places_of(newest.manifest.layout, places, kept)
            storages = [storage for storage, _ in found.values()]
            checksums = [checksum for _, checksum in found.values()]
            layout = Layout(storages, places, list(leaves.containers.items()), list(leaves.values))
            return PublishedVersion(Manifest(contents, layout, checksums, *values), blocks)
        except BaseException:
            self._weights.blocks.release(blocks)
            self._weights.check_running()  # a node that ended has taken the memory away: that is what to tell
            raise

    def _plan(self, leaves: Leaves, dtype: torch.dtype | None) -> tuple[list[StoragePlan], list[TensorPlace]]:
        """The storages, and the places of tensors in them; reused from the last push if no tensor has moved."""
        signature = (dtype, signature_of(leaves.tensors))
        if signature != self._planned[0]:
            plans = plan_storages(leaves.tensors, dtype)
            self._planned = (signature, plans, _places(leaves, plans))
        return self._planned[1], self._planned[2]


def _unchanged(layout: Layout, plans: list[StoragePlan], leaves: Leaves, only: set[str]) -> dict[int, int]:
    """The storages that have not changed since ``layout``: their indices in ``plans``, and in ``layout``."""
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
    try:
        write_value(frame, list(leaves.values.values()))
    except SerializationError:
        for path, value in leaves.values.items():
            try:
                write_value(Frame(RESPONSE), value)
            except SerializationError as error:
                raise type(error)(f"cannot publish {name_of(path)}: {error}") from error.__cause__
        raise
    if frame.undo:
        raise SerializationError("references cannot be published: they belong to the worker they are sent to")
    return bytes(frame.payload), [bytes(buffer) for buffer in frame.buffers]


def _places(leaves: Leaves, plans: list[StoragePlan]) -> list[TensorPlace]:
    places = {}
    for index, plan in enumerate(plans):
        for path, (strides, offset) in plan.members.items():
            tensor = leaves.tensors[path]
            # A storage of bytes may hold views of several dtypes, copied without a conversion.
            dtype = tensor.dtype if plan.dtype is torch.uint8 else plan.dtype
            name = str(dtype).removeprefix("torch.")
            places[path] = TensorPlace(name_of(path), path, name, tuple(tensor.shape), strides, index, offset)
    return [places[path] for path in leaves.tensors]


def _with_places_of(old: Layout, places: list[TensorPlace], kept: Mapping[int, int]) -> list[TensorPlace]:
    """``places``, with those in kept storages taken from ``old``: the program's tensors may have other strides now."""
    before = {place.name: place for place in old.tensors}
    return [
        msgspec.structs.replace(before[place.name], path=place.path, storage=place.storage)
        if place.storage in kept
        else place
        for place in places
    ]
