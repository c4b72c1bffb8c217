"""Distributed autograd at a node: joins its contexts to calls, links, threads and the deaths of peers.

Messages between contexts travel in frames of their own kind. A frame is never answered, and never waits for a thread
that runs user functions: the thread that reads it hands it to the contexts. Messages that may be late (`send_later`)
travel with the next frame to that worker, or after HELD_BACK_S.

    flags  payload of a frame
    0      msgpack: control messages of passes, no gradient; small, and nothing is unpickled
    1      a value, pickled like the arguments of calls: control messages, and gradients

Control messages of a frame are delivered before its gradients; contexts do not depend on that order.

Graphs run on workers of the executor, or on the thread that called `backward`. If the last part that a peer's message
started was quick, the I/O thread itself runs the next one, like quick functions (`runtime/io/reader.py`): if that is
slow after all, another thread takes over the reader role.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty
from time import monotonic, perf_counter
from typing import Final

import msgspec
import torch

from farcall.autograd.contexts import Contexts
from farcall.autograd.functions import Reached
from farcall.autograd.passes import Event, Gradient, LocalPass, Message
from farcall.channel.device_api import current_stream
from farcall.errors import Delivery, PeerDead, RpcError
from farcall.ids import WorkerInfo
from farcall.protocol import gradients as protocol
from farcall.protocol.frames import LETTER, REQUEST, Frame
from farcall.protocol.gradients import PassId
from farcall.protocol.messages import ProtocolError
from farcall.protocol.notes import Notes, ProfileWanted
from farcall.runtime.io import sigint
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.observing.profiling import PROFILING, CallProfile, RunProfile
from farcall.runtime.peers.peer import Peer
from farcall.serialize import read_value, withdraw, write_value

logger: logging.Logger = logging.getLogger("farcall")

GRADIENTS: Final = 1
"""The subject of these frames, in place of the call id."""
QUICK_S: Final = 1e-3
"""A part of a pass that took less than this counts as quick, and is expected to be quick the next time."""
DEVICE_QUICK_S: Final = 2e-3
"""The same with devices: longer, because torch's engine runs such a part on its own device thread."""
HELD_BACK_S: Final = 0.05
"""The longest time that `send_later` holds a message back."""

SMALL_BYTES: Final = 1 << 16
"""Strided gradients up to this size are made contiguous before they are sent."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[protocol.Message]] = msgspec.msgpack.Decoder(list[protocol.Message])


def encode_messages(messages: Sequence[Message], peer: Peer) -> Frame:
    """Encode ``messages`` in one frame."""
    steering: list[protocol.Message] = []
    carried: list[tuple[int, int, int, int, Reached]] = []
    for message in messages:
        if type(message) is Gradient:
            # A plain tuple: pickling a class name costs more than all the rest of a small gradient.
            pass_id, gradients = message.pass_id, message.gradients
            for place, gradient in gradients.items():
                if gradient is None or gradient.layout is not torch.strided or gradient.is_contiguous():
                    continue
                if gradient.nbytes <= SMALL_BYTES:
                    # The gradient of a sum is one expanded number. A copy is cheaper than encoding the strides.
                    gradients[place] = gradient.contiguous()
            carried.append((message.context_id, pass_id.origin, pass_id.number, message.message_id, gradients))
        else:
            steering.append(message)  # type: ignore[arg-type]
    written = _encoder.encode(steering) if steering else b""
    if not carried:
        return Frame(LETTER, 0, GRADIENTS, payload=written)
    frame = Frame(LETTER, 1, GRADIENTS)
    write_value(frame, (written, carried), peer)
    return frame


def decode_messages(frame: Frame, peer: Peer) -> list[Message]:
    """Decode the messages of a frame; raise ``ProtocolError`` if they are malformed."""
    steering, carried = read_value(frame, peer) if frame.flags else (frame.payload, ())
    try:
        messages: list[Message] = [] if carried and not steering else [*_decoder.decode(steering)]
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"cannot read gradient messages of {len(steering)} bytes: {error}") from error
    for context_id, origin, number, message_id, gradients in carried:
        messages.append(Gradient(context_id, PassId(origin, number), message_id, gradients))
    frame.buffers = ()  # free the buffers now: the reader, further up the stack, still holds the frame
    return messages


class Recorder:
    """Distributed autograd at one node, ``node.part(Recorder)``: its contexts, and the `Port` that they use.

    Mutable: ``_held_back``, by worker, messages that travel with the next frame; ``_quick``, by worker, whether the
    last part that its message started was quick; ``_gone``, the names of lost workers. Any thread changes all three:
    the first under its lock, the others by single atomic operations.
    """

    def __init__(self, node: Runtime) -> None:
        self.node = node
        self.worker_id: int = node.me.number
        self.origin: int = _origin_of(node.me)
        self.knows: Callable[[Peer], bool] = node.is_peer
        self.now = monotonic
        self.pass_ended: Callable[[], None] = node.something_ended
        self._held_back: dict[int, list[Message]] = {}
        self._held_back_lock = threading.RLock()  # re-entrant for the same reason as the locks of contexts
        self._flush_timer = node.timer(self._flush_held_back)
        self._quick: dict[int, bool] = {}
        self._gone: dict[int, WorkerInfo] = {}
        self.contexts: Contexts = Contexts(self, 0 if node.me.number == node.info.id else secrets.randbits(31))
        node.hooks.peer_joined.append(lambda peer: self.contexts.worker_joined(_origin_of(peer)))
        node.hooks.peer_gone.append(self._on_peer_gone)
        node.hooks.ended.append(self._close)
        node.hooks.unsettled.append(lambda: len(self.contexts.running))
        node.hooks.letters[GRADIENTS] = self.take_frame
        node.hooks.find_recording = self.find_context

    # --- for programs -------------------------------------------------------------------------------------

    def backward(self, context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Run a pass within the timeout of this node's calls."""
        devices, timeout_s = self.node.devices, self.node.timeout_s or None
        if devices is None:
            self.contexts.backward(context_id, roots, retain_graph, timeout_s)
        else:
            # All autograd work runs on the default streams, which order it.
            devices.on_default_streams(lambda: self.contexts.backward(context_id, roots, retain_graph, timeout_s))

    def get_gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients of a context; those on devices are ready on the current streams."""
        gradients = self.contexts.get_gradients(context_id)
        devices = self.node.devices
        if devices is not None:
            devices.follow_default_streams()
            for gradient in gradients.values():
                if gradient.is_cuda and gradient.layout is torch.strided:
                    gradient.record_stream(current_stream(gradient.get_device()))
        return gradients

    # --- what arrives -------------------------------------------------------------------------------------

    def find_context(self, peer: Peer, frame: Frame, notes: Notes) -> None:
        """Give ``frame`` the context that its notes name."""
        contexts, context_id = self.contexts, notes.context_id
        recording = contexts.find(context_id)
        # An answer must not make a context: if the caller's is not here, it has been released.
        if recording is None and frame.kind == REQUEST:
            recording = contexts.admit(context_id, peer.number)
        if recording is not None:
            frame.recording, frame.message_id = recording, notes.message_id

    def take_frame(self, peer: Peer, frame: Frame) -> None:
        """On the thread that reads the link: deliver the messages, then have the passes run that they started."""
        devices = self.node.devices
        passes: list[LocalPass] = []
        try:
            if devices is None:
                passes = self.contexts.deliver(peer.number, decode_messages(frame, peer))
            else:
                devices.on_default_streams(
                    lambda: passes.extend(self.contexts.deliver(peer.number, decode_messages(frame, peer)))
                )
        except RpcError as error:
            name = self.node.info.name
            logger.warning("%s: cannot handle a gradient message from %s: %s", name, peer.info.name, error)
        for local in passes:
            work = _Work(self, peer.number, local)
            self.node.executor.submit(work)

    def _on_peer_gone(self, peer: Peer) -> None:
        # On the I/O thread: this may send messages, but must not wait.
        self._gone[peer.number] = peer.info
        self._held_back.pop(peer.number, None)
        self.contexts.worker_lost(peer.number, f"{peer.info.name} is gone", _origin_of(peer))

    def _close(self) -> None:
        """The node ends: release every context and its graph."""
        for context_id in self.contexts.ids():
            self.contexts.release(context_id)

    # --- as a `Port` ----------------------------------------------------------------------------------------

    def send(self, worker_id: int, messages: Sequence[Message], awaited: LocalPass | None = None) -> None:
        if worker_id == self.worker_id:
            for local in self.contexts.deliver(worker_id, messages):
                self.submit(local)
            return
        node = self.node
        peer = node.numbered(worker_id)
        if peer is None:
            gone = self._gone.get(worker_id)
            raise PeerDead(f"{gone.name if gone else 'that worker'} is gone", Delivery.NOT_SENT, gone)
        # Bounded: a peer that accepts no bytes must fail the pass, not hang it.
        deadline = monotonic() + node.timeout_s if node.timeout_s else NEVER
        if awaited is not None and awaited.machine.deadline is not None:
            deadline = awaited.machine.deadline
        held_back: list[Message] = []
        sigint.enter()  # Ctrl-C comes through only while this thread waits: else it could lose what was held back
        try:
            with self._held_back_lock:
                held_back = self._held_back.pop(worker_id, held_back)
            if not messages and not held_back:
                return  # another thread has sent the held-back messages
            frame = encode_messages([*messages, *held_back], peer)
            try:
                peer.send(frame, deadline)
            except BaseException:
                withdraw(frame)
                raise
        except BaseException:
            for message in held_back:  # to come twice does them no harm
                self.send_later(worker_id, message)
            raise
        finally:
            sigint.leave()

    def send_later(self, worker_id: int, message: Message) -> None:
        with self._held_back_lock:
            self._held_back.setdefault(worker_id, []).append(message)
        if self._flush_timer.due == NEVER:
            # One timer for all messages until then: in a training loop most travel with a frame of the next step.
            self._flush_timer.at(monotonic() + HELD_BACK_S)

    def _flush_held_back(self, now: float) -> float:
        """On the I/O thread: send held-back messages that no other frame has taken along."""
        for worker_id in list(self._held_back):
            try:
                self.send(worker_id, ())
            except RpcError:
                self._held_back.pop(worker_id, None)  # the worker is gone, and its contexts with it
        return NEVER

    def submit(self, local: LocalPass) -> None:
        self.node.executor.submit(_Work(self, -1, local))

    def wait(self, local: LocalPass) -> Event | None:
        node, deadline = self.node, local.machine.deadline or NEVER
        with node.calls.waiting():
            local.flush()
            try:
                return local.inbox.get(timeout=None if deadline == NEVER else max(0.0, deadline - monotonic()))
            except Empty:
                return None

    def workers(self) -> frozenset[int]:
        return frozenset(self.node.members())

    def info(self, worker_id: int) -> WorkerInfo | None:
        peer = self.node.numbered(worker_id)
        return self._gone.get(worker_id) if peer is None else peer.info

    def profile_call(self, worker_id: int, run: RunProfile | None) -> CallProfile | None:
        peer = self.node.numbered(worker_id)
        # A worker that is gone has nothing to profile; the message to it fails the pass.
        return None if peer is None else PROFILING.begin_call(self.node, peer, "backward", None, run)

    def profile_run(self, wanted: ProfileWanted | None) -> RunProfile | None:
        return PROFILING.begin_run(self.node.info, wanted)


class _Work:
    """A worker's part in a pass, as a task of the executor."""

    __slots__ = ("_local", "_recorder", "_sender")

    def __init__(self, recorder: Recorder, sender: int, local: LocalPass) -> None:
        self._recorder = recorder
        self._sender = sender
        self._local = local

    def run(self, more: bool) -> None:
        started = perf_counter()
        run, profile, devices = self._local.run, self._local.profile, self._recorder.node.devices
        if profile is not None:
            run = partial(profile.run, run)
        if devices is None:
            run()
        else:
            devices.on_default_streams(run)
        quick_s = QUICK_S if devices is None else DEVICE_QUICK_S
        self._recorder._quick[self._sender] = perf_counter() - started < quick_s

    def drop(self) -> None:
        pass  # the node has ended, and every context with it


def _origin_of(peer: Peer) -> int:
    """Return the leading bits of the ids of a worker's contexts: its rank, then 16 bits of its incarnation.

    Two incarnations that share an origin by chance begin to count at different, random numbers.
    """
    rank = peer.info.id
    if peer.number == rank:
        return rank << 16  # in a group of fixed size, which never reuses a rank
    return (rank & 0x7FFF) << 16 | (peer.incarnation & 0xFFFF)
