"""Unix stream sockets: within one host, quicker than TCP, and able to carry descriptors.

Addresses: ``unix:@name`` (Linux's abstract namespace: no file, gone with its socket, reachable within one
network namespace) and ``unix:/path``. ``unix:`` alone asks a listener for a fresh private name.

Receiving always looks for descriptors: a plain ``recv`` would throw away, unseen, those that came with its
bytes. That costs 0.3 us per call; a second socket or a flag in the stream would cost more in descriptors or
in care.
"""

from __future__ import annotations

import array
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import ClassVar

from farcall.transport.interface import (
    MAX_DESCRIPTORS_PER_SEND,
    MAX_DESCRIPTORS_UNTAKEN,
    Buffer,
    DialFailed,
    ListenFailed,
    TransportBroken,
)
from farcall.transport.stream_socket import RECEIVE_NOW, SEND_NOW, SocketListener, SocketTransport, connect

_BACKLOG = 1024
_SEND_BUFFER_BYTES = 1 << 19
_HAS_ABSTRACT_NAMES = sys.platform.startswith("linux")

_DESCRIPTOR_BYTES = array.array("i").itemsize
_RIGHTS = getattr(socket, "SCM_RIGHTS", -1)
_ANCILLARY_BYTES = (
    socket.CMSG_SPACE(MAX_DESCRIPTORS_PER_SEND * _DESCRIPTOR_BYTES) if hasattr(socket, "CMSG_SPACE") else 0
)
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
# Plain ints: the arithmetic of enum flags costs microseconds.
_TRUNCATED = int(getattr(socket, "MSG_CTRUNC", 0))
_RECEIVE_NOW = RECEIVE_NOW | _CLOSE_ON_EXEC


def unix_sockets_work() -> bool:
    """Whether this system has unix sockets that carry descriptors."""
    return hasattr(socket, "AF_UNIX") and hasattr(socket, "CMSG_SPACE") and hasattr(socket.socket, "recvmsg_into")


def _socket_name(address: str) -> str:
    """What ``bind`` and ``connect`` take for ``address``."""
    rest = address.removeprefix("unix:")
    if rest == address or not rest or rest == "@" or "\0" in rest:
        raise ValueError(f"{address!r} is not a unix address: write unix:@name or unix:/path")
    if rest.startswith("@"):
        return "\0" + rest[1:]
    return rest


class UnixTransport(SocketTransport):
    """A unix stream connection."""

    __slots__ = ("_untaken",)

    kind = "unix"
    carries_descriptors = True

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream)
        # What is in there, small messages wait behind: little, but no less than keeps both ends busy.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._untaken: list[int] = []

    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        if not descriptors:
            return super().send(buffers)
        if len(descriptors) > MAX_DESCRIPTORS_PER_SEND:
            raise ValueError(f"one send carries at most {MAX_DESCRIPTORS_PER_SEND} descriptors")
        if not any(len(buffer) for buffer in buffers):
            raise ValueError("descriptors travel with a byte; there is none to send")
        rights = (socket.SOL_SOCKET, _RIGHTS, array.array("i", descriptors))
        try:
            return self._socket.sendmsg(buffers, (rights,), SEND_NOW)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._translated(error, "send") from error

    def receive_into(self, view: memoryview) -> int | None:
        try:
            size, ancillary, result_flags, _ = self._socket.recvmsg_into((view,), _ANCILLARY_BYTES, _RECEIVE_NOW)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._translated(error, "receive") from error
        if ancillary or result_flags & _TRUNCATED:
            self._keep(ancillary, result_flags)
        return size or self._ended()

    def _keep(self, ancillary: list[tuple[int, int, bytes]], result_flags: int) -> None:
        """Store what came; a peer that sends more than agreed is cut off, and costs no descriptor."""
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == _RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
                self._untaken.extend(descriptors)
        if result_flags & _TRUNCATED or len(self._untaken) > MAX_DESCRIPTORS_UNTAKEN:
            self._drop_untaken()
            raise TransportBroken(f"{self.describe()}: the peer sent more descriptors than anyone asked for")

    def take_descriptors(self) -> list[int]:
        taken, self._untaken = self._untaken, []
        return taken

    def close(self) -> None:
        super().close()
        self._drop_untaken()

    def _drop_untaken(self) -> None:
        for descriptor in self.take_descriptors():
            os.close(descriptor)

    @staticmethod
    def _name(address: object) -> str:
        if isinstance(address, bytes):
            return "@" + address[1:].decode(errors="replace")
        return str(address) or "(unnamed)"


class UnixListener(SocketListener):
    """A listening unix socket. A file it made is removed with it, and so is a directory it made."""

    __slots__ = ("_directory", "_path")

    transport_class: ClassVar[type[SocketTransport]] = UnixTransport

    def __init__(self, address: str = "unix:") -> None:
        if not unix_sockets_work():
            raise ListenFailed("this system has no unix sockets that carry descriptors")
        self._directory: str | None = None
        self._path: str | None = None
        if address == "unix:":
            address = self._fresh_address()
        name = _socket_name(address)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(name)
            if not name.startswith("\0"):
                self._path = name
            listening.listen(_BACKLOG)
        except (OSError, ValueError) as error:
            listening.close()
            self._remove_files()
            raise ListenFailed(f"cannot listen on {address}: {error}") from error
        super().__init__(listening, address)

    def _fresh_address(self) -> str:
        token = secrets.token_hex(16)
        if _HAS_ABSTRACT_NAMES:
            return f"unix:@farcall-{os.getpid()}-{token}"
        # mkdtemp makes it 0700; the path must stay short (a unix path has about 100 characters).
        self._directory = tempfile.mkdtemp(prefix="farcall-")
        return f"unix:{self._directory}/socket"

    def close(self) -> None:
        super().close()
        self._remove_files()

    def _remove_files(self) -> None:
        path, self._path = self._path, None
        directory, self._directory = self._directory, None
        if path is not None:
            try:
                os.unlink(path)
            except OSError:
                pass  # somebody cleaned up before us
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def dial_unix(address: str, timeout_s: float) -> UnixTransport:
    """Connect to ``address``; there is no network to wait for, only a full backlog."""
    if not unix_sockets_work():
        raise DialFailed("this system has no unix sockets that carry descriptors")
    name = _socket_name(address)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connect(stream, name, timeout_s, address)
    except ValueError as error:
        raise DialFailed(f"cannot connect to {address}: {error}") from error
    return UnixTransport(stream)
