"""A member that is slow to connect while its group starts, on a loaded machine: it gets in all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.runtime.link import dialler
from farcall.runtime.link.connector import Connector
from farcall.testing.cluster import temporary_file_url


class ImpatientDialler:
    """A transport whose owner gives up, once it has sent its proof, on the proof of the other side."""

    def __init__(self, transport: Any, until: Callable[[], bool]) -> None:
        self._transport = transport
        self._until = until
        self._waits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def wait_readable(self, timeout_s: float) -> bool:
        self._waits += 1
        if self._waits == 1:
            return bool(self._transport.wait_readable(timeout_s))
        wait_until(self._until)
        return False


@pytest.mark.parametrize("asked_first", [False, True])
def test_who_gave_up_waiting_for_a_proof_that_was_sent_gets_in_all_the_same(
    asked_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow start: the one that was dialled believes to be connected, and is complete, when the other dials again.

    ``asked_first``: it has lost that connection, and has asked for another one, even before.
    """
    options = farcall.RpcBackendOptions(init_method=temporary_file_url(), start_timeout_s=2 * LONG_S)
    nodes = [farcall.Node(f"w{rank}", rank=rank, world_size=2, options=options) for rank in range(2)]
    prove, admit = dialler.prove, Connector.admit
    attempts: list[Any] = []
    asked = threading.Event()

    def impatient(transport: Any, name: Any, me: Any, *args: Any) -> Any:
        if me.member.name == "w1":
            attempts.append(transport)
            if len(attempts) == 1:
                transport = ImpatientDialler(transport, lambda: "running" in repr(nodes[0]))
            elif asked_first:
                assert asked.wait(LONG_S)
        return prove(transport, name, me, *args)

    def admitting(self: Connector, peer: Any, arrived_at: float) -> int | None:
        try:
            return admit(self, peer, arrived_at)
        finally:
            asked.set()

    monkeypatch.setattr(dialler, "prove", impatient)
    monkeypatch.setattr(Connector, "admit", admitting)
    first = threading.Thread(target=nodes[0].start)
    first.start()
    try:
        nodes[1].start()
        first.join()
        assert len(attempts) > 1
        assert nodes[0].rpc_sync("w1", pow, (2, 5)) == nodes[1].rpc_sync("w0", pow, (2, 5)) == 32
    finally:
        first.join()
        for node in nodes:
            node.shutdown(graceful=False)
