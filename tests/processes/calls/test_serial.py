"""Objects whose calls run one at a time. Nodes of one process, so that a test can look into the object."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from time import sleep
from typing import Any

import pytest
import torch
from tests.kit.overdue import let_time_run_out
from tests.kit.team import team
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import RpcError, RpcTimeout
from farcall.observe import answering
from farcall.observe.troubles import Trouble, find_troubles
from farcall.options import MemoryOptions
from farcall.protocol.streams import WINDOW_BYTES
from farcall.rpc import stream_writing
from farcall.runtime.calls import pending, serving

made: list[Actor] = []
gate = threading.Event()


class Actor:
    """Notes who is inside, and in which order calls begin."""

    def __init__(self) -> None:
        self._inside = threading.Lock()
        self.gate = threading.Event()
        self.begun: list[object] = []
        self.at_once = 0
        self.me: farcall.RRef[Actor] | None = None
        made.append(self)

    def _note(self, what: object) -> None:
        if not self._inside.acquire(blocking=False):
            self.at_once += 1
            return
        self.begun.append(what)
        sum(range(300))
        self._inside.release()

    def note(self, what: object, weight: object = None) -> object:
        self._note(what)
        return what

    async def note_slowly(self, what: object) -> object:
        self._note(what)
        for _ in range(3):
            await asyncio.sleep(0)
            self._note(("again", what))
        return what

    def count(self, until: int) -> Iterator[int]:
        for number in range(until):
            self._note(("item", number))
            yield number

    async def count_slowly(self, until: int) -> AsyncIterator[int]:
        for number in range(until):
            self._note(("item", number))
            await asyncio.sleep(0)
            yield number

    def take(self, items: farcall.Stream[object]) -> None:
        for item in items:
            self._note(("taken", item))

    def wait(self) -> None:
        assert self.gate.wait(LONG_S)

    async def wait_at_ease(self) -> str:
        while not self.gate.is_set():
            await asyncio.sleep(0.001)
        return "opened"

    def open(self) -> None:
        self.gate.set()

    def seen(self) -> tuple[list[object], int]:
        return self.begun, self.at_once

    def know(self, me: farcall.RRef[Actor]) -> None:
        self.me = me

    def ask_myself(self) -> object:
        assert self.me is not None
        return self.me.call.note("from within")

    async def ask_myself_at_ease(self) -> object:
        assert self.me is not None
        return await self.me.start.note("from within")


def make_later() -> Actor:
    assert gate.wait(LONG_S)
    return Actor()


def use(actor: farcall.RRef[Actor], name: str, count: int) -> None:
    for future in [actor.start.note((name, number)) for number in range(count)]:
        future.result(LONG_S)


@pytest.fixture
def nodes() -> Iterator[list[farcall.Node]]:
    made.clear()
    with team([None] * 3, size=3, rpc_timeout=LONG_S, num_worker_threads=8) as started:
        yield started
    started.clear()  # pytest holds what a fixture gave, and the first node holds the store
    made.clear()


@pytest.fixture
def actor(nodes: list[farcall.Node]) -> farcall.RRef[Actor]:
    return nodes[0]["w1"].options(serial=True).create(Actor)


def of(begun: list[object], caller: str) -> list[int]:
    return [number for name, number in begun if name == caller]  # type: ignore[misc, attr-defined]


def test_calls_run_one_at_a_time_and_in_the_order_of_each_caller(
    nodes: list[farcall.Node], actor: farcall.RRef[Actor]
) -> None:
    tensor = torch.ones(100_000)  # a large call is not passed by the small ones behind it
    others = [nodes[0][name].start(use, actor, name, 200) for name in ("w1", "w2")]
    futures = [actor.start.note(("w0", number), tensor if number % 20 == 0 else None) for number in range(200)]
    futures += [actor.start.note_slowly(("async", number)) for number in range(50)]
    for future in [*futures, *others]:
        future.result(LONG_S)
    begun, at_once = actor.call.seen()
    assert at_once == 0
    for caller, count in (("w0", 200), ("w1", 200), ("w2", 200), ("async", 50)):
        assert of(begun, caller) == list(range(count)), caller


def test_without_serial_calls_run_side_by_side(nodes: list[farcall.Node]) -> None:
    actor = nodes[0]["w1"].create(Actor)
    waits = actor.start.wait()
    actor.call.open()
    waits.result(LONG_S)


def test_a_plain_method_keeps_others_out_and_an_async_def_lets_them_in(actor: farcall.RRef[Actor]) -> None:
    waits = actor.start.wait_at_ease()
    actor.call.open()  # gets in while the other awaits something
    assert waits.result(LONG_S) == "opened"
    made[0].gate.clear()
    waits_alone = actor.start.wait()
    behind = actor.start.note("behind")
    assert not behind.done()
    assert made[0].begun == []
    made[0].gate.set()
    assert behind.result(LONG_S) == "behind"
    waits_alone.result(LONG_S)  # its answer may be the second to leave


def wait_made(nodes: list[farcall.Node], actor: farcall.RRef[Actor]) -> None:
    """Until there is the object, and w1 has nothing to do: what comes next can be counted."""
    actor.call.seen()
    wait_until(lambda: not nodes[1]._runtime.server.active, "w1 has nothing to do")


def explained(nodes: list[farcall.Node], actor: farcall.RRef[Actor], monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of a call that times out while it waits for its turn. A busy machine must not cut it short."""
    monkeypatch.setattr(pending, "EXPLAIN_S", LONG_S)
    monkeypatch.setattr(answering, "explaining_s", lambda timeout_s: LONG_S)
    before = len(nodes[1]._runtime.server.active)
    late = actor.rpc_async(timeout=LONG_S / 2).note("late")
    wait_until(lambda: len(nodes[1]._runtime.server.active) > before, "it waits for its turn")
    let_time_run_out(nodes[0], late)
    with pytest.raises(RpcTimeout) as raised:
        late.result()
    return str(raised.value)


def test_a_timeout_says_who_has_the_object(
    nodes: list[farcall.Node], actor: farcall.RRef[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_made(nodes, actor)
    waits = actor.start.wait()
    behind = actor.start.note("behind")
    wait_until(lambda: len(nodes[1]._runtime.server.active) == 2)
    text = explained(nodes, actor, monkeypatch)
    assert re.search(
        r"it has waited on w1 for its turn for \d+\.\d\d s, as its object is serial: rref\.wait\(\) for w0 has run "
        r"for \d+\.\d\d s, and 2 calls wait for their turns$",
        text,
    ), text
    assert "threads" not in text
    made[0].gate.set()
    waits.result(LONG_S)
    behind.result(LONG_S)


def test_a_timeout_says_that_the_object_is_not_made_yet(
    nodes: list[farcall.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.clear()
    actor = nodes[0]["w1"].options(serial=True).create(make_later)
    wait_until(lambda: len(nodes[1]._runtime.server.active) == 1, "it is being made")
    try:
        assert "for its turn" in (text := explained(nodes, actor, monkeypatch)), text
        assert "the object is being made, or serves a batch" in text
    finally:
        gate.set()
    actor.call.note("made")


def test_a_cancelled_call_that_waits_does_not_begin(nodes: list[farcall.Node], actor: farcall.RRef[Actor]) -> None:
    waits = actor.start.wait()
    unwanted, wanted = actor.start.note("unwanted"), actor.start.note("wanted")
    assert unwanted.cancel()
    server, caller = nodes[1]._runtime.server, nodes[1]._runtime.peer("w0")
    wait_until(lambda: server.find(caller, wanted.call_id) is not None)  # behind the other one
    wait_until(lambda: (found := server.find(caller, unwanted.call_id)) is None or found.cancelled)
    made[0].gate.set()
    waits.result(LONG_S)
    wanted.result(LONG_S)
    assert made[0].begun == ["wanted"]


def test_a_generator_lets_others_in_after_each_item(actor: farcall.RRef[Actor]) -> None:
    for items in (actor.stream.count(100), actor.stream.count_slowly(100)):
        for number in items:
            assert actor.call.note(number) == number  # would never come if the stream had the object to itself
    with actor.stream.count(10**9) as endless:
        assert next(endless) == 0
    begun, at_once = actor.call.seen()
    assert at_once == 0
    assert [what for what in begun if isinstance(what, int)] == [*range(100), *range(100)]


def test_a_method_that_waits_for_its_own_object_is_told_at_once(actor: farcall.RRef[Actor]) -> None:
    actor.call.know(actor)
    with pytest.raises(RpcError, match=r"ask_myself\(\) waits for note\(\) of its own object"):
        actor.call.ask_myself()
    assert actor.call.ask_myself_at_ease() == "from within"
    made[0].me = None  # a reference from the object to itself would keep it for good


def ask(actor: farcall.RRef[Actor]) -> Iterator[object]:
    yield actor.call.note("from a stream")


def test_a_stream_that_waits_for_its_reader_is_a_circle(nodes: list[farcall.Node], actor: farcall.RRef[Actor]) -> None:
    actor.call.note("made")
    future = actor.rpc_async(timeout=LONG_S).take(farcall.outgoing(ask(actor)))

    def troubles() -> list[Trouble]:
        return find_troubles([node.snapshot() for node in nodes], set())

    wait_until(lambda: bool(troubles()))
    (trouble,) = troubles()
    assert trouble.text == "w0 and w1 wait for each other"
    steps = sorted(re.sub(r"[\d.]+ s|\(thread [^)]*\)", "_", step) for step in trouble.steps)
    assert steps == [
        "w0 _ has waited _ for w1 note()",
        "w1 _ has waited _ for w0 farcall.outgoing()",
        "which has waited _ for its turn: rref.take() for w0 has the object",
    ]
    assert future.cancel()
    wait_until(lambda: not troubles())


def test_a_stream_that_waits_for_its_reader_gives_the_object_back_at_the_timeout(
    nodes: list[farcall.Node], actor: farcall.RRef[Actor]
) -> None:
    """``take`` has the object and waits for an item; to make that, its caller waits for the object."""
    wait_made(nodes, actor)
    takes = actor.rpc_async(timeout=LONG_S / 2).take(farcall.outgoing(ask(actor)))
    wait_until(lambda: len(nodes[1]._runtime.server.active) == 2, "both wait")
    let_time_run_out(nodes[0], takes)
    with pytest.raises(RpcTimeout):
        takes.result()
    assert actor.rpc_sync(timeout=AT_ONCE_S).note("after") == "after"
    assert made[0].begun == ["from a stream", "after"]
    wait_until(lambda: not nodes[0]._runtime.calls.snapshot())


def test_the_object_that_is_never_made_fails_its_calls(nodes: list[farcall.Node]) -> None:
    actor = nodes[0]["w1"].options(serial=True).create(Actor.note, None, None)  # type: ignore[arg-type]
    futures = [actor.start.note(number) for number in range(5)]
    for future in futures:
        with pytest.raises(AttributeError):
            future.result(LONG_S)


def test_handles_say_that_they_make_serial_objects() -> None:
    handle = farcall.worker("w1").options(serial=True)
    assert handle != farcall.worker("w1")
    assert repr(handle) == "farcall.worker('w1', serial=True)"
    assert handle.options(timeout=2.0) == farcall.worker("w1").options(timeout=2.0, serial=True)


class Values(RuntimeError):
    """An error that carries what the next call changes."""


class State:
    """Returns the tensor that its next call changes, and how often it has been changed."""

    def __init__(self) -> None:
        self.values = torch.zeros(1 << 16)
        self.changes = 0

    def get(self) -> torch.Tensor:
        return self.values

    def look(self) -> tuple[int, torch.Tensor]:
        return self.changes, self.values

    async def look_at_ease(self) -> tuple[int, torch.Tensor]:
        await asyncio.sleep(0)
        return self.changes, self.values

    async def fail_at_ease(self) -> None:
        raise Values(self.changes, self.values)

    @farcall.batched(max_size=2, within_s=0.0005)
    async def look_together(self, numbers: list[int]) -> list[tuple[int, torch.Tensor]]:
        return [(self.changes, self.values)] * len(numbers)

    def looks(self, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        for _ in range(count):
            yield self.changes, self.values

    async def looks_at_ease(self, count: int) -> AsyncIterator[tuple[int, torch.Tensor]]:
        for _ in range(count):
            yield self.changes, self.values

    def add(self) -> None:
        self.changes += 1
        self.values += 1


@pytest.fixture
def slow_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the object while something is encoded gets the time to run."""

    def slowly(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any) -> Any:
            sleep(0.002)
            return original(*args)

        return write

    for module in (serving, stream_writing):
        monkeypatch.setattr(module, "write_value", slowly(module.write_value))
    monkeypatch.setattr(serving, "encode_failure", slowly(serving.encode_failure))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_result_has_the_values_of_its_own_call(shared_memory: bool) -> None:
    """Also one that the I/O thread leaves to a worker to write, since it is large and does not go by shared memory."""
    with team([None] * 2, memory=MemoryOptions(shared_memory=shared_memory)) as nodes:
        state = nodes[0]["w1"].options(serial=True).create(State)
        for _ in range(50):  # now these are known as quick: the I/O thread runs them
            state.rpc_sync().add()
            state.rpc_sync().get()
        futures = []
        for _ in range(100):
            futures.append(state.rpc_async().get())
            state.rpc_async().add()
        for number, future in enumerate(futures, 50):
            assert future.wait().unique().tolist() == [number]


def looked(future: farcall.Future[tuple[int, torch.Tensor]]) -> tuple[int, torch.Tensor]:
    try:
        return future.result(LONG_S)
    except Values as error:
        return error.args[0], error.args[1]


@pytest.mark.parametrize("method", [State.look, State.look_at_ease, State.fail_at_ease, State.look_together])
def test_no_later_call_changes_a_result_before_it_is_sent(method: Callable[..., Any], slow_to_encode: None) -> None:
    with team([None] * 2) as nodes:
        state = nodes[0]["w1"].options(serial=True).create(State)
        arguments = (0,) if method is State.look_together else ()
        for _ in range(20):
            future = state.start(method, *arguments)
            adds = [state.start.add() for _ in range(5)]
            changes, values = looked(future)
            assert values.unique().tolist() == [changes]
            for add in adds:
                add.result(LONG_S)


@pytest.mark.parametrize("method", [State.looks, State.looks_at_ease])
def test_no_later_call_changes_an_item_before_it_is_sent(method: Callable[..., Any], slow_to_encode: None) -> None:
    with team([None] * 2) as nodes:
        state = nodes[0]["w1"].options(serial=True).create(State)
        for count in (20, 2 * WINDOW_BYTES // (4 << 16)):  # the latter waits for its reader
            items = state.stream(method, count)
            adds = [state.start.add() for _ in range(count)]
            for changes, values in items:
                assert values.unique().tolist() == [changes]
            for add in adds:
                add.result(LONG_S)
