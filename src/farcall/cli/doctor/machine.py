"""The doctor's look at this machine: versions, options, names, transports, memory, descriptors, ports.

Each function tries one thing, with the parts that a node uses for it, and returns findings. Nothing here talks to
another machine.
"""

from __future__ import annotations

import mmap
import platform
import re
import resource
import socket
import sys
from contextlib import closing
from importlib.metadata import version
from time import monotonic

import torch

from farcall import __version__
from farcall.channel import mps
from farcall.channel.segments import Segment, why_not_shared
from farcall.cli.doctor.finding import Finding, note, ok, wrong
from farcall.errors import InitError
from farcall.options import ENV_ADVERTISE, ENV_ENCRYPTION, ENV_SECRET, ENV_TRANSPORTS, RpcBackendOptions
from farcall.runtime.rendezvous.addresses import choose_host, is_local, is_loopback
from farcall.runtime.rendezvous.records import ADD_A_SECRET, secret_of
from farcall.serialize.flat import speedups
from farcall.transport.address import dial, listen
from farcall.transport.interface import Listener, TransportError
from farcall.transport.tcp import format_tcp, parse_tcp
from farcall.transport.unix import unix_sockets_work

OLDEST_TORCH = (2, 6)
FEW_DESCRIPTORS = 256
SOME_DESCRIPTORS = 1024
FEW_PORTS = 1000
DIAL_S = 3.0
MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30


def look_at_options() -> tuple[RpcBackendOptions | None, list[Finding]]:
    """The options of a program that sets none itself, and findings about them."""
    try:
        options = RpcBackendOptions()
    except (TypeError, ValueError) as error:
        return None, [wrong("environment", str(error), "correct the variable, or unset it")]
    return options, [secret(options), *switched_off(options)]


def look_at_machine(options: RpcBackendOptions, store_host: str | None) -> list[Finding]:
    """All findings about this machine, in the order in which a program meets them."""
    host = choose_host(options.advertise, store_host)
    return [
        versions(),
        codec(speedups),
        host_name(socket.gethostname()),
        address(options, host.host, host.reason),
        *ways(options, host.host),
        shared_memory(options),
        memory(options.memory.shared_memory_limit_bytes, memory_left()),
        descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        ports(),
        *gpus(torch.cuda.device_count() if torch.version.cuda else 0, mps.is_served()),
    ]


def versions() -> Finding:
    """The versions of farcall and of everything below it."""
    torch_version = version("torch")
    found = (
        f"farcall {__version__}, torch {torch_version}, msgspec {version('msgspec')}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    )
    numbers = tuple(int(number) for number in re.findall(r"\d+", torch_version)[:2])
    if numbers < OLDEST_TORCH:
        return wrong("versions", found, "farcall needs torch 2.6 or later: pip install 'torch>=2.6'")
    if not sys.platform.startswith("linux"):
        return note("versions", found, "farcall is tested on Linux only; shared memory works only there")
    return ok("versions", found)


def codec(why_not: str) -> Finding:
    """Do calls use the compiled codec? ``why_not`` is empty if they do."""
    if not why_not:
        return ok("codec", "compiled: plain values and tensors are written and read without Python code")
    return note(
        "codec",
        f"in Python, about 30 us slower for a call with tensors: {why_not}",
        "the compiled one needs torch 2.11 or later, and a wheel that has it or a C compiler and Python's headers at "
        "the install",
    )


def secret(options: RpcBackendOptions) -> Finding:
    """Is there a secret that members must prove?"""
    given = options.given_secret()
    if given is not None:
        secrets = given.given()
        more = "; a second one is accepted while you change it" if len(secrets) > 1 else ""
        return ok("secret", f"one is set, {len(secrets[0])} bytes; every member must have the same{more}")
    try:
        secret_of(options)
    except InitError as error:
        return wrong("secret", str(error), f"set {ENV_SECRET}")
    return note(
        "secret",
        "none is set: only processes of this user on this machine can meet",
        f"for several machines or users: {ADD_A_SECRET}",
    )


def switched_off(options: RpcBackendOptions) -> list[Finding]:
    """Transports that the environment forbids, and encryption."""
    found = []
    if options.transports is not None:
        allowed = ", ".join(options.allowed_transports)
        found.append(
            note("transports", f"{ENV_TRANSPORTS} allows {allowed} only", f"unset {ENV_TRANSPORTS} to allow all")
        )
    if not options.encrypts:
        text = f"off, by {ENV_ENCRYPTION}: whoever is between two hosts can read and change what workers send"
        found.append(note("encryption", text, f"right on a network that is yours alone, else unset {ENV_ENCRYPTION}"))
    return found


def host_name(name: str) -> Finding:
    """Does this machine's name lead somewhere?"""
    try:
        found = sorted({str(where[0]) for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        return note(
            "host name",
            f"the name {name} does not resolve here ({error})",
            f"farcall does not need it; torch's gloo may. Add it to /etc/hosts, or give addresses ({ENV_ADVERTISE})",
        )
    places = ", ".join(found)
    if all(is_loopback(place) for place in found):
        return note(
            "host name",
            f"the name {name} resolves to {places}, so other machines cannot use it",
            "workers tell the others another address: see the next line. As MASTER_ADDR the name works if the others "
            "resolve it to an address of this machine",
        )
    return ok("host name", f"{name} resolves to {places}")


def address(options: RpcBackendOptions, host: str, reason: str) -> Finding:
    """The address that a worker here tells the others."""
    found = f"workers here tell the others {host}: {reason}"
    if options.advertise is not None and not is_local(host):
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            return wrong("address", f"{found}; it does not resolve ({error})", f"correct or unset {ENV_ADVERTISE}")
        return note(
            "address",
            f"{found}; this machine has no such address",
            "right behind address translation (NAT), else wrong; check with farcall doctor HOST:PORT",
        )
    if is_loopback(host):
        return note(
            "address",
            f"{found}; other machines cannot reach it",
            f"for several hosts: set MASTER_ADDR to a host that all reach, or {ENV_ADVERTISE} here",
        )
    return ok("address", found)


def ways(options: RpcBackendOptions, host: str) -> list[Finding]:
    """Can one process here reach another, over each way?"""
    found = []
    if "unix" in options.allowed_transports:
        found.append(_unix())
    if "tcp" in options.allowed_transports:
        found.append(
            _tcp("tcp on loopback", "tcp://127.0.0.1:0", "127.0.0.1", "is the loopback interface up (ip link)?")
        )
        if not is_loopback(host) and is_local(host):
            advice = f"does a firewall on this machine block it? Else set {ENV_ADVERTISE} to another of its addresses"
            found.append(_tcp("tcp on the network", "tcp://*:0", host, advice))
    return found


def _unix() -> Finding:
    if not unix_sockets_work():
        return note("unix sockets", "this system has none that carry descriptors", "workers here will use TCP")
    try:
        _try_route(listen("unix:"))
    except (OSError, TransportError) as error:
        return note("unix sockets", f"do not work: {error}", "workers here will use TCP, without shared memory")
    return ok("unix sockets", "work")


def _tcp(subject: str, listening: str, host: str, advice: str) -> Finding:
    try:
        listener = listen(listening)
        _try_route(listener, format_tcp(host, parse_tcp(listener.address)[1]))
    except (OSError, TransportError) as error:
        return wrong(subject, f"cannot connect to {host}: {error}", advice)
    return ok(subject, f"works ({host})")


def _try_route(listener: Listener, address: str = "") -> None:
    """Dial ``listener``, at ``address`` if its own is not meant, and send some bytes through; raises if none arrive."""
    with closing(listener), closing(dial(address or listener.address, DIAL_S)) as ours:
        give_up_at = monotonic() + DIAL_S
        while (accepted := listener.accept()) is None:
            if monotonic() > give_up_at:
                raise TransportError("the connection did not arrive")
        with closing(accepted) as theirs:
            ours.send_bytes(b"farcall")
            buffer = bytearray(7)
            if not theirs.wait_readable(DIAL_S) or theirs.receive_into(memoryview(buffer)) != 7:
                raise TransportError("the bytes sent did not arrive")


def shared_memory(options: RpcBackendOptions) -> Finding:
    """Can a tensor's memory be seen by two processes here?"""
    if "unix" not in options.allowed_transports:
        return note("shared memory", f"not used: it needs unix sockets, which {ENV_TRANSPORTS} forbids", "allow unix")
    why_not = why_not_shared()
    if why_not:
        return note(
            "shared memory",
            f"does not work: {why_not}",
            "large tensors will go through sockets, at half the speed; in a container, allow memfd_create",
        )
    segment = Segment(0, MEBIBYTE)
    try:
        segment.view[:7] = b"farcall"
        with mmap.mmap(segment.descriptor, MEBIBYTE, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
            if seen[:7] != b"farcall":
                return wrong(
                    "shared memory", "two mappings differ", "switch it off: memory=MemoryOptions(shared_memory=False)"
                )
    finally:
        segment.close()
    return ok("shared memory", "works, by memory files: the size of /dev/shm does not matter")


def memory(limit_bytes: int, left_bytes: int | None) -> Finding:
    """Is there as much memory as a worker may take for sending?"""
    if left_bytes is None:
        return note(
            "memory",
            "this system does not tell how much is left",
            "watch it yourself: shared memory counts as memory of the machine",
        )
    found = (
        f"{left_bytes / GIBIBYTE:.1f} GiB left; a worker may take {limit_bytes / GIBIBYTE:.1f} GiB of it for sending"
    )
    if left_bytes < limit_bytes:
        return note(
            "memory",
            found,
            "shared memory counts as memory of the machine or container; with large tensors give less: "
            "RpcBackendOptions(memory=MemoryOptions(shared_memory_limit_bytes=...))",
        )
    return ok("memory", found)


def memory_left() -> int | None:
    """Bytes that this process may still take, as far as the machine and its container say."""
    left = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            left += [int(amount) * 1024 for amount in re.findall(r"MemAvailable:\s+(\d+) kB", file.read())]
    except OSError:
        pass
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        left.append(max(0, limit - used))
    return min(left, default=None)


def _cgroup(name: str) -> int | None:
    try:
        with open(f"/sys/fs/cgroup/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None  # no such file, or "max"


def descriptors(soft: int, hard: int) -> Finding:
    """May a process have enough files and connections open?"""
    if soft == resource.RLIM_INFINITY:
        return ok("descriptors", "no limit")
    most = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
    found = f"a process may open {soft} (at most {most}); a worker needs one for each peer, and a few more"
    advice = f"ulimit -n {most if hard != resource.RLIM_INFINITY else 65536}"
    if soft < FEW_DESCRIPTORS:
        return wrong("descriptors", found, f"raise it before starting workers: {advice}")
    if soft < SOME_DESCRIPTORS:
        return note("descriptors", found, f"for hundreds of workers: {advice}")
    return ok("descriptors", found)


def ports() -> Finding:
    """The range from which the system chooses the ports of workers."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            first, last = (int(number) for number in file.read().split())
    except (OSError, ValueError):
        return note("ports", "cannot read the system's range", "let no firewall between the hosts block any port")
    found = f"each worker listens on one port that the system chooses, from {first} to {last}"
    if last - first < FEW_PORTS:
        return note("ports", found, "these are few for many connections: widen net.ipv4.ip_local_port_range")
    return ok("ports", f"{found}; firewalls between hosts must let these through")


def gpus(count: int, is_served: bool) -> list[Finding]:
    """Do processes that share a device take turns? Nothing about a machine without one of NVIDIA's."""
    if not count:
        return []
    if is_served:
        return [ok("GPUs", f"{count}; by NVIDIA's MPS, processes compute on one at the same time")]
    found = (
        f"{count}; processes that compute on the same one take turns, and calls with its tensors take two to three "
        "times as long as with NVIDIA's MPS"
    )
    return [note("GPUs", found, f"where workers share one: {mps.REMEDY}")]
