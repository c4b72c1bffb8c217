"""Groups with a table of what others may do: what one hostile member tries against another, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest
import torch
from tests.kit.observing import find_observer
from tests.kit.team import dynamic_team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import DuplicateName, HandshakeRefused, NotAllowed, RemoteError, RpcTimeout
from farcall.ids import ForkId, RefId
from farcall.observe.answering import EVENTS, METRICS, SNAPSHOT, TRACE_BEGIN
from farcall.observe.observability import Observability
from farcall.observe.observer import Observer
from farcall.options import MembershipOptions, ObservingOptions, RpcBackendOptions
from farcall.protocol.frames import CONTROL, FAILURE, RESPONSE, Frame
from farcall.protocol.hello import observer_key
from farcall.protocol.membership.events import LinkGivenUp
from farcall.protocol.membership.messages import Entries, Gossip, Obituary, Status, Update
from farcall.protocol.messages import DevicesMapped, encode_message
from farcall.protocol.notes import REFUSED
from farcall.protocol.observing import HIDDEN, Ask, Told
from farcall.protocol.references.messages import Fork, Inquire, Register, Withdraw
from farcall.protocol.weights.messages import BlockOffered, Claim, ClaimAnswered, NameClosed, VersionPushed
from farcall.rpc.node_streams import Streams
from farcall.rpc.references import NodeReferences
from farcall.runtime.node import runtime_of
from farcall.secret import Secret
from farcall.serialize.allowance import Allowance
from farcall.serialize.pickler import restrict
from farcall.weights.node import Weights
from farcall.weights.publication import Publication
from farcall.weights.subscription import Subscription

KEPT_S = 1.0


def name_of_callee() -> str:
    return "it was called"


@pytest.fixture(autouse=True)
def _table() -> Iterator[None]:
    restrict(Allowance([name_of_callee], (), "data"))
    yield
    restrict(None)


def tell(hostile: farcall.Node, to: farcall.Node, message: Any) -> None:
    """Have ``hostile`` send a message about membership that its own machine would not."""
    peers = runtime_of(hostile).links.peers
    runtime_of(hostile).call_soon(lambda: peers.send_news(runtime_of(to).me.incarnation, message))


def test_one_lie_ends_no_member_and_its_name_is_not_to_be_had(tmp_path: Path) -> None:
    with dynamic_team(3, tmp_path, membership=MembershipOptions(reconnect_s=KEPT_S)) as (hostile, caller, victim):
        seen: list[str] = []
        for node in (caller, victim):
            node.on_member(lambda event: seen.append(event.kind))
        accused = runtime_of(victim).me.incarnation
        for status in (Status.DEAD, Status.LEFT):
            tell(hostile, caller, Gossip((Update(accused, status, 0, None, "so I say"),)))
            tell(hostile, victim, Gossip((Update(accused, status, 0, None, "so I say"),)))
        record = msgspec.structs.replace(runtime_of(victim).membership.me, incarnation=accused ^ 1, admission=1000)
        tell(hostile, caller, Gossip((Update(record.incarnation, Status.ALIVE, 0, record),)))
        observing = ObservingOptions(runtime_directory=str(tmp_path / "run"))
        options = RpcBackendOptions(init_method=f"file://{tmp_path}/meet", observing=observing)
        with pytest.raises(DuplicateName):
            farcall.Node("w2", 7, options=options).start()
        assert caller.rpc_sync("w2", name_of_callee) == "it was called"
        assert victim.rpc_sync("w1", name_of_callee) == "it was called"
        assert not {"dead", "left"} & set(seen)


def test_who_is_declared_dead_by_one_loses_that_one_alone(tmp_path: Path) -> None:
    with dynamic_team(3, tmp_path, membership=MembershipOptions(reconnect_s=KEPT_S)) as (hostile, other, victim):
        tell(hostile, victim, Obituary(runtime_of(victim).me.incarnation, "so I say", 2**53, 0))
        wait_until(lambda: [worker.name for worker in victim.members()] == ["w1", "w2"])
        assert other.rpc_sync("w2", name_of_callee) == "it was called"
        assert victim.rpc_sync("w1", name_of_callee) == "it was called"


@pytest.mark.parametrize("what", ["bucket", "record"])
def test_news_that_make_no_sense_are_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Buckets that no table has, and a claim with the record of somebody else, who was then probed and not found."""
    with dynamic_team(3, tmp_path) as (hostile, one, other):
        record = msgspec.structs.replace(runtime_of(other).membership.me, name="w3", rank=3)
        news = Gossip(()) if what == "record" else Entries((1 << 40,), (), True)
        packed = encode_message(news)
        if what == "record":
            valid = Gossip((Update(record.incarnation, Status.ALIVE, 1, record),))
            tag, updates = msgspec.msgpack.decode(encode_message(valid))
            updates[0][0] ^= 1
            packed = msgspec.msgpack.encode([tag, updates])
        runtime_of(hostile).peer("w1").send(Frame(CONTROL, payload=packed))
        wait_until(lambda: "w0" not in [worker.name for worker in one.members()])
        assert other.rpc_sync("w1", name_of_callee) == "it was called"
        assert len(one.members()) == 2
    assert not [record for record in caplog.records if record.exc_info]


def test_a_name_is_to_be_had_again_a_while_after_the_death(tmp_path: Path) -> None:
    """Also by the very process that was declared dead: nobody can tell it from others."""
    with dynamic_team(3, tmp_path, membership=MembershipOptions(reconnect_s=KEPT_S)) as (first, second, victim):
        seen: dict[str, float] = {}
        first.on_member(lambda event: seen.setdefault(event.kind, monotonic()))
        dead = runtime_of(victim).me.incarnation
        for node in (first, second):
            watch = runtime_of(node).watch
            runtime_of(node).call_soon(lambda watch=watch: watch.feed(LinkGivenUp(dead, "a test")))
        wait_until(lambda: "joined" in seen)
        assert seen["joined"] - seen["dead"] >= KEPT_S
        wait_until(lambda: len(second.members()) == 3)
        assert second.rpc_sync("w2", name_of_callee) == "it was called"


def test_a_refusal_that_cannot_be_read_ends_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of call reads it at another place; where the reading thread did, the call never ended."""
    with dynamic_team(2, tmp_path) as (caller, hostile):
        server = runtime_of(hostile).dispatcher._server
        nonsense = [b"", b"\xc1", b"\x92\xa1x\x00"]
        for payload in nonsense:

            def refuse(peer: Any, frame: Frame, payload: bytes = payload) -> None:
                peer.send(Frame(FAILURE, REFUSED, frame.call_id, payload=payload))

            monkeypatch.setattr(server, "accept", refuse)
            with pytest.raises(RemoteError, match="cannot be read"):
                caller.rpc_sync("w1", name_of_callee)
            with pytest.raises(RemoteError, match="cannot be read"):
                list(caller["w1"].stream(name_of_callee))
        monkeypatch.undo()
        assert caller.rpc_sync("w1", name_of_callee) == "it was called"


@pytest.mark.parametrize("is_awaited", [False, True], ids=["waited for", "awaited"])
def test_a_stream_that_is_answered_without_its_items_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_awaited: bool
) -> None:
    async def read_all(stream: Any) -> list[Any]:
        return [item async for item in stream]

    with dynamic_team(2, tmp_path) as (caller, hostile):
        server = runtime_of(hostile).dispatcher._server
        monkeypatch.setattr(server, "accept", lambda peer, frame: peer.send(Frame(RESPONSE, 0, frame.call_id)))
        stream = caller["w1"].options(timeout=0.5).stream(name_of_callee)
        with pytest.raises(RpcTimeout, match=r"more than set timeout \(500 ms\).*not sent all items"):
            asyncio.run(read_all(stream)) if is_awaited else list(stream)
        assert not runtime_of(caller).part(Streams).lingering


# --- weights -------------------------------------------------------------------------------------------


def weights(node: farcall.Node) -> Weights:
    return runtime_of(node).part(Weights)


@pytest.fixture
def published(tmp_path: Path) -> Iterator[tuple[farcall.Node, farcall.Node, farcall.Node, Publication, Subscription]]:
    """A hostile member, the trainer, a reader; what the trainer publishes, and the reader's subscription."""
    restrict(Allowance([name_of_callee], (), "data", {"policy": "w1"}))
    with dynamic_team(3, tmp_path) as (hostile, trainer, reader):
        publication = trainer.publish("policy", {"x": torch.zeros(3)})
        subscription = reader.subscribe("policy")
        publication.push()
        subscription.wait(timeout=LONG_S)
        yield hostile, trainer, reader, publication, subscription


def test_who_may_not_publish_a_name_takes_it_from_nobody(published: Any, caplog: pytest.LogCaptureFixture) -> None:
    hostile, trainer, reader, publication, subscription = published
    with hostile.publish("policy", {"x": torch.ones(3)}) as stolen:
        stolen.push()
        publication.push()  # it was not superseded
        wait_until(lambda: subscription.version.number == 2)
    assert subscription.get()["x"].tolist() == [0.0] * 3
    assert subscription.publisher == trainer.get_worker_info()
    late = reader.subscribe("policy")
    assert late.wait(timeout=LONG_S) == publication.version
    assert any("does not let w0 publish 'policy'" in record.getMessage() for record in caplog.records)


def test_a_version_that_is_pushed_by_another_is_not_read(published: Any) -> None:
    hostile, _, _, publication, subscription = published
    own = hostile.publish("policy", {"x": torch.ones(3)})
    own.push()
    claim = Claim(1000, runtime_of(hostile).me.incarnation)
    pushed = own.versions[1]
    peer = runtime_of(hostile).peer("w2")
    peer.control(VersionPushed("policy", claim, 1000, 2, False, pushed.data))
    peer.control(NameClosed("policy", claim, 0))
    before = publication.push()
    wait_until(lambda: subscription.version == before)
    assert subscription.get()["x"].tolist() == [0.0] * 3


@pytest.mark.parametrize("epoch", [2**62, 2**21])
@pytest.mark.parametrize("of", ["w2", "nobody"])
def test_answers_end_no_tenure_and_use_up_no_numbers(published: Any, epoch: int, of: str) -> None:
    hostile, trainer, reader, publication, subscription = published
    other = runtime_of(reader).me.incarnation if of == "w2" else 77
    answer = ClaimAnswered("policy", publication.machine.claim, Claim(epoch, other), 2**62)
    for to in ("w1", "w2"):
        runtime_of(hostile).peer(to).control(answer)
    assert hostile.rpc_sync("w1", name_of_callee) == hostile.rpc_sync("w2", name_of_callee)  # they have read it
    newest = publication.push()
    assert newest.number < 2**62 - 2**40
    wait_until(lambda: subscription.version == newest)
    assert weights(reader).directory.find_publisher("policy") == publication.machine.claim
    assert trainer.publish("policy", {"x": torch.zeros(3)}).machine.claim.epoch < 100


def test_who_subscribes_to_what_nobody_may_publish_is_told_what_to_write(published: Any) -> None:
    reader = published[2]
    with pytest.raises(NotAllowed, match=r"publishers=\{'other': "):
        reader.subscribe("other")


def test_parts_are_published_by_the_publishers_of_their_name() -> None:
    table = Allowance((), (), publishers={"policy": ["b", "a"], "policy [1 of 2]": "c"})
    assert table.publishers("policy [0 of 2]") == ["a", "b"]
    assert table.publishers("policy [1 of 2]") == ["c"]
    assert table.publishers("policy [1 of 2] ") == []
    again = Allowance(**table.table())  # type: ignore[arg-type]
    assert again.table() == table.table()


# --- observers -----------------------------------------------------------------------------------------

SECRET = "the cluster's secret, which all members know"
OBSERVERS = "the observers' secret, which some know"


@pytest.fixture
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[farcall.Node]]:
    """Members that all know the secret of the cluster; parametrized with the secret of observers."""
    observing = ObservingOptions(runtime_directory=str(tmp_path / "run"), secret=request.param)
    with dynamic_team(3, tmp_path, observing=observing, secret=SECRET) as nodes:
        for node in nodes:
            runtime_of(node).part(Observability)
        yield nodes


def answers(asker: farcall.Node, to: farcall.Node, ask: Ask) -> list[bytes]:
    """What ``to`` answers."""
    told: list[Told] = []
    runtime_of(asker).hooks.controls[Told] = lambda peer, message: told.append(message)
    runtime_of(asker).peer(to.get_worker_info().name).control(ask)
    wait_until(lambda: told)
    return [one.data for one in told]


@pytest.mark.parametrize("watched", [None, OBSERVERS], indirect=True)
@pytest.mark.parametrize("subject", [SNAPSHOT, METRICS, EVENTS, TRACE_BEGIN])
def test_a_member_that_asks_is_shown_nothing(watched: list[farcall.Node], subject: str) -> None:
    hostile, one, _ = watched
    me = runtime_of(one).me.incarnation
    guessed = Ask(7, subject).proved(observer_key(Secret(SECRET.encode()).values[0]), me)
    assert answers(hostile, one, Ask(7, subject)) == answers(hostile, one, guessed) == [b""]


@pytest.mark.parametrize("watched", [OBSERVERS], indirect=True)
def test_a_question_that_was_proved_to_one_is_good_for_no_other(watched: list[farcall.Node]) -> None:
    hostile, one, another = watched
    ask = Ask(7, SNAPSHOT).proved(observer_key(Secret(OBSERVERS.encode()).values[0]), runtime_of(one).me.incarnation)
    assert answers(hostile, another, ask) == [b""]
    assert answers(hostile, one, msgspec.structs.replace(ask, subject=METRICS)) == [b""]
    assert answers(hostile, one, ask) != [b""]


@pytest.mark.parametrize("watched", [None, OBSERVERS], indirect=True)
def test_the_secret_of_the_members_shows_nothing(watched: list[farcall.Node]) -> None:
    for address in runtime_of(watched[1]).addresses:
        with pytest.raises(HandshakeRefused, match="FARCALL_OBSERVERS_SECRET"):
            Observer.connect(address, observer_key(Secret(SECRET.encode()).values[0]))


@pytest.mark.parametrize("watched", [OBSERVERS], indirect=True)
def test_who_knows_the_secret_of_observers_sees_all(watched: list[farcall.Node]) -> None:
    address = next(one for one in runtime_of(watched[1]).addresses if one.startswith("tcp:"))
    options = RpcBackendOptions(observing=ObservingOptions(secret=OBSERVERS))
    with Observer.connect_with_secret(address, options) as observer:
        assert [one.worker for one in observer.snapshots(LONG_S).answers] == ["w0", "w1", "w2"]


@pytest.mark.parametrize("watched", [None], indirect=True)
def test_without_that_secret_a_user_sees_its_own_worker(watched: list[farcall.Node], tmp_path: Path) -> None:
    with find_observer(tmp_path / "run", "w1") as observer:
        heard = observer.snapshots(LONG_S)
    assert [one.worker for one in heard.answers] == [observer.member]
    assert [one.gone for one in heard.silent] == [HIDDEN] * 2


# --- places --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        Register([Fork(RefId(1, 2), ForkId(3, 4), 5, 6, 7)]),
        Inquire(1, [1, 2, 3]),
        Withdraw([Fork(RefId(1, 2), ForkId(3, 4), 5, 6, 7)]),
    ],
)
def test_with_data_alone_nothing_is_kept_of_references(tmp_path: Path, message: Any) -> None:
    with dynamic_team(2, tmp_path) as (hostile, one):
        references = runtime_of(one).part(NodeReferences)
        before = references.snapshot()
        runtime_of(hostile).peer("w1").control(message)
        assert hostile.rpc_sync("w1", name_of_callee) == "it was called"
        assert references.snapshot() == before
        assert not references._machine._dead


def test_blocks_that_are_offered_without_end_end_the_link(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.weights.subscriptions.MOST_BLOCKS", 3)
    hostile, _, reader, publication, subscription = published
    peer = runtime_of(hostile).peer("w2")
    for number in range(8):
        peer.control(BlockOffered(number, 0))
    wait_until(lambda: [worker.name for worker in reader.members()] == ["w1", "w2"])
    wait_until(lambda: not weights(reader).subscriptions._refused)
    newest = publication.push()
    wait_until(lambda: subscription.version == newest)


def test_a_map_of_devices_that_makes_no_sense_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with dynamic_team(3, tmp_path) as (hostile, one, other):
        runtime_of(hostile).peer("w1").control(DevicesMapped([("nonsense", "cuda:0")], False))
        wait_until(lambda: [worker.name for worker in one.members()] == ["w1", "w2"])
        assert other.rpc_sync("w1", name_of_callee) == "it was called"
    (said,) = [record for record in caplog.records if "cannot read a message from w0" in record.getMessage()]
    assert said.exc_info is None
    assert "no device" in said.getMessage()
