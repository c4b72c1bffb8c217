"""The resources of a node that need no peer: its I/O thread, memory, listener, and the handler of Ctrl-C.

Owns and closes them; knows no peer and no message. Made while Ctrl-C is held back, so that all of them exist or none.
A forked child lets go of its copies.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack

from farcall.channel.shared_memory import SegmentPool
from farcall.core import make_core
from farcall.core.contract import Core
from farcall.errors import InitError
from farcall.options import RpcBackendOptions
from farcall.runtime.io import sigint
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.listener import PeerListener
from farcall.runtime.rendezvous.addresses import advertised_address, listening_addresses
from farcall.secret import RANDOM_SECRET_BYTES, Secret
from farcall.serialize.allowance import INSTALLED
from farcall.transport.descriptors import close_in_children

RECEIVE_POOL_BYTES = 1 << 30


class Resources:
    """The loop, the memory pools and the listener of one node."""

    def __init__(self, name: str, options: RpcBackendOptions, host: str) -> None:
        """Listen at ``host``, where members can reach this node."""
        sigint.install()
        with ExitStack() as undone:
            undone.callback(sigint.uninstall)
            self.loop: Loop = Loop(name)
            undone.callback(self.loop.stop)
            addresses = listening_addresses(options.allowed_transports, host, options.port)
            self.observers: Secret | None = options.observing.given_secret()
            """The secret of observers; None: they prove that of the members."""
            if self.observers is None and INSTALLED.allowance is not None:
                self.observers = Secret(secrets.token_bytes(RANDOM_SECRET_BYTES))
            self.listener: PeerListener = PeerListener(addresses, self.loop, self.observers)
            if options.port and not any(address.startswith("tcp:") for address in self.listener.addresses):
                self.listener.close()
                raise InitError(f"cannot listen on port {options.port}: is it taken? Choose another one, or 0")
            undone.pop_all()
        self.addresses: list[str] = [advertised_address(address, host) for address in self.listener.addresses]
        """The addresses to tell the other members."""
        self.pool: SegmentPool | None = (
            SegmentPool(options.memory.shared_memory_limit_bytes) if options.memory.shared_memory else None
        )
        self.core: Core = make_core(RECEIVE_POOL_BYTES, options.limits.send_backlog_limit_bytes, options.busy_wait_s)
        """Links, calls and waiting."""
        close_in_children(self)

    def close_after_fork(self) -> None:
        """In a forked child: the core's threads are in the parent only."""
        self.core.close_after_fork()

    def close(self) -> None:
        """Free them all. After the workers have stopped and the links are closed."""
        self.loop.stop()
        self.core.stop()
        self.listener.close()
        if self.pool is not None:
            self.pool.close()
        sigint.uninstall()
