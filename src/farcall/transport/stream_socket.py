"""The common part of TCP and unix streams: one connected socket as a ``Transport``.

The socket stays in blocking mode, and each operation passes MSG_DONTWAIT: a Python socket with a timeout makes one more
system call per operation. Waiting is left to poll.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from farcall.transport.descriptors import close_in_children
from farcall.transport.interface import (
    MAX_DESCRIPTORS_PER_SEND,
    AcceptPostponed,
    Buffer,
    DialFailed,
    DialRefused,
    DialUnanswered,
    Listener,
    Transport,
    TransportBroken,
    TransportClosed,
    TransportError,
)

_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_DONT_WAIT = getattr(socket, "MSG_DONTWAIT", 0)
SEND_NOW = int(_DONT_WAIT | _NO_SIGNAL)
RECEIVE_NOW = int(_DONT_WAIT)
RIGHTS = getattr(socket, "SCM_RIGHTS", -1)

# sendmsg refuses longer lists with EMSGSIZE; the rest is sent with the next call.
_LONGEST_LIST = 1024
if hasattr(os, "sysconf") and "SC_IOV_MAX" in os.sysconf_names:
    _LONGEST_LIST = max(16, min(1024, os.sysconf("SC_IOV_MAX")))

# accept() reports these for connections that died in the backlog.
_PASSING_ACCEPT_ERRORS = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.EPERM})
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})


class SocketTransport(Transport):
    """A connected stream socket. Mutable: only whether this side has closed it."""

    __slots__ = ("_closed", "_readable", "_socket", "_writable", "look")

    def __init__(self, stream: socket.socket) -> None:
        self._closed = False
        self._socket = stream
        self._readable = select.poll()
        self._readable.register(stream, select.POLLIN)
        # After `close` this finds the descriptor readable, or invalid. It cannot find that of another connection, which
        # may have the same number: whoever closes a transport keeps its reader away first (`Incoming.close`).
        self.look: Callable[[], object] = partial(self._readable.poll, 0)
        self._writable = select.poll()
        self._writable.register(stream, select.POLLOUT)
        stream.settimeout(None)
        close_in_children(self)

    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        rights: tuple[tuple[int, int, array[int]], ...] = ()
        if descriptors:
            if not self.carries_descriptors:
                raise ValueError(f"a {self.kind} transport cannot carry descriptors")
            if len(descriptors) > MAX_DESCRIPTORS_PER_SEND:
                raise ValueError(f"one send carries at most {MAX_DESCRIPTORS_PER_SEND} descriptors")
            if not any(len(buffer) for buffer in buffers):
                raise ValueError("descriptors travel with a byte; there is none to send")
            rights = ((socket.SOL_SOCKET, RIGHTS, array("i", descriptors)),)
        try:
            if len(buffers) == 1 and not rights:
                return self._socket.send(buffers[0], SEND_NOW)
            if len(buffers) > _LONGEST_LIST:
                buffers = buffers[:_LONGEST_LIST]
            return self._socket.sendmsg(buffers, rights, SEND_NOW)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._translated(error, "send") from error

    def send_bytes(self, data: bytes) -> int:
        try:
            return self._socket.send(data, SEND_NOW)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._translated(error, "send") from error

    def receive_into(self, view: memoryview) -> int | None:
        try:
            return self._socket.recv_into(view, 0, RECEIVE_NOW) or self._ended()
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._translated(error, "receive") from error

    def wait_readable(self, timeout_s: float) -> bool:
        if self._closed:
            raise TransportClosed(f"cannot receive: this side closed the {self.kind} connection")
        return bool(self._readable.poll(timeout_s * 1000.0))

    def wait_writable(self, timeout_s: float) -> bool:
        if self._closed:
            raise TransportClosed(f"cannot send: this side closed the {self.kind} connection")
        try:
            return bool(self._writable.poll(timeout_s * 1000.0))
        except RuntimeError:  # another thread waits with this poll object, which serves one thread at a time
            poller = select.poll()
        try:
            poller.register(self._socket, select.POLLOUT)
        except ValueError:
            raise TransportClosed(f"cannot send: this side closed the {self.kind} connection meanwhile") from None
        return bool(poller.poll(timeout_s * 1000.0))

    def close_after_fork(self) -> None:
        """In a forked child: no shutdown(), which would end the parent's connection as well."""
        self._closed = True
        self._socket.close()

    def fileno(self) -> int | None:
        return self._socket.fileno()

    def end_sending(self) -> None:
        self._shut(socket.SHUT_WR)

    def interrupt(self) -> None:
        self._closed = True
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        # On Linux, close() does not wake up a thread that waits for the descriptor; shutdown() does.
        self._shut(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def describe(self) -> str:
        try:
            here, there = self._socket.getsockname(), self._socket.getpeername()
            return f"{self.kind} {self._name(here)} -> {self._name(there)}"
        except OSError:
            return f"{self.kind} (not connected)"

    @staticmethod
    def _name(address: object) -> str:
        """The name of one end in ``describe``."""
        return str(address)

    def _shut(self, how: int) -> None:
        try:
            self._socket.shutdown(how)
        except OSError:
            pass  # the peer was faster, or the socket is closed already

    def _ended(self) -> int:
        """Return 0 for a stream that the peer ended; raise if this side did."""
        if self._closed:
            raise TransportClosed(f"this side closed the {self.kind} connection")
        return 0

    def _translated(self, error: Exception, doing: str) -> TransportError:
        if self._closed:
            return TransportClosed(f"cannot {doing}: this side closed the {self.kind} connection")
        return TransportBroken(f"cannot {doing} over {self.describe()}: {error}")


class SocketListener(Listener):
    """A listening stream socket; subclasses bind it and name the transport it makes."""

    __slots__ = ("_closed", "_socket", "address")

    transport_class: ClassVar[type[SocketTransport]]

    def __init__(self, listening: socket.socket, address: str) -> None:
        listening.setblocking(False)
        self._socket = listening
        self._closed = False
        self.address: str = address
        close_in_children(self)

    def accept(self) -> Transport | None:
        try:
            stream, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            if self._closed:
                raise TransportClosed(f"{self.address} no longer listens") from error
            if error.errno in _PASSING_ACCEPT_ERRORS:
                return None
            if error.errno in _SHORTAGES:
                raise AcceptPostponed(f"{self.address} cannot accept now: {error}") from error
            raise TransportBroken(f"{self.address} cannot accept: {error}") from error
        try:
            return self.transport_class(stream)
        except OSError:
            # The connection died before its options could be set, like those that die in the backlog.
            stream.close()
            return None

    def fileno(self) -> int | None:
        return self._socket.fileno()

    def close(self) -> None:
        self._closed = True
        self._socket.close()

    def close_after_fork(self) -> None:
        """In a forked child: close the socket only; its name and file belong to the parent."""
        self._closed = True
        self._socket.close()


def connect(stream: socket.socket, target: object, timeout_s: float, address: str) -> None:
    """Connect ``stream`` within ``timeout_s`` or close it and raise ``DialFailed``, naming ``address``."""
    try:
        stream.settimeout(max(0.001, timeout_s))
        stream.connect(target)  # type: ignore[arg-type]
    except OSError as error:
        stream.close()
        why = f"no answer within {timeout_s:.3g} s" if isinstance(error, TimeoutError) else error
        # A unix name whose process is gone either refuses connections or, if its file was removed, does not exist.
        kind: type[DialFailed] = DialFailed
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            kind = DialRefused
        elif isinstance(error, TimeoutError) or error.errno in _NO_WAY:
            kind = DialUnanswered
        raise kind(f"cannot connect to {address}: {why}") from error
    except BaseException:
        stream.close()
        raise
