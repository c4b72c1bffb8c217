"""The addresses that a node advertises to the others.

The user's choice comes first (``RpcBackendOptions.advertise``, then ``FARCALL_ADVERTISE``), then the local address
from which packets to the store leave: a node that reaches the store most likely reaches that address, too. The routing
table gives it (connecting a UDP socket sends nothing), so it takes no name service or permission beyond what the store
needs itself.

Knows nothing of stores and opens no listener. Logs the choice once, with the reason.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from farcall.runtime.io.sigint import Gate
from farcall.transport.tcp import format_tcp, parse_tcp
from farcall.transport.unix import unix_sockets_work

logger: logging.Logger = logging.getLogger("farcall")

_ANY_PORT = 9
# Documentation networks: routed like any far host, but no host has these addresses.
_FAR_HOSTS = ("192.0.2.1", "2001:db8::1")
_LOOPBACK = "127.0.0.1"
_LOOK_AGAIN_S = 0.1


class AdvertisedHost(NamedTuple):
    """A host without brackets or port, and the reason for its choice."""

    host: str
    reason: str


def choose_host(advertise: str | None, store_host: str | None) -> AdvertisedHost:
    """Choose the host to advertise; ``store_host`` is None if the members meet at a file."""
    if advertise is not None:
        chosen = AdvertisedHost(advertise, "as told by the advertise option or FARCALL_ADVERTISE")
    elif store_host is None:
        chosen = _own_host()
    else:
        chosen = _host_towards(store_host)
    logger.debug("advertising %s: %s", chosen.host, chosen.reason)
    if is_loopback(chosen.host) and store_host is not None and not is_local(store_host):
        logger.warning(
            "advertising the loopback address %s, but the store is on another host (%s): nodes elsewhere "
            "cannot connect to this one; set advertise=... or FARCALL_ADVERTISE to an address they reach",
            chosen.host,
            store_host,
        )
    return chosen


def await_route(hosts: Sequence[str], deadline: float) -> str | None:
    """The first of ``hosts`` that a route leads to, waited for until ``deadline``; None: there is none.

    A program may start before its network is up, and has no address then that is of use to other hosts.
    """
    told = False
    while True:
        found = next((host for host in hosts if _leaving_for(host) is not None), None)
        left_s = deadline - monotonic()
        if found is not None or not hosts or left_s <= 0:
            return found
        if not told:
            told = True
            logger.warning("no route leads to %s yet: waiting %.0f s for the network at most", hosts[0], left_s)
        Gate().wait(_LOOK_AGAIN_S)


def listening_addresses(transports: Sequence[str], host: str, port: int = 0) -> list[str]:
    """The addresses at which a node that advertises ``host`` listens, the preferred first; port 0: any free port."""
    addresses = []
    if "unix" in transports and unix_sockets_work():
        addresses.append("unix:")
    if "tcp" in transports:
        # A loopback address is of no use to other hosts, so do not open the port to them.
        addresses.append(format_tcp(host if is_loopback(host) else "*", port))
    return addresses


def advertised_address(address: str, host: str) -> str:
    """The address to advertise for a listener's ``address``: ``host`` replaces "every interface"."""
    if not address.startswith("tcp://"):
        return address
    bound_host, port = parse_tcp(address)
    return format_tcp(bound_host or host, port)


def is_loopback(host: str) -> bool:
    """Whether ``host`` by itself means "this machine"; looks up no name."""
    if host.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_on_loopback(addresses: Sequence[str]) -> bool:
    """Do all TCP addresses of a member, of which it has some, mean "this machine"?"""
    hosts = [parse_tcp(address)[0] for address in addresses if address.startswith("tcp://")]
    return bool(hosts) and all(map(is_loopback, hosts))


def is_local(host: str) -> bool:
    """Whether ``host`` resolves to an address of this machine, tried by binding to it."""
    return any(_binds(family, where) for family, where in _resolve(host))


def _host_towards(store_host: str) -> AdvertisedHost:
    found = _leaving_for(store_host)
    if is_loopback(store_host):
        return AdvertisedHost(found or _LOOPBACK, f"the store is at {store_host}, so everybody is on this machine")
    if found is not None and not is_loopback(found):
        return AdvertisedHost(found, f"the local address that reaches the store's host {store_host}")
    # Many systems map their own host name to 127.0.1.1, while other hosts resolve that name to another address.
    outward = _outward()
    if outward is not None:
        return AdvertisedHost(outward, f"the store's host {store_host} is loopback seen from here; this is the way out")
    return AdvertisedHost(found or _LOOPBACK, "this machine has no other address")


def _own_host() -> AdvertisedHost:
    """For members that meet at a file, which does not show from where the others come."""
    name = socket.gethostname()
    for family, where in _resolve(name):
        if not is_loopback(where[0]) and _binds(family, where):
            return AdvertisedHost(where[0], f"the address of this machine's name {name}")
    outward = _outward()
    if outward is not None:
        return AdvertisedHost(outward, "the address with which this machine reaches others")
    return AdvertisedHost(_LOOPBACK, "this machine has no other address")


def _outward() -> str | None:
    """The address with which this machine reaches far hosts, or without a route to any, hosts near by; or None."""
    for host in (*_FAR_HOSTS, *_near_hosts()):
        found = _leaving_for(host)
        if found is not None and not is_loopback(found):
            return found
    return None


def _near_hosts() -> list[str]:
    """An address in each network that routes lead to, on Linux."""
    try:
        with open("/proc/net/route") as table:
            networks = [int(line.split()[1], 16) for line in table.readlines()[1:]]
    except OSError:
        return []
    return [str(ipaddress.IPv4Address(socket.ntohl(network) | 1)) for network in networks]


def _leaving_for(host: str) -> str | None:
    """The local address from which packets to ``host`` would leave, or None where no route leads."""
    for family, where in _resolve(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(where)
                found = str(probe.getsockname()[0])
            except OSError:
                continue
        if not ipaddress.ip_address(found.partition("%")[0]).is_unspecified:
            return found
    return None


def _binds(family: int, where: tuple[str, int]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((where[0], 0))
        except OSError:
            return False
    return True


def _resolve(host: str) -> list[tuple[int, tuple[str, int]]]:
    try:
        answers = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [(family, (str(where[0]), _ANY_PORT)) for family, _, _, _, where in answers if family in _FAMILIES]


_FAMILIES = (socket.AF_INET, socket.AF_INET6)
