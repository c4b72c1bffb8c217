"""The units of code by value (`serialize/units.py`) that callers have sent, and the calls that wait for one.

    a unit    event                              becomes    with
    unknown   a call names it                    asked      the caller is asked for it, once; the call waits
    asked     another call names it              asked      that waits, too
    asked     the caller answers                 loading    a worker looks at its digest and loads it
    loading   loaded                             known      the calls go on
    loading   it cannot be loaded                unknown    the calls fail with the reason
    asked     the caller is gone, or we end      unknown    the calls fail, which nobody hears
    known     KEPT_BYTES of newer use            unknown

A call that waits is accepted: it counts as unanswered, is cancelled like any other when its caller gives up, and runs
once. Each caller has its own units: what one has sent, or keeps in use, is nothing to another.
"""

from __future__ import annotations

import hashlib
import threading
from functools import partial
from typing import TYPE_CHECKING

from farcall.errors import NotAllowed, PeerDead, RpcError, SerializationError
from farcall.protocol.messages import CodeTold, CodeWanted
from farcall.runtime.calls.executor import FunctionTask
from farcall.serialize.allowance import INSTALLED
from farcall.serialize.functions import DIGEST_BYTES, path_of
from farcall.serialize.pickler import unreadable
from farcall.serialize.units import LoadedUnit

if TYPE_CHECKING:
    from farcall.runtime.calls.serving import Request, Server
    from farcall.runtime.peers.peer import Peer

KEPT_BYTES = 64 << 20
"""How much code of one caller is kept."""


class ArrivingCode:
    """The units of one node. Mutable, under the lock: those of each caller, oldest use first, and ``_waiting``."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._known: dict[Peer, dict[bytes, LoadedUnit]] = {}
        self._waiting: dict[tuple[Peer, bytes], list[Request]] = {}

    def is_here(self, request: Request) -> bool:
        """Give ``request`` its unit, or the reason why it has none. False: it waits, and is accepted again."""
        peer, frame = request.peer, request.frame
        if INSTALLED.allowance is not None:
            name = path_of(frame.function).replace("\0", ".")
            frame.code = NotAllowed(f"{name} was sent by value, and this worker serves named functions only")
            return True
        digest = frame.function[1 : 1 + DIGEST_BYTES]
        with self._lock:
            known = self._known.get(peer)
            if known is not None and digest in known:
                frame.code = known[digest] = known.pop(digest)  # the latest use comes last
                return True
            waiting = self._waiting.setdefault((peer, digest), [])
            waiting.append(request)
            is_first = len(waiting) == 1
        if is_first:
            peer.control(CodeWanted(digest))
        return False

    def on_told(self, peer: Peer, message: CodeTold) -> None:
        """The caller has sent a unit: have a worker load it."""
        with self._lock:
            is_wanted = (peer, message.digest) in self._waiting
        if is_wanted:
            self._server.submit(FunctionTask(partial(self._load, peer, message), partial(self.forget, peer)))

    def _load(self, peer: Peer, message: CodeTold) -> None:
        digest = message.digest
        code: LoadedUnit | Exception
        try:
            if not message.content:
                raise SerializationError("the caller does not keep the code of this function any more: call it again")
            if hashlib.sha256(message.content).digest() != digest:
                raise SerializationError("the code of this function arrived damaged")
            code = LoadedUnit(message.content)
        except RpcError as error:
            code = error
        except Exception as error:
            code = unreadable(error)
            code.__cause__ = error
        with self._lock:
            waiting = self._waiting.pop((peer, digest), [])
            if waiting and isinstance(code, LoadedUnit):  # else the caller is gone meanwhile
                known = self._known.setdefault(peer, {})
                known[digest] = code
                size_bytes = sum(unit.size_bytes for unit in known.values())
                while size_bytes > KEPT_BYTES and len(known) > 1:
                    size_bytes -= known.pop(next(iter(known))).size_bytes
        self._go_on(waiting, code)

    def _go_on(self, waiting: list[Request], code: LoadedUnit | Exception) -> None:
        for request in waiting:
            request.frame.code = code
            self._server.accept_again(request)

    def forget(self, peer: Peer | None = None) -> None:
        """``peer`` is gone; None: this node ends."""
        with self._lock:
            keys = [key for key in self._waiting if peer is None or key[0] is peer]
            waiting = [request for key in keys for request in self._waiting.pop(key)]
            for one in [peer] if peer is not None else list(self._known):
                self._known.pop(one, None)
        self._go_on(
            waiting, PeerDead("the code of this function did not arrive: its caller is gone, or this node ends")
        )
