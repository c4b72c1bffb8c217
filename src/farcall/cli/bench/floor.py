"""The floor: what this machine allows a Python program, without any system of calls on top.

Two processes, one socket, fixed-size headers and no dispatch. Large memory goes through a shared segment
that is kept and warm (``memfd``, mapped by both; one thread copies), or, over TCP, into a buffer that is
kept and warm.

    header: kind (1 byte), padding, size in bytes (u64)     16 bytes each way

A kind says what the other side does before it answers with the same header.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time

import torch

from farcall.cli.bench.contenders import Contender, Transport
from farcall.cli.bench.measure import Operation

_HEADER = struct.Struct("<c7xQ")
_PING = b"p"  # nothing
_BULK = b"b"  # receive that many bytes from the socket
_COPY_BACK = b"c"  # copy that many bytes from the first half of the segment to the second
_HALF_BYTES = 256 << 20
_CONNECT_TIMEOUT_S = 60.0


class Floor(Contender):
    """Bare sockets and bare copies."""

    name = "floor"

    def start(self, rank: int, size: int, directory: str, transport: Transport) -> None:
        self._rank = rank
        # With torch's default of one thread a core, in either process, many operations took 8.0 ms whatever
        # their size (64 KiB to 16 MiB, two cores); with one thread in both, none did. Why is not known. The
        # price: where it does not stall, two threads copy 1 MiB and more 1.4 to 2.7 times quicker.
        torch.set_num_threads(1)
        if rank == 0:
            self._socket = _connect(directory, transport)
            self._descriptor = -1
            if transport == "local":
                self._descriptor = os.memfd_create("farcall-bench-floor")
                os.ftruncate(self._descriptor, 2 * _HALF_BYTES)
                socket.send_fds(self._socket, [b"f"], [self._descriptor])
                self._segment = _map(self._descriptor)
                self._segment.zero_()  # the first touch of a page is not what is measured
        else:
            self._server = threading.Thread(target=_serve, args=(directory, transport), daemon=True)
            self._server.start()

    def stop(self) -> None:
        if self._rank != 0:
            self._server.join()
            return
        self._socket.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def ping_pong(self) -> Operation:
        """A small message there and back."""
        return lambda: self._exchange(_PING, 0)

    def copy_in(self, size_bytes: int) -> Operation:
        """A copy into the warm segment, and a small message to tell of it."""
        source, target = torch.ones(size_bytes, dtype=torch.uint8), self._segment[:size_bytes]

        def operation() -> None:
            target.copy_(source)
            self._exchange(_PING, 0)

        return operation

    def copy_there_and_back(self, size_bytes: int) -> Operation:
        """As ``copy_in``, and the other side copies it into a second place for the answer."""
        source, target = torch.ones(size_bytes, dtype=torch.uint8), self._segment[:size_bytes]

        def operation() -> None:
            target.copy_(source)
            self._exchange(_COPY_BACK, size_bytes)

        return operation

    def stream(self, size_bytes: int) -> Operation:
        """Bytes through the socket, into a buffer that is kept."""
        source = memoryview(bytearray(b"\x01") * size_bytes)

        def operation() -> None:
            self._socket.sendall(_HEADER.pack(_BULK, size_bytes))
            self._socket.sendall(source)
            _receive(self._socket, memoryview(bytearray(_HEADER.size)))

        return operation

    def _exchange(self, kind: bytes, size_bytes: int) -> None:
        self._socket.sendall(_HEADER.pack(kind, size_bytes))
        if len(self._socket.recv(_HEADER.size)) != _HEADER.size:
            raise ConnectionError("the other side of the floor is gone")


def _serve(directory: str, transport: Transport) -> None:
    connection = _accept(directory, transport)
    segment = torch.empty(0, dtype=torch.uint8)
    if transport == "local":
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        segment = _map(descriptors[0])
        os.close(descriptors[0])
    received = memoryview(bytearray(0))
    with connection:
        while header := connection.recv(_HEADER.size):
            kind, size_bytes = _HEADER.unpack(header)
            if kind == _BULK:
                if len(received) < size_bytes:
                    received = memoryview(bytearray(size_bytes))
                _receive(connection, received[:size_bytes])
            elif kind == _COPY_BACK:
                segment[_HALF_BYTES : _HALF_BYTES + size_bytes].copy_(segment[:size_bytes])
            connection.sendall(header)


def _receive(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target)
        if count == 0:
            raise ConnectionError("the other side of the floor is gone")
        target = target[count:]


def _map(descriptor: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 2 * _HALF_BYTES), dtype=torch.uint8)


def _accept(directory: str, transport: Transport) -> socket.socket:
    place = os.path.join(directory, "floor")
    if transport == "local":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(place + ".new")
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        with open(place + ".new", "w") as file:
            file.write(str(listener.getsockname()[1]))
    listener.listen(1)
    # Only now can the place be found: whoever finds it can connect.
    os.rename(place + ".new", place)
    with listener:
        connection, _ = listener.accept()
    if transport == "tcp":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _connect(directory: str, transport: Transport) -> socket.socket:
    place = os.path.join(directory, "floor")
    give_up_at = time.monotonic() + _CONNECT_TIMEOUT_S
    while not os.path.exists(place):
        if time.monotonic() > give_up_at:
            raise TimeoutError("the other side of the floor did not start")
        time.sleep(0.01)
    if transport == "local":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(place)
        return connection
    with open(place) as file:
        connection = socket.create_connection(("127.0.0.1", int(file.read())))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
