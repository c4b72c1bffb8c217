"""The place where the members meet, worked out from arguments, url and environment.

`find_meeting_place` opens nothing and asks nobody: it finds rank, world size and the place of the store, or the members
to ask where there is no store. Its errors say what to set.
"""

from __future__ import annotations

import operator
import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from farcall.errors import BadRank
from farcall.transport.tcp import parse_tcp

MEMBERS_SCHEME = "farcall"
"""``farcall://host:port``: the address of a member instead of a store."""
MEMORY_SCHEME = "memory"
"""``memory://``: a store in this process, for the founder of a group that others join by its address."""
_START_WITH = "start with `farcall run --workers N PROGRAM` or torchrun, which set it"


class MeetingPlace(msgspec.Struct, frozen=True):
    """The rank of this process, the size of the group, and the place of the store; ``host`` is None for a file."""

    url: str
    scheme: str
    rank: int
    world_size: int
    """-1 if the group has no fixed size: members come and go."""
    host: str | None = None
    port: int = 0
    path: str = ""
    hosted_by_agent: bool = False
    """torchrun's agent runs the store: rank 0 is a client like the others."""
    attempt: str = "0"
    """The number of this restart of the job: torchrun's store outlives the workers, so keys must differ."""
    use_libuv: bool = True

    contacts: tuple[str, ...] = ()
    """Addresses of members, if there is no store: ``farcall://host:port``."""

    @property
    def is_dynamic(self) -> bool:
        """Do members come and go?"""
        return self.world_size < 0

    @property
    def hosts(self) -> list[str]:
        """The hosts of which one has to be reached over a network; empty where none has to."""
        if self.host is None or self.world_size == 1 or any(way.startswith("unix:") for way in self.contacts):
            return []
        return [parse_tcp(way)[0] for way in self.contacts] or [self.host]

    @property
    def name(self) -> str:
        """The place as text, for messages."""
        if self.host is None:
            return f"the file {self.path}" if self.path else self.url
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_meeting_place(
    rank: int, world_size: int | None, init_method: str, environ: Mapping[str, str] = os.environ
) -> MeetingPlace:
    """Work out rank, size and place: an argument wins over the environment, and must agree with the url."""
    parts = urlsplit(init_method)
    if parts.scheme == "env" and world_size == 1 and "MASTER_ADDR" not in environ:
        # A group of one meets nobody: any place will do.
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
    """The size of the group; -1 if none is given: members come and go."""
    if world_size is None and "world_size" not in query and not (environ or {}).get("WORLD_SIZE"):
        return -1
    found = _choose("world_size", -1 if world_size is None else world_size, query, environ)
    if found < 1:
        raise BadRank(f"world_size must be at least 1, not {found}")
    return found


def _find_contacts(init_method: str) -> tuple[str, ...]:
    """``farcall://host:port,host:port?unix=/path`` as addresses to dial, the fastest first."""
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
            f"set {variable}, or {_START_WITH}"
        )
    return _whole(f"environment variable {variable}", text)


def _variable(environ: Mapping[str, str], name: str, meaning: str) -> str:
    value = environ.get(name)
    if not value:
        raise ValueError(f"environment variable {name} expected: set it ({meaning}), or {_START_WITH}")
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
