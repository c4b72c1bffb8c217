"""Whether two processes may share memory: the cheap test before the dial.

Each node tells the others its host token, a unix address and a TCP address. The dialler tries the unix
address if both tokens are equal and not empty, and takes TCP when they differ or on ANY failure of the unix
way, logging once why. The token is only a hint (equal tokens may still not reach each other); the dial is the
proof, and the descriptor passed over it is what grants the memory.
"""

from __future__ import annotations

import os

from farcall.channel.segment import PAGE_BYTES, Segment, segments_work
from farcall.transport.unix import unix_sockets_work

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NETWORK_NAMESPACE = "/proc/self/ns/net"


def host_token() -> str:
    """Equal on nodes that run on one kernel and can reach each other's abstract unix sockets; "" for never.

    The boot id tells kernels apart. Abstract socket names belong to a network namespace, so containers with
    their own differ. The process namespace does not matter: descriptors are passed, never looked up by
    process id.
    """
    if why_not_shared():
        return ""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.stat(_NETWORK_NAMESPACE)
    except OSError:
        return ""
    return f"{boot}/{namespace.st_dev}:{namespace.st_ino}" if boot else ""


def why_not_shared() -> str:
    """Why this process cannot use shared memory at all, for the log; "" if it can. Tries it out."""
    if not unix_sockets_work():
        return "no unix sockets that carry descriptors"
    if not segments_work():
        return "no sealed memory files (memfd) on this system"
    try:
        Segment(0, PAGE_BYTES).close()
    except OSError as error:
        return f"a memory file cannot be made: {error}"
    return ""
