"""The machines of a stream, over any order of messages: no item lost, doubled or out of order, and bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farcall.protocol.streams import Part, ReaderMachine, WriterMachine, decode_part, encode_part

SIZES = st.lists(st.integers(0, 40), max_size=60)


@given(
    sizes=SIZES,
    window=st.tuples(st.integers(1, 8), st.integers(1, 64)),
    choices=st.randoms(use_true_random=False),
)
def test_items_arrive_in_order_within_the_window(sizes: list[int], window: tuple[int, int], choices) -> None:  # type: ignore[no-untyped-def]
    """Parts and credits in any order, each perhaps twice; the reader takes when it likes."""
    items, size_bytes = window
    writer = WriterMachine(items, size_bytes)
    reader: ReaderMachine[list[int]] = ReaderMachine(items, size_bytes)
    waiting = list(range(len(sizes)))
    parts: list[tuple[int, list[int]]] = []
    credits: list[tuple[int, int]] = []
    ready: list[int] = []
    taken: list[int] = []
    ended = False
    for _ in range(20_000):
        acts = []
        if waiting and writer.has_room:
            acts.append("write")
        if parts:
            acts.append("deliver")
        if credits:
            acts.append("grant")
        if ready:
            acts.append("take")
        if not waiting and not ended:
            acts.append("end")
        if not acts:
            break
        act = choices.choice(acts)
        if act == "write":
            bunch = []
            while waiting and writer.has_room and len(bunch) < 3:
                item = waiting.pop(0)
                first = writer.send(1, sizes[item])
                bunch.append((first, item))
            parts.append((bunch[0][0], [item for _, item in bunch]))
        elif act == "deliver":
            index = choices.randrange(len(parts))
            first, bunch_items = parts[index] if choices.random() < 0.2 else parts.pop(index)
            for part in reader.on_part(first, len(bunch_items), bunch_items):
                ready.extend(part)
        elif act == "grant":
            index = choices.randrange(len(credits))
            writer.on_credit(*(credits[index] if choices.random() < 0.2 else credits.pop(index)))
        elif act == "take":
            item = ready.pop(0)
            taken.append(item)
            told = reader.take(1, sizes[item])
            if told is not None:
                credits.append(told)
        else:
            ended = True
            reader.on_last(writer.sent_items)
        on_the_way = writer.sent_items - len(taken)
        assert on_the_way <= items
        bytes_on_the_way = writer.sent_bytes - sum(sizes[item] for item in taken)
        assert bytes_on_the_way < size_bytes + max(sizes, default=0) + 1
    else:
        raise AssertionError("it does not come to an end")
    assert taken == list(range(len(sizes)))
    assert reader.complete


@given(st.integers(0, 2**60), st.booleans(), st.integers(0, 2**40), st.booleans())
def test_the_head_of_a_letter_is_read_as_it_was_written(number: int, outgoing: bool, first: int, last: bool) -> None:
    part = Part(number, outgoing, first, [(3, 10, 0), (1, 2**33, 2)], last)
    assert decode_part(encode_part(part)) == part
    assert part.items == 4
