"""Where the members meet: from arguments, url and environment to an open torch store.

``find_meeting_place`` is pure: it works out rank, world size and the store's place, and says what to set
where something is missing. ``open_store`` opens the store. ``tcp://`` and ``env://`` are opened here and not
by torch's own handlers, which wait for every worker inside a constructor: deaf to Ctrl-C and silent about who
is missing. The server is shared with torch's (multi tenant), so ``init_process_group`` may use the same port,
before or after. Other schemes are left to torch.

Knows nothing of members, names or generations.
"""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, urlsplit

import msgspec
import torch.distributed as dist

from farcall.errors import BadRank, InitError, MissingPeers
from farcall.protocol.backoff import Backoff
from farcall.runtime.io.bounded_call import in_bounded_time
from farcall.runtime.rendezvous.addresses import is_local, is_loopback
from farcall.runtime.rendezvous.patience import Patience
from farcall.transport.tcp import parse_tcp

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.25
_CONNECT_S = 5.0
STORE_ANSWER_S = 5.0
MEMBERS_SCHEME = "farcall"
"""``farcall://host:port``: no store, but the address of a member."""


class KeyStore(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

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
"""What torch's stores raise; the last three where somebody changes their bytes on the way, lengths among them."""


class StoreLost(Exception):
    """The store broke while it was in use; another one may be at its place soon."""


class MeetingPlace(msgspec.Struct, frozen=True):
    """The rank of this process, the size of the group, and the place of the store; ``host`` is None for a file."""

    url: str
    scheme: str
    rank: int
    world_size: int
    """-1 where the group has no fixed size: members come and go."""
    host: str | None = None
    port: int = 0
    path: str = ""
    hosted_by_agent: bool = False
    """torchrun's agent runs the store: rank 0 is a client like the others."""
    attempt: str = "0"
    """Which restart of the job this is: torchrun's store outlives the workers."""
    use_libuv: bool = True

    contacts: tuple[str, ...] = ()
    """Addresses of members, where there is no store: ``farcall://host:port``."""

    @property
    def is_dynamic(self) -> bool:
        """Do members come and go?"""
        return self.world_size < 0

    @property
    def name(self) -> str:
        """The place in words, for messages."""
        if self.host is None:
            return f"the file {self.path}" if self.path else self.url
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_meeting_place(
    rank: int, world_size: int | None, init_method: str, environ: Mapping[str, str] = os.environ
) -> MeetingPlace:
    """Work out rank, size and place: an argument wins over the environment and must agree with the url."""
    parts = urlsplit(init_method)
    if parts.scheme == "env" and world_size == 1 and "MASTER_ADDR" not in environ:
        # One that is alone meets nobody: any place will do.
        environ = {"RANK": "0", **environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    query = dict(parse_qsl(parts.query))
    uses_environment = parts.scheme == "env"
    found_rank = _choose("rank", rank, query, environ if uses_environment else None)
    found_size = _choose_size(world_size, query, environ if uses_environment else None)
    if found_size != -1 and not 0 <= found_rank < found_size:
        raise BadRank(f"rank {found_rank} does not fit world_size {found_size}: ranks go from 0 to {found_size - 1}")
    if parts.scheme == MEMBERS_SCHEME:
        contacts = _find_contacts(init_method)
        host, port = parse_tcp(contacts[-1])
        return MeetingPlace(init_method, parts.scheme, found_rank, found_size, host, port, contacts=contacts)
    common: dict[str, Any] = {
        "url": init_method,
        "scheme": parts.scheme,
        "rank": found_rank,
        "world_size": found_size,
        "hosted_by_agent": environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        "attempt": environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        "use_libuv": query.get("use_libuv", environ.get("USE_LIBUV", "1")) == "1",
    }
    store_host, store_port = _find_endpoint(init_method, environ)
    return MeetingPlace(host=store_host, port=store_port, path=parts.path if parts.scheme == "file" else "", **common)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _choose_size(world_size: int | None, query: Mapping[str, str], environ: Mapping[str, str] | None) -> int:
    """The size of the group; -1 where none is given: members come and go."""
    if world_size is None and "world_size" not in query and not (environ or {}).get("WORLD_SIZE"):
        return -1
    found = _choose("world_size", -1 if world_size is None else world_size, query, environ)
    if found < 1:
        raise BadRank(f"world_size must be at least 1, not {found}")
    return found


def _find_contacts(init_method: str) -> tuple[str, ...]:
    """``farcall://host:port,host:port?unix=/path`` as addresses to dial, the quickest first."""
    parts = urlsplit(init_method)
    places = [place for place in parts.netloc.split(",") if place]
    contacts = [f"unix:{path}" for name, path in parse_qsl(parts.query) if name == "unix"]
    for place in places:
        host, _, port = place.rpartition(":")
        if not host:
            raise ValueError(f"init_method {init_method!r} lacks a host or a port: use 'farcall://host:port'")
        contacts.append(f"tcp://{host}:{_check_port(port, init_method)}")
    if not places:
        raise ValueError(f"init_method {init_method!r} names no member: use 'farcall://host:port'")
    return tuple(contacts)


def _find_endpoint(init_method: str, environ: Mapping[str, str]) -> tuple[str | None, int]:
    parts = urlsplit(init_method)
    if parts.scheme == "env":
        host = _variable(environ, "MASTER_ADDR", "the host of rank 0").strip("[]")
        port_text = _variable(environ, "MASTER_PORT", "a free port on that host")
        return host, _check_port(port_text, "MASTER_PORT")
    if parts.scheme == "tcp":
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"init_method {init_method!r} lacks a host or a port: use 'tcp://host:port'")
        return parts.hostname, _check_port(str(parts.port), init_method)
    return None, 0


def _choose(name: str, given: int, query: Mapping[str, str], environ: Mapping[str, str] | None) -> int:
    """Take a number from the argument (-1: not given), the url or, for ``env://``, the environment."""
    try:
        argument = operator.index(given)
    except TypeError:
        raise BadRank(f"{name} must be an int, not {type(given).__name__}") from None
    if argument < -1:
        raise BadRank(f"{name} must not be negative, not {argument}")
    if name in query:
        in_url = _whole(f"{name} in the url", query[name])
        if argument not in (-1, in_url):
            raise BadRank(f"{name} is {argument} as an argument but {in_url} in the url: give it once")
        return in_url
    if argument != -1:
        return argument
    if environ is None:
        raise BadRank(f"{name} parameter missing: pass {name}=... to init_rpc, or add ?{name}=... to the url")
    variable = name.upper()
    text = environ.get(variable)
    if not text:
        raise BadRank(
            f"environment variable {variable} expected, as init_rpc got no {name}: pass {name}=..., "
            f"set {variable}, or start with `farcall run --workers N PROGRAM` or torchrun, which set it"
        )
    return _whole(f"environment variable {variable}", text)


def _variable(environ: Mapping[str, str], name: str, meaning: str) -> str:
    value = environ.get(name)
    if not value:
        raise ValueError(f"environment variable {name} expected: env:// needs it ({meaning}), and it is not set")
    return value


def _whole(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadRank(f"{what} must be a whole number, not {text!r}") from None


def _check_port(text: str, where: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(f"the port in {where} must be a number from 1 to 65535, not {text!r}")
    return int(text)


def open_store(place: MeetingPlace, deadline: float, cancelled: threading.Event) -> KeyStore:
    """Open the store by ``deadline`` (of ``time.monotonic``), or say why it could not be."""
    store: KeyStore
    if place.host is not None:
        store = _open_tcp(place, deadline, cancelled)
    elif place.scheme == "file":
        store = _open_file(place)
    else:
        left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        try:
            found = dist.rendezvous(place.url, place.rank, place.world_size, timeout=left)  # type: ignore[attr-defined]
            store, _, _ = next(iter(found))
        except (RuntimeError, StopIteration) as error:
            raise InitError(f"cannot open a store with init_method {place.url!r}: {error}") from error
    # Nothing here waits inside the store; this bounds some of the calls to one that has stopped answering.
    store.set_timeout(timedelta(seconds=STORE_ANSWER_S))
    return store


def _open_file(place: MeetingPlace) -> KeyStore:
    directory = os.path.dirname(place.path) or "."
    if not os.path.isdir(directory):
        # The store would try again for minutes.
        raise InitError(f"cannot meet at {place.name}: the directory {directory} does not exist")
    try:
        # Its own user's: torch would make it readable to all.
        os.close(os.open(place.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        pass  # it is there already; or the store says what is wrong
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
            if "EADDRINUSE" not in str(error) and "in use" not in str(error):
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
    """Rank 0, whose port somebody else serves. A store made by this program is as good as its own.

    If it is another rank 0's, claiming the rank will tell, with its name. If it is none, it does not answer, for which
    torch would wait without a bound.
    """
    assert place.host is not None
    host, bound_s = place.host, min(_CONNECT_S, deadline - time.monotonic())
    until = time.monotonic() + bound_s
    try:
        return in_bounded_time(lambda _: _tcp_store(place, host, deadline=until), bound_s, place.name)
    except (InitError, RuntimeError) as error:
        raise _unreachable(place, error) from error


def _serve_tcp(place: MeetingPlace, deadline: float) -> KeyStore:
    """Serve the store, where everybody is on this machine on loopback only, or use the server of this process."""
    assert place.host is not None
    # Behind address translation rank 0 may not reach its own public address; the server is on all it has.
    host = place.host if is_local(place.host) else "127.0.0.1"
    listening: int | None = None
    if is_loopback(host):
        try:
            listening = loopback_listener(host, place.port).detach()  # the server's from now on
        except OSError:
            pass  # torch may serve there already, in this process; else it says what is wrong
    return _tcp_store(place, host, deadline=deadline, serve=True, listening=listening)


def loopback_listener(host: str, port: int) -> socket.socket:
    """A socket that listens at ``port`` of loopback, for a store: torch's own listens on every interface."""
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
    # All the time there is: torch looks up the name behind each address, which may take seconds.
    seconds = max(0.1, deadline - time.monotonic())
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
    """Try the port until somebody listens: torch's own wait prints a stack for each try."""
    pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, factor=1.5)
    patience = Patience(place.name, rank=place.rank, size=place.world_size, deadline=deadline)
    while True:
        patience.look(lambda: [0])
        left_s = max(0.05, min(_CONNECT_S, deadline - time.monotonic()))
        try:
            socket.create_connection((place.host, place.port), timeout=left_s).close()
            return
        except (OSError, UnicodeError) as error:
            pause_s = pauses.next_s()
            if time.monotonic() + pause_s >= deadline or cancelled.is_set():
                raise _unreachable(place, error) from error
        cancelled.wait(pause_s)


def is_served(place: MeetingPlace) -> bool:
    """Does anybody listen where the store was? torch's client prints a stack where it asks one that is gone."""
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
    """The process of this user that listens at ``port``, if it can be found: " by NAME (process N)"."""
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
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if sockets.intersection(_links_in(f"/proc/{process}/fd")):
                with open(f"/proc/{process}/comm") as file:
                    return f" by {file.read().strip()!r} (process {process})"
    return ""


def _links_in(directory: str) -> Iterator[str]:
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(f"{directory}/{name}")
