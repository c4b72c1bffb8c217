"""The start of a node: it meets the others, gets its parts, is connected, and serves.

`start_runtime` returns a complete runtime, or raises and leaves nothing behind. Runs on the thread that starts the
node. The members meet by `rendezvous/`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from time import monotonic

from farcall.channel.segments import host_token
from farcall.errors import Cancelled
from farcall.imports import gc_paused
from farcall.options import RpcBackendOptions
from farcall.protocol.member import Member, Trust, new_incarnation
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.io import sigint
from farcall.runtime.node.ending import ComeBack
from farcall.runtime.node.lifecycle import Lifecycle
from farcall.runtime.node.resources import Resources
from farcall.runtime.node.runtime import MakeCalls, Runtime
from farcall.runtime.rendezvous.addresses import await_route, choose_host
from farcall.runtime.rendezvous.agreement import Membership
from farcall.runtime.rendezvous.dynamic import DynamicRendezvous, Meeting, meet
from farcall.runtime.rendezvous.meeting_place import find_meeting_place
from farcall.runtime.rendezvous.static import join
from farcall.serialize.allowance import INSTALLED

logger: logging.Logger = logging.getLogger("farcall")


def start_runtime(
    lifecycle: Lifecycle,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    *,
    parts: Iterable[Callable[[Runtime], object]] = (),
    make_calls: MakeCalls = CallTable,
    come_back: ComeBack | None = None,
    way_back: Meeting | None = None,
    over: str = "",
) -> Runtime:
    """Meet the other members and connect to each; raises within the options' start timeout. `serve` comes next.

    ``lifecycle`` has just been moved to "starting". ``parts`` are made before a message can arrive. ``come_back`` makes
    an expelled node join again. ``way_back`` leads into the group that this node was expelled from. ``over`` is a
    cluster, of a group of fixed size, that has ended and lets nobody in.
    """
    name = lifecycle.name
    deadline = monotonic() + options.start_deadline_s
    place = find_meeting_place(rank, world_size, options.init_method) if way_back is None else way_back.place
    reached = None
    if way_back is None and options.advertise is None and "tcp" in options.allowed_transports:
        reached = await_route(place.hosts, deadline)
    host = choose_host(options.advertise, reached or place.host).host
    resources: Resources | None = None
    entry: DynamicRendezvous | None = None
    runtime: Runtime | None = None
    if not options.encrypts and "tcp" in options.allowed_transports and way_back is None:
        logger.warning(
            'encryption is "off": between hosts, whoever is on the way can read and change what members send each other'
        )
    sigint.seal()
    try:
        try:
            resources = Resources(name, options, host)
        finally:
            sigint.unseal()  # a held Ctrl-C is raised here, where the handler below closes what was made
        incarnation = new_incarnation(secrets.randbits(62))
        trust: Trust = "code" if INSTALLED.allowance is None else INSTALLED.allowance.trust
        me = Member(name, place.rank, incarnation, tuple(resources.addresses), host_token(), trust=trust)
        found: Membership | Meeting
        if way_back is not None:
            found = way_back
        elif place.is_dynamic or place.contacts:
            found = meet(place, me, options, deadline)
        else:
            found = join(place, me, options, over)
        if isinstance(found, Meeting):
            entry = DynamicRendezvous(found, me, options, deadline)
            found = entry.membership
        with gc_paused():  # a large group is many objects
            runtime = Runtime(
                lifecycle,
                options,
                resources=resources,
                membership=found,
                place=place,
                entry=entry,
                make_calls=make_calls,
                come_back=come_back,
            )
        for kind in parts:
            runtime.part(kind)
        _connect(runtime, deadline)
    except BaseException as error:
        if runtime is not None:
            runtime.ending.end(Cancelled(f"the start of {name} failed: {error}"))
        elif resources is not None:
            if entry is not None:
                entry.close()
            resources.close()
        raise
    return runtime


def _connect(runtime: Runtime, deadline: float) -> None:
    """Connect to the other members, or join them."""
    names_devices = runtime.options.names_devices
    if names_devices:
        runtime.use_devices().meet(runtime.me)
    # The I/O thread runs quick functions of users, too, and they may ask for the current node.
    runtime.loop.start(runtime.own_thread, runtime.ending.on_io_thread_lost)
    if runtime.entry is not None:
        runtime.links.join(runtime.entry)
        return
    runtime.links.connect_all(deadline)
    if names_devices:
        for peer in runtime.others():
            runtime.use_devices().meet(peer)


def serve(runtime: Runtime) -> None:
    """Make and serve calls from now on; calls that came earlier have waited."""
    lifecycle, info = runtime.lifecycle, runtime.info
    lifecycle.move("connected")
    runtime.executor.start()
    runtime.watch.begin()
    verdict = lifecycle.verdict
    if verdict is not None:  # expelled while it started; a later verdict is the I/O thread's to carry out
        if lifecycle.move("leave"):
            runtime.ending.end(verdict)
        raise verdict
    places = " and ".join(runtime.addresses)
    logger.info("%s is up: rank %d of %d, at %s", info.name, info.id, len(runtime.workers()), places)
