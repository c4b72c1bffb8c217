"""A node's distributed autograd: its contexts, joined to its calls, its letters and the deaths of its peers.

One per node, made when the first context is opened here or the first message of one arrives. `attach_to` makes a node
able to do so without anything being made yet.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

import torch

from farcall.autograd.contexts import Contexts
from farcall.autograd.gradient_messages import GRADIENTS, decode_letters
from farcall.autograd.passes import Task
from farcall.autograd.port import NodePort, origin_of
from farcall.errors import RpcError
from farcall.protocol.frames import REQUEST, Frame
from farcall.protocol.notes import Notes
from farcall.runtime.node import Node
from farcall.runtime.peers.peer import Peer

__all__ = ["Recorder", "attach_to"]

logger: logging.Logger = logging.getLogger("farcall")


class Recorder:
    """Distributed autograd at one node; ``node.part(Recorder)``."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._port = NodePort(node)
        self.in_order: Callable[[Task], None] = self._port.in_order
        self.contexts: Contexts = Contexts(self._port, 0 if node.is_static else secrets.randbits(31))
        node.on_peer_joined(lambda peer: self.contexts.worker_joined(origin_of(peer)))
        node.on_peer_gone(self._on_peer_gone)
        node.on_end(self.close)
        node.wait_for(lambda: self.contexts.backward_calls)

    def take_letter(self, peer: Peer, frame: Frame) -> None:
        """On the thread that reads."""

        def deliver() -> None:
            try:
                self.contexts.deliver(peer.number, decode_letters(frame, peer))
            except RpcError as error:
                logger.warning("%s: a letter from %s went wrong: %s", self.node.info.name, peer.info.name, error)

        self._port.take_letter(peer, deliver)

    def get_gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of a context; those on devices are ready on the current streams."""
        gradients = self.contexts.get_gradients(context_id)
        devices = self.node.devices
        if devices is not None:
            devices.follow_default_streams()
            for gradient in gradients.values():
                if gradient.is_cuda and gradient.layout is torch.strided:
                    gradient.record_stream(torch.cuda.current_stream(gradient.device))
        return gradients

    def find_context(self, frame: Frame, notes: Notes) -> None:
        """Give ``frame`` the context that its notes name."""
        contexts = self.contexts
        # An answer brings no context to life: its caller's has been released if it is not here.
        find = contexts.admit if frame.kind == REQUEST else contexts.find
        recording = find(notes.context_id)
        if recording is not None:
            frame.recording, frame.message_id = recording, notes.message_id

    def close(self) -> None:
        """The node ends: let go of every graph."""
        for context_id in self.contexts.ids():
            self.contexts.release(context_id)

    def _on_peer_gone(self, peer: Peer) -> None:
        # On the I/O thread; what follows may send letters, and waits for nobody.
        self._port.peer_gone(peer)
        self.contexts.worker_lost(peer.number, f"{peer.info.name} is gone", origin_of(peer))


def attach_to(node: Node) -> None:
    """Make ``node`` take part in other workers' contexts."""
    node.on_letter(GRADIENTS, lambda peer, frame: node.part(Recorder).take_letter(peer, frame))

    node.dispatcher.find_recording = lambda frame, notes: node.part(Recorder).find_context(frame, notes)
