"""What was recorded survives the way; of too much, what matters does."""

from __future__ import annotations

import msgspec
import pytest

from farcall.observe.spans import CALL, OPERATOR, RUN, Bound, Harvest, Span, decode_harvest, encode_harvest


def test_there_and_back() -> None:
    harvest = Harvest(
        [Span(OPERATOR, 1, 2, "aten::add", 3, 4, 5, 0, {"shapes": [[2, 3], []], "kernels": [("k", 0, 1.5)]})],
        [Bound(0, 1, -5, 5)],
        {0: "w0", 1: "w1"},
    )
    back = decode_harvest(encode_harvest(harvest))
    assert back.spans[0].name == "aten::add"
    assert back.spans[0].details["shapes"] == [[2, 3], []]
    assert (back.bounds, back.names, back.dropped) == (harvest.bounds, harvest.names, 0)


def test_of_too_much_the_calls_and_runs_stay() -> None:
    operators = [Span(OPERATOR, 0, 1, "aten::add", number, number + 1, 7) for number in range(10_000)]
    ends = [Span(RUN, 0, 1, "f", 0, 10_001, 7), Span(CALL, 0, 1, "g", 5, 6, 8, 7)]
    data = encode_harvest(Harvest(operators + ends, [], {0: "w0"}, 3), most_bytes=50_000)
    assert len(data) <= 50_000
    back = decode_harvest(data)
    assert [span.name for span in back.spans if span.kind != OPERATOR] == ["f", "g"]
    kept = [span for span in back.spans if span.kind == OPERATOR]
    assert kept == operators[: len(kept)]
    assert 1_000 < len(kept) < 10_000
    assert back.dropped == 3 + 10_000 - len(kept)


def test_other_bytes_are_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_harvest(b"\xc1nonsense")
