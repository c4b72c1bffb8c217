"""Unix stream sockets: within one host, quicker than TCP, and able to carry descriptors.

Addresses: ``unix:/path`` and ``unix:@name`` (Linux's abstract namespace). ``unix:`` alone asks a listener for a fresh
name in a directory that only its user may enter: a peer can pass descriptors, and closing one of those may take as long
as its sender wishes (SO_LINGER), so other users must not connect. An abstract name has no permissions; there the
kernel reports the connecting user (SO_PEERCRED), and only this user and root are admitted.

``receive_into`` always looks for descriptors, since a plain ``recv`` would drop those that came with its bytes. That
costs 0.3 us per call; a second socket would cost descriptors, and a flag in the stream would be error-prone. Before the
peer is authenticated, only bytes are received (``receive_bytes_into``).
"""

from __future__ import annotations

import array
import os
import secrets
import shutil
import socket
import struct
import tempfile
from pathlib import Path
from typing import ClassVar

from farcall.private_files import pid_namespace, private_directory, remove_left_files, runtime_directory
from farcall.transport.interface import (
    MAX_DESCRIPTORS_PER_SEND,
    MAX_DESCRIPTORS_UNTAKEN,
    DialFailed,
    DialRefused,
    ListenFailed,
    Transport,
    TransportBroken,
)
from farcall.transport.stream_socket import RECEIVE_NOW, RIGHTS, SocketListener, SocketTransport, connect

_BACKLOG = 1024
_SEND_BUFFER_BYTES = 1 << 19
_LONGEST_PATH = 100  # of about 108 that the system takes
_SUFFIX = ".socket"
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_PEER_CREDENTIALS: int | None = getattr(socket, "SO_PEERCRED", None)

_DESCRIPTOR_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = (
    socket.CMSG_SPACE(MAX_DESCRIPTORS_PER_SEND * _DESCRIPTOR_BYTES) if hasattr(socket, "CMSG_SPACE") else 0
)
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
# Plain ints: the arithmetic of enum flags costs microseconds.
_TRUNCATED = int(getattr(socket, "MSG_CTRUNC", 0))
_RECEIVE_NOW = RECEIVE_NOW | _CLOSE_ON_EXEC


def unix_sockets_work() -> bool:
    """Does this system have unix sockets that carry descriptors?"""
    return hasattr(socket, "AF_UNIX") and hasattr(socket, "CMSG_SPACE") and hasattr(socket.socket, "recvmsg_into")


def _socket_name(address: str) -> str:
    """The name of ``address`` for ``bind`` and ``connect``."""
    rest = address.removeprefix("unix:")
    if rest == address or not rest or rest == "@" or "\0" in rest:
        raise ValueError(f"{address!r} is not a unix address: write unix:@name or unix:/path")
    if rest.startswith("@"):
        return "\0" + rest[1:]
    return rest


class UnixTransport(SocketTransport):
    """A unix stream connection. Mutable: the received descriptors that nobody has taken yet."""

    __slots__ = ("_untaken", "is_of_this_user", "peer_process")

    kind = "unix"
    carries_descriptors = True

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream)
        # Small messages wait behind the bytes in this buffer: keep it small, but large enough to keep both ends busy.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._untaken: list[int] = []
        self.peer_process: int = 0  # stays 0 for a peer in another pid namespace
        self.is_of_this_user: bool = True  # this user or root; also if the system does not tell
        if _PEER_CREDENTIALS is not None:
            found = stream.getsockopt(socket.SOL_SOCKET, _PEER_CREDENTIALS, _CREDENTIALS.size)
            self.peer_process, user, _ = _CREDENTIALS.unpack(found)
            self.is_of_this_user = user in (os.geteuid(), 0)

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

    def receive_bytes_into(self, view: memoryview) -> int | None:
        return super().receive_into(view)

    def _keep(self, ancillary: list[tuple[int, int, bytes]], result_flags: int) -> None:
        """Store descriptors. If a peer sends more than agreed, close them all and break the connection."""
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == RIGHTS:
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
        # The peer chose its name, and it goes into logs: no line breaks, no escape sequences.
        if isinstance(address, bytes):
            return "@" + ascii(address[1:])[2:-1]
        return ascii(address)[1:-1] or "(unnamed)"


class UnixListener(SocketListener):
    """A listening unix socket. ``close`` removes the file and the directory that it made."""

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

    def accept(self) -> Transport | None:
        found = super().accept()
        if isinstance(found, UnixTransport) and not found.is_of_this_user:
            found.close()
            return None  # the poller reports further connections again
        return found

    def _fresh_address(self) -> str:
        try:
            directory = private_directory(runtime_directory())
            path = directory / f"{pid_namespace()}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
            if len(os.fsencode(path)) <= _LONGEST_PATH:
                _remove_stale(directory)
                return f"unix:{path}"
        except OSError:
            pass
        self._directory = tempfile.mkdtemp(prefix="farcall-", dir="/tmp")  # 0700
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
                pass  # another process has removed the file already
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


_cleaned: set[Path] = set()


def _remove_stale(directory: Path) -> None:
    """Once per process: remove the socket files of killed processes, which nobody else removes."""
    if directory not in _cleaned:
        _cleaned.add(directory)
        remove_left_files(directory, _SUFFIX)


def _is_bound(path: str) -> bool:
    """Does a process of this network namespace hold a socket of that name? True where the kernel does not tell."""
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
            return any(line.rstrip("\n").endswith(f" {path}") for line in file)
    except OSError:
        return True


def dial_unix(address: str, timeout_s: float) -> UnixTransport:
    """Connect to ``address``. Only a full backlog makes this wait: no network is involved."""
    if not unix_sockets_work():
        raise DialFailed("this system has no unix sockets that carry descriptors")
    name = _socket_name(address)
    try:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is left, for a moment
        raise DialFailed(f"cannot connect to {address}: {error}") from error
    try:
        connect(stream, name, timeout_s, address)
    except DialRefused as error:
        # A cleaner of temporary files, or the end of a login session, removes the file of a listener that lives.
        if not name.startswith("\0") and not os.path.exists(name) and _is_bound(name):
            raise DialFailed(f"cannot connect to {address}: its file is gone, but not its listener") from error
        raise
    except ValueError as error:
        raise DialFailed(f"cannot connect to {address}: {error}") from error
    found = UnixTransport(stream)
    if not found.is_of_this_user:
        found.close()  # unix connections are plain: that user could relay a handshake and then speak for the peer
        raise DialFailed(f"cannot connect to {address}: another user listens there")
    return found
