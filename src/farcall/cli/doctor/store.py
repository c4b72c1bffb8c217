"""The doctor's look at the meeting place of members: the store that a url or the environment names.

Uses the store as a client would, and leaves nothing in it. A port that is not served yet is no fault on the machine of
rank 0: there the doctor tries to bind it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Mapping
from datetime import timedelta
from time import monotonic

from farcall.cli.doctor.finding import Finding, note, ok, wrong
from farcall.errors import InitError
from farcall.runtime.io.bounded_call import Unanswered, in_bounded_time
from farcall.runtime.rendezvous.addresses import is_local, is_loopback
from farcall.runtime.rendezvous.meeting_place import MeetingPlace, find_meeting_place
from farcall.runtime.rendezvous.store import is_answered

CONNECT_S = 5.0


def meeting_place(init_method: str, environ: Mapping[str, str]) -> tuple[MeetingPlace | None, list[Finding]]:
    """The place where members would meet; None where neither url nor environment names one."""
    if init_method == "env://" and not environ.get("MASTER_ADDR") and not environ.get("MASTER_PORT"):
        advice = "torchrun and farcall run set them; to check a store, give --init-method tcp://host:port"
        return None, [note("store", "MASTER_ADDR and MASTER_PORT are not set: no store to check", advice)]
    try:
        return find_meeting_place(0, 1, init_method, environ), []
    except (InitError, ValueError) as error:
        try:
            return find_meeting_place(0, None, init_method, environ), []  # an address of members: has no size
        except (InitError, ValueError):
            return None, [wrong("store", str(error), "correct the url or the variable")]


def look_at_store(place: MeetingPlace) -> list[Finding]:
    """Can members meet there?"""
    if place.scheme == "file":
        return [_file(place.path)]
    if place.host is None:
        return [note("store", f"cannot check {place.url}", "use tcp://host:port or file:///path")]
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        advice = "check the spelling and this machine's name service, or give an IP address"
        return [wrong("store", f"the name {place.host} does not resolve: {error}", advice)]
    where = sorted({str(target[0]) for *_, target in found})
    findings = [_port(place, ", ".join(where))]
    if is_loopback(place.host):
        advice = "for several hosts: the address of rank 0's machine, as the others know it"
        only_here = f"{place.host} means this machine: only workers here will find it"
        findings.insert(0, note("store's host", only_here, advice))
    return findings


def _port(place: MeetingPlace, where: str) -> Finding:
    try:
        asking = socket.create_connection((place.host or "", place.port), timeout=CONNECT_S)
    except ConnectionRefusedError:
        return _nobody(place)
    except OSError as error:
        advice = "is the machine up, and does a firewall drop connections to that port?"
        return wrong("store", f"{place.name} ({where}) cannot be reached: {error}", advice)
    with asking:
        if place.scheme == "farcall":
            return ok("store", f"{place.name} accepts connections; joining will show whether it is a member")
        begun = monotonic()
        is_silent = not is_answered(asking, CONNECT_S)
    try:
        if is_silent:
            raise Unanswered(place.name)
        in_bounded_time(lambda cancelled: _ask(place, cancelled), CONNECT_S, place.name)
    except (InitError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        advice = "if the port belongs to another program, choose another MASTER_PORT"
        return wrong("store", f"something listens at {place.name}, but no torch store answers: {first}", advice)
    return ok("store", f"{place.name} answers ({1e3 * (monotonic() - begun):.0f} ms)")


def _ask(place: MeetingPlace, cancelled: threading.Event) -> None:
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.host or "",
        place.port,
        None,
        False,
        timedelta(seconds=CONNECT_S),
        wait_for_workers=False,
        use_libuv=place.use_libuv,
    )
    store.check(["farcall doctor"])


def _nobody(place: MeetingPlace) -> Finding:
    """Nobody listens: right on rank 0's machine, before the start."""
    if not is_local(place.host or ""):
        advice = "rank 0 serves it: is it started there? On that machine, farcall doctor says whether it could be"
        return wrong("store", f"nobody listens at {place.name}", advice)
    try:
        with socket.socket() as trying:
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trying.bind(("", place.port))
    except OSError as error:
        return wrong("store", f"rank 0 cannot use port {place.port} here: {error}", "choose another MASTER_PORT")
    return ok("store", f"nobody listens at {place.name} yet; rank 0, started on this machine, can")


def _file(path: str) -> Finding:
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        return wrong(
            "store", f"the directory {directory} does not exist", "make it, on a file system that all members share"
        )
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        advice = "members need to write and lock files there; use tcp://host:port if the file system cannot"
        return wrong("store", f"{directory}: files cannot be made and locked: {error}", advice)
    if os.path.exists(path):
        advice = "if an earlier run crashed and left it, give another path"
        return note("store", f"the file {path} exists", advice)
    return ok("store", f"{directory}: files can be made and locked")
