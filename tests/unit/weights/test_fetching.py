"""A version on its way: what members answer is looked at before it is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farcall.protocol.weights.fetching import Ask, Chunk
from farcall.protocol.weights.messages import Claim, Key
from farcall.serialize import restrict
from farcall.serialize.allowance import Allowance
from farcall.weights.fetching import Arriving, Fetch
from farcall.weights.manifest import Content

ONE, TWO = Content(7, 1, 1, 4096), Content(7, 2, 1, 100)
NEIGHBOUR = 9


class Fetcher:
    """Blocks of a neighbour that are mapped here, and questions that nobody answers."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.contents = SimpleNamespace(
            peer=lambda member: None,
            borrowed=lambda owner, block_id: SimpleNamespace(size=sizes[block_id]) if block_id in sizes else None,
        )
        self.node = SimpleNamespace(membership=SimpleNamespace(me=SimpleNamespace(incarnation=1, host_token="here")))

    def wake_at(self, when: float) -> None:
        pass

    def forget(self, fetch: Fetch) -> None:
        pass

    def count(self, size_bytes: int) -> None:
        pass


def fetch(sizes: dict[int, int]) -> tuple[Fetch, list[Any]]:
    ends: list[Any] = []
    arriving = Arriving("policy", Key(Claim(1, 7), 1), 7, dict.fromkeys((ONE, TWO)))  # type: ignore[arg-type]
    made = Fetch(Fetcher(sizes), arriving, lambda error, borrowed: ends.append((error, borrowed)))  # type: ignore[arg-type]
    return made, ends


def answered(value: Any) -> Any:
    return SimpleNamespace(value=lambda: value)


def test_blocks_of_a_neighbour_are_taken() -> None:
    made, ends = fetch({5: 4096, 6: 4096})
    made._on_borrowed(NEIGHBOUR, answered([5, 6]))
    [(error, borrowed)] = ends
    assert error is None
    assert list(borrowed) == [ONE, TWO]


def test_nothing_is_read_from_a_block_that_is_given_back_for_that_of_a_neighbour() -> None:
    blocks = {content: SimpleNamespace(view=memoryview(bytearray(content.size_bytes))) for content in (ONE, TWO)}
    seen: list[Any] = []

    def end(error: Any, borrowed: Any) -> None:
        for block in blocks.values():
            block.view[:] = b"x" * block.view.nbytes  # they are filled with something else from here on
        seen.append(made.read(TWO, 0, 100))

    arriving = Arriving("policy", Key(Claim(1, 7), 1), 7, blocks)  # type: ignore[arg-type]
    made = Fetch(Fetcher({5: 4096, 6: 4096}), arriving, end)  # type: ignore[arg-type]
    made._on_chunk(Ask(Chunk(1, 0, 100), NEIGHBOUR), answered(torch.ones(100, dtype=torch.uint8)))
    assert made.read(TWO, 0, 100) == b"\1" * 100
    made._on_borrowed(NEIGHBOUR, answered([5, 6]))
    assert seen == [None]


@pytest.mark.parametrize("wrong", [[5], [5, [6]], [5, 3], None, "56", [6, 5]], ids=str)
def test_a_wrong_answer_of_a_neighbour_makes_it_look_elsewhere(wrong: Any) -> None:
    made, ends = fetch({5: 4096, 6: 100})
    made._on_borrowed(NEIGHBOUR, answered(wrong))
    assert NEIGHBOUR in made._avoided
    assert not [borrowed for error, borrowed in ends if error is None]


@pytest.mark.parametrize("wrong", [None, b"x" * 100, torch.zeros(100), torch.zeros(99, dtype=torch.uint8)], ids=type)
def test_a_wrong_chunk_is_not_written(wrong: Any) -> None:
    made, _ = fetch({})
    made._on_chunk(Ask(Chunk(1, 0, 100), NEIGHBOUR), answered(wrong))
    assert not made._machine.has(Chunk(1, 0, 100))


@pytest.mark.parametrize("with_a_table", [False, True])
@pytest.mark.parametrize("route", [(0, [NEIGHBOUR, 7]), (NEIGHBOUR, [])], ids=["a member in between", "a neighbour"])
def test_with_a_table_bytes_come_from_the_lender_alone(
    with_a_table: bool, route: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member in between may change them and keep the checksums; a neighbour may be one only by its own account."""
    made, _ = fetch({})
    handled: list[Any] = []
    monkeypatch.setattr(made, "_handle", handled.append)
    restrict(Allowance([], [], "data", {"policy": "w0"}) if with_a_table else None)
    try:
        made._on_route(answered(route))
    finally:
        restrict(None)
    [routed] = handled
    assert list(routed.sources) == ([7] if with_a_table else [NEIGHBOUR, 7])
