"""The store where the members meet: a store of torch's, opened at a `MeetingPlace`.

`open_store` opens ``tcp://`` and ``env://`` itself instead of through torch's handlers, which wait for every worker
inside a constructor: deaf to Ctrl-C and silent about which is missing. The server is shared with torch's (multi
tenant), so ``init_process_group`` may use the same port, before or after. torch opens all other schemes.

Knows nothing of members, names or generations.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Final, Protocol

import torch.distributed as dist

from farcall.errors import InitError, MissingPeers
from farcall.protocol.backoff import Backoff
from farcall.runtime.io.bounded_call import Unanswered, in_bounded_time
from farcall.runtime.rendezvous.addresses import is_local, is_loopback
from farcall.runtime.rendezvous.meeting_place import MEMORY_SCHEME, MeetingPlace
from farcall.runtime.rendezvous.missing_notice import MissingNotice

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.25
_CONNECT_S = 5.0
_SERVE_S = 2.0
STORE_ANSWER_S = 5.0
_GREETING = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder) + b"\x0dping"
"""The first bytes of torch's own client: that it is one, and a ping, whose last four bytes a store sends back."""


class KeyStore(Protocol):
    """The methods of ``torch.distributed.Store`` in use."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def set(self, key: str, value: str, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...
    def has_extended_api(self) -> bool: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


STORE_ERRORS: Final = (RuntimeError, MemoryError, ValueError, IndexError)
"""The exceptions of torch's stores; the last three come from bytes that were altered in transit, lengths among them."""


class StoreLost(Exception):
    """The store broke while it was in use; another one may soon take its place."""


def open_store(place: MeetingPlace, deadline: float, cancelled: threading.Event) -> KeyStore:
    """Open the store by ``deadline`` (of ``time.monotonic``), or raise an error that says why that failed."""
    store: KeyStore
    if place.host is not None:
        store = _open_tcp(place, deadline, cancelled)
    elif place.scheme == "file":
        store = _open_file(place)
    elif place.scheme == MEMORY_SCHEME:
        store = dist.HashStore()  # type: ignore[attr-defined,assignment]
    else:
        left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        try:
            found = dist.rendezvous(place.url, place.rank, place.world_size, timeout=left)  # type: ignore[attr-defined]
            store, _, _ = next(iter(found))
        except (RuntimeError, StopIteration) as error:
            raise InitError(f"cannot open a store with init_method {place.url!r}: {error}") from error
    # farcall never waits for a key inside the store. This bounds some of the calls to a store that stopped answering.
    store.set_timeout(timedelta(seconds=STORE_ANSWER_S))
    return store


def _open_file(place: MeetingPlace) -> KeyStore:
    directory = os.path.dirname(place.path) or "."
    if not os.path.isdir(directory):
        # torch's FileStore would retry for minutes.
        raise InitError(f"cannot meet at {place.name}: the directory {directory} does not exist")
    try:
        # Create it private to this user: torch would make it readable for everybody.
        os.close(os.open(place.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        pass  # the file exists; any other problem, FileStore reports below
    try:
        store: KeyStore = dist.FileStore(place.path, place.world_size)  # type: ignore[attr-defined,assignment]
    except RuntimeError as error:
        raise InitError(f"cannot use {place.name} as a store: {error}") from error
    return store


def _open_tcp(place: MeetingPlace, deadline: float, cancelled: threading.Event) -> KeyStore:
    assert place.host is not None
    if place.rank == 0 and not place.hosted_by_agent:
        try:
            return _serve_tcp(place, deadline)
        except RuntimeError as error:
            from farcall.foreign_errors import is_port_taken  # most programs never need it

            if not is_port_taken(error):
                raise InitError(
                    f"cannot serve a store on port {place.port}: {error}; choose another one (MASTER_PORT, or the "
                    "url) for all workers"
                ) from error
        return _ask_who_is_there(place, deadline)
    _wait_until_reachable(place, deadline, cancelled)
    try:
        return _tcp_store(place, place.host, deadline=deadline)
    except STORE_ERRORS as error:
        raise StoreLost(str(error)) from error


def _ask_who_is_there(place: MeetingPlace, deadline: float) -> KeyStore:
    """As rank 0, connect to the store that already serves our port; one that this program opened will do as well.

    If another rank 0 serves it, claiming the rank will fail later, with its name.
    """
    assert place.host is not None
    host, bound_s = place.host, min(_CONNECT_S, deadline - time.monotonic())
    until = time.monotonic() + bound_s

    def ask(_: threading.Event) -> KeyStore:
        with socket.create_connection((host, place.port), timeout=bound_s) as asking:
            if not is_answered(asking, until - time.monotonic()):
                raise Unanswered(place.name)
        return _tcp_store(place, host, deadline=until)

    try:
        return in_bounded_time(ask, bound_s, place.name)
    except (InitError, RuntimeError, OSError) as error:
        raise _unreachable(place, error) from error


def _serve_tcp(place: MeetingPlace, deadline: float) -> KeyStore:
    """Serve the store (on loopback only, if everybody is on this machine), or use the server of this process."""
    assert place.host is not None
    # Behind NAT rank 0 may not reach its own public address; the server listens on every interface.
    host = place.host if is_local(place.host) else "127.0.0.1"
    listening: int | None = None
    if is_loopback(host):
        try:
            listening = loopback_listener(host, place.port).detach()  # torch's server owns the descriptor from now on
        except OSError:
            pass  # torch may already serve there, in this process; any other problem, torch reports below
    return _tcp_store(place, host, deadline=deadline, serve=True, listening=listening)


def loopback_listener(host: str, port: int) -> socket.socket:
    """A socket that listens on loopback at ``port``, for a store: torch's own would listen on every interface."""
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, where = min(answers, key=lambda answer: answer[0] is not socket.AF_INET)
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(socket.SOMAXCONN)
    except BaseException:
        listening.close()
        raise
    return listening


def _tcp_store(
    place: MeetingPlace, host: str, *, deadline: float, serve: bool = False, listening: int | None = None
) -> KeyStore:
    # Give torch all the time left: it does a reverse lookup of each address, which may take seconds. A server gets a
    # moment in any case: a late one would blame its port, and others would not learn who is missing.
    seconds = max(_SERVE_S if serve else 0.1, deadline - time.monotonic())
    store: KeyStore = dist.TCPStore(  # type: ignore[attr-defined,assignment]
        host,
        place.port,
        place.world_size,
        serve,
        timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening,
        use_libuv=place.use_libuv,
    )
    return store


def _wait_until_reachable(place: MeetingPlace, deadline: float, cancelled: threading.Event) -> None:
    """Try the port until a process listens: torch's own wait prints a stack trace for each attempt."""
    pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, factor=1.5)
    notice = MissingNotice(
        place.name, rank=place.rank, size=place.world_size, deadline=deadline, launched=place.hosted_by_agent
    )
    while True:
        notice.look(lambda: [0])
        left_s = max(0.05, min(_CONNECT_S, deadline - time.monotonic()))
        try:
            with socket.create_connection((place.host, place.port), timeout=left_s) as asking:
                if is_answered(asking, max(0.05, deadline - time.monotonic())):
                    return
            raise Unanswered(place.name)
        except (OSError, UnicodeError) as error:
            pause_s = pauses.next_s()
            if time.monotonic() + pause_s >= deadline or cancelled.is_set():
                raise _unreachable(place, error) from error
        cancelled.wait(pause_s)


def is_answered(asking: socket.socket, timeout_s: float) -> bool:
    """Does whoever is connected answer torch's client, or hang up? Ask this before torch's client does.

    That one would wait for its answer without a bound, in C++: once the program ends, the waiting thread aborts it.
    Whether the answer is a store's, torch's client finds out. It hangs up, or tells.
    """
    asking.settimeout(timeout_s)
    try:
        asking.sendall(_GREETING)
        asking.recv(4)
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def is_served(place: MeetingPlace) -> bool:
    """Does a process still listen at the store's address? torch's client prints a stack trace if none does."""
    if place.host is None:
        return True
    try:
        socket.create_connection((place.host, place.port), timeout=STORE_ANSWER_S).close()
    except (OSError, UnicodeError):
        return False
    return True


def _unreachable(place: MeetingPlace, error: Exception) -> InitError:
    if place.hosted_by_agent:
        return InitError(
            f"cannot reach the store of torchrun or farcall run, which started this process, at {place.name}: {error}"
        )
    if place.rank == 0:
        first_line = str(error).partition("\n")[0]
        return InitError(
            f"port {place.port} is in use here{_by_whom(place.port)}, but no store answers at {place.name}: choose "
            f"another port (MASTER_PORT, or the url) for all workers ({first_line})"
        )
    return MissingPeers(
        f"rank 0 is missing: it serves the store at {place.name}, which could not be reached in time "
        f"({error}). Is it started, and are MASTER_ADDR and MASTER_PORT (or the url) the same everywhere?",
        [0],
    )


def _by_whom(port: int) -> str:
    """The process of this user that listens at ``port``, as " by NAME (process N)"; empty if it cannot be found."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        listening = "0A"
        sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == listening and int(row[1][-4:], 16) == port}
    for process in filter(str.isdecimal, os.listdir("/proc") if sockets else ()):
        with contextlib.suppress(OSError):  # the process ended meanwhile, or belongs to another user
            if sockets.intersection(_links_in(f"/proc/{process}/fd")):
                with open(f"/proc/{process}/comm") as file:
                    return f" by {file.read().strip()!r} (process {process})"
    return ""


def _links_in(directory: str) -> Iterator[str]:
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(f"{directory}/{name}")
