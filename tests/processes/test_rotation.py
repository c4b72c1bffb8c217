"""The secret is changed while a cluster runs: nobody is shut out meanwhile, and then the old one opens nothing."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from tests.kit.observing import find_observer
from tests.kit.ports import tcp_url
from tests.kit.times import LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import InitError, WrongSecret
from farcall.options import ObservingOptions, RpcBackendOptions
from farcall.runtime.node import runtime_of
from farcall.testing.cluster import start_processes, temporary_file_url

OLD, NEW = "the secret of last year", "the secret of this year"
PHASES = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]


class Hosts:
    """The file of each member, as on hosts of their own."""

    def __init__(self, directory: Path, url: str = "") -> None:
        self.directory = directory
        self.url = url or tcp_url()

    def put(self, name: str, lines: tuple[str, ...]) -> str:
        path, partial = self.directory / name, self.directory / f"{name}.new"
        partial.write_text("\n".join(lines) + "\n")
        partial.chmod(0o600)
        partial.rename(path)
        return str(path)

    def member(
        self, name: str, rank: int, lines: tuple[str, ...], start_timeout_s: float = LONG_S, size: int | None = None
    ) -> farcall.Node:
        options = RpcBackendOptions(
            init_method=self.url,
            secret_file=self.put(name, lines),
            transports=("tcp",),
            membership=PATIENT,
            start_timeout_s=start_timeout_s,
            observing=ObservingOptions(runtime_directory=str(self.directory / "presence")),
        )
        return farcall.Node(name, rank, size, options)


def name_of(node: farcall.Node) -> str:
    return runtime_of(node).info.name


def call_each_other(nodes: list[farcall.Node]) -> None:
    for one in nodes:
        for other in nodes:
            if one is not other:
                wait_until(lambda one=one, other=other: name_of(other) in [info.name for info in one.workers()])
                assert one.rpc_sync(name_of(other), int, ("7",), timeout=LONG_S) == 7


def cut(node: farcall.Node) -> None:
    """Have every connection of ``node`` made again."""
    for peer in runtime_of(node).others():
        peer.link.interrupt("the test wants another one")


def test_the_secret_of_a_running_cluster_is_changed_and_members_join_in_every_phase(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    with ExitStack() as stack:
        members = []
        for rank in range(2):
            node = hosts.member(f"w{rank}", rank, PHASES[0])
            node.start()
            stack.callback(node.shutdown, False)
            members.append(node)
        rank = 2
        for before, after in pairwise(PHASES):
            for name in ("w0", "w1"):  # one host has the new file, and the other not yet
                hosts.put(name, after)
                for lines in (before, after):
                    with hosts.member(f"late{rank}", rank, lines) as late:
                        call_each_other([*members, late])
                    rank += 1
                cut(members[0])
                call_each_other(members)
        with find_observer(tmp_path / "presence", "w0") as observer:
            assert observer.snapshots(LONG_S)
        with pytest.raises(InitError):
            hosts.member("expired", rank, PHASES[0], start_timeout_s=2.0).start()
        call_each_other(members)


def test_newcomers_with_the_new_secret_alone_get_in_although_nobody_joined_meanwhile(tmp_path: Path) -> None:
    """The list in the store was proved with the old secret, before the newcomers' only one existed."""
    hosts = Hosts(tmp_path)
    with ExitStack() as stack:
        founder = hosts.member("w0", 0, PHASES[0])
        founder.start()
        stack.callback(founder.shutdown, False)
        for phase in PHASES[1:]:
            hosts.put("w0", phase)
        with hosts.member("late", 1, (NEW,)) as late:
            call_each_other([founder, late])
        with pytest.raises(InitError):
            hosts.member("expired", 2, (OLD,), start_timeout_s=2.0).start()


def test_while_members_know_two_secrets_one_is_enough_for_newcomers(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    with ExitStack() as stack:
        founder = hosts.member("w0", 0, PHASES[0])
        founder.start()
        stack.callback(founder.shutdown, False)
        rank = 1
        for phase in PHASES[1:3]:
            hosts.put("w0", phase)
            for secret in (NEW, OLD, NEW):
                with hosts.member(f"late{rank}", rank, (secret,)) as late:
                    call_each_other([founder, late])
                rank += 1


def serve(rank: int, directory: str, url: str) -> None:
    Hosts(Path(directory), url).member("w1", 1, PHASES[0], size=2).start()
    threading.Event().wait()


def test_a_successor_in_a_group_of_fixed_size_that_has_the_new_secret_alone_names_a_member(tmp_path: Path) -> None:
    """What such a group wrote to its store when it formed stays as it is; the error says which way is left."""
    hosts = Hosts(tmp_path, temporary_file_url())
    (other,) = start_processes(1, serve, str(tmp_path), hosts.url)
    with ExitStack() as stack:
        stack.callback(other.end)
        node = hosts.member("w0", 0, PHASES[0], size=2)
        node.start()
        stack.callback(node.shutdown, False)
        for phase in PHASES[1:]:
            for name in ("w0", "w1"):
                hosts.put(name, phase)
        other.kill(signal.SIGKILL)
        other.process.join()
        with pytest.raises(WrongSecret, match="a group that changed its secret"):
            hosts.member("w1", 1, (NEW,), size=2).start()
        (address,) = [one for one in runtime_of(node).addresses if one.startswith("tcp")]
        hosts.url = "farcall://" + address.partition("://")[2]
        late = hosts.member("w1", 1, (NEW,), size=2)
        late.start()
        stack.callback(late.shutdown, False)
        wait_until(lambda: runtime_of(node).peer("w1").incarnation == runtime_of(late).me.incarnation)
        call_each_other([node, late])
