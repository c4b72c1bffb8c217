# Calls as programs write them, for a type checker: it must accept all lines but those that are marked as refused.
# Never run: test_typed_calls.py reads what pyright says about it.

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from typing import Any, assert_type

import farcall
from farcall import Future, RRef


def scale(x: float, factor: float = 2.0, *, times: int = 1) -> float:
    return x * factor**times


async def ask(question: str) -> bytes:
    return question.encode()


@farcall.functions.async_execution
def later(x: int) -> Future[str]:
    raise NotImplementedError(x)


class Model:
    def __init__(self, width: int, name: str = "") -> None:
        self.width = width
        self.name = name

    def forward(self, x: float, train: bool = False) -> float:
        return x * self.width * train

    async def tell(self, word: str) -> int:
        return len(word)


def plain(ps: farcall.Worker) -> None:
    assert_type(ps.call(scale, 1.0, factor=3.0, times=2), float)
    assert_type(ps.start(scale, 1.0), Future[float])
    assert_type(ps.start(scale, 1.0).result(timeout=2), float)
    ps.call(scale)  # refused: an argument is missing
    ps.call(scale, 1.0, 2.0, 3.0)  # refused: one too many
    ps.call(scale, "one")  # refused: of the wrong type
    ps.call(scale, 1.0, faktor=3.0)  # refused: no such name
    ps.start(scale, 1.0, times="twice")  # refused: of the wrong type
    ps.options(timeout="2")  # refused: of the wrong type


def unwrapped(ps: farcall.Worker) -> None:
    assert_type(ps.call(ask, "why"), bytes)
    assert_type(ps.start(ask, "why"), Future[bytes])
    assert_type(ps.call(later, 1), str)
    assert_type(ps.start(later, 1), Future[str])
    ps.call(ask, 1)  # refused: of the wrong type
    ps.start(later, "one")  # refused: of the wrong type
    answer: Coroutine[Any, Any, bytes] = ps.call(ask, "why")  # refused: the coroutine ran over there
    del answer


async def awaited(ps: farcall.Worker) -> None:
    assert_type(await ps.start(scale, 1.0), float)
    assert_type(await farcall.gather(ps.start(scale, 1.0), ps.start(ask, "why")), tuple[float, bytes])
    async for future in farcall.as_completed([ps.start(ask, "a"), ps.start(ask, "b")]):
        assert_type(future, Future[bytes])


def objects(ps: farcall.Worker) -> None:
    model = ps.create(Model, 8, name="first")
    assert_type(model, RRef[Model])
    assert_type(model.call.forward(1.0, train=True), float)
    assert_type(model.start(Model.forward, 1.0), Future[float])
    assert_type(model.start(Model.tell, "hello"), Future[int])
    model.start.forward(1.0).result()
    ps.create(Model, "eight")  # refused: of the wrong type
    ps.create(Model, 8, title="first")  # refused: no such name
    model.call.forward("one")  # refused: of the wrong type
    model.call.backward()  # refused: no such method
    model.start(Model.forward, "one")  # refused: of the wrong type
    model.start(scale, "one")  # refused: not of that class


def words(text: str) -> Iterator[str]:
    yield from text.split()


async def words_async(text: str) -> AsyncIterator[str]:
    for word in text.split():
        yield word


def total(numbers: Iterable[int]) -> int:
    return sum(numbers)


class Reader:
    def lines(self, limit: int) -> Iterator[bytes]:
        yield b"" * limit


async def streams(ps: farcall.Worker) -> None:
    for word in ps.stream(words, "one two"):
        assert_type(word, str)
    async for word in ps.stream(words_async, "one two"):
        assert_type(word, str)
    reader = ps.create(Reader)
    assert_type(reader.stream(Reader.lines, 3), farcall.Stream[bytes])
    assert_type(ps.call(total, farcall.outgoing([1, 2])), int)
    ps.stream(words, 1)  # refused: of the wrong type
    ps.stream(words_async)  # refused: an argument is missing
    ps.stream(scale, 1.0)  # refused: a number is nothing to iterate over
    reader.stream(Reader.lines, "three")  # refused: of the wrong type
    ps.call(total, farcall.outgoing(["one"]))  # refused: items of the wrong type


@farcall.batched(max_size=8)
def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


class Policy:
    @farcall.batched()
    def act(self, observations: list[float]) -> list[bool]:
        return [observation > 0 for observation in observations]

    @farcall.batched()
    async def act_async(self, observations: list[float]) -> list[bool]:
        return [observation > 0 for observation in observations]


def batches(ps: farcall.Worker) -> None:
    assert_type(ps.call(lengths, "one"), int)
    assert_type(ps.create(Policy).start(Policy.act, 1.0), Future[bool])
    assert_type(ps.create(Policy).start(Policy.act_async, 1.0), Future[bool])
    ps.call(lengths, ["one"])  # refused: callers pass one item
    ps.create(Policy).start(Policy.act, "one")  # refused: of the wrong type


def several(ps: farcall.Worker) -> None:
    assert_type(farcall.gather(ps.start(scale, 1.0), ps.start(ask, "why")).result(1.0), tuple[float, bytes])
    for future in farcall.as_completed([ps.start(scale, 1.0)]):
        assert_type(future.result(), float)
    for result in farcall.map(scale, [1.0, 2.0], workers=[ps, "other"], in_flight=2):
        assert_type(result, float)
    farcall.map(scale, ["one"], workers=[ps])  # refused: items of the wrong type
