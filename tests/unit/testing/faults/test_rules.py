"""Which messages a rule means, how it counts them, and that its choices depend on the seed alone."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from functools import partial

import pytest
from tests.kit.memory_transport import memory_pair

from farcall.protocol.frames import REQUEST, Frame
from farcall.runtime.peers.interference import find_interference
from farcall.serialize import encode_function
from farcall.testing.faults import Drop, Faults


@dataclass
class Seen:
    names: frozenset[str] = frozenset({"request", "call"})
    frame: Frame = field(default_factory=lambda: Frame(REQUEST))


CALL = Seen()
ANSWER = Seen(frozenset({"response"}))
CONTROL = Seen(frozenset({"control", "Release"}))
MEMORY = Seen(frozenset())


def chosen(faults: Faults, sender: str, receiver: str, count: int, message: Seen = CALL) -> list[bool]:
    direction = faults.direction(sender, receiver)
    return [faults.judge(direction, message)[0] is not None for _ in range(count)]


def test_by_default_a_rule_is_for_the_messages_of_calls():
    faults = Faults()
    faults.drop()
    assert chosen(faults, "a", "b", 1) == [True]
    assert chosen(faults, "a", "b", 1, ANSWER) == [True]
    assert chosen(faults, "a", "b", 1, CONTROL) == [False]
    assert chosen(faults, "a", "b", 1, MEMORY) == [False]


def test_kinds_and_workers():
    faults = Faults()
    faults.drop(kind="Release", to="b", sender=["a", "c"])
    assert chosen(faults, "a", "b", 1, CONTROL) == [True]
    assert chosen(faults, "c", "b", 1, CONTROL) == [True]
    assert chosen(faults, "a", "b", 1, CALL) == [False]
    assert chosen(faults, "b", "a", 1, CONTROL) == [False]
    assert chosen(faults, "d", "b", 1, CONTROL) == [False]


def test_counting_is_for_each_direction():
    faults = Faults()
    rule = faults.drop(kind="request", skip=1, count=2)
    assert chosen(faults, "a", "b", 5) == [False, True, True, False, False]
    assert chosen(faults, "a", "c", 5) == [False, True, True, False, False]
    assert rule.hits == 4
    rule.wait_hits(4, 0.0)
    with pytest.raises(TimeoutError, match="happened 4 times and not 5"):
        rule.wait_hits(5, 0.0)
    assert [(event.fault, event.sender, event.receiver) for event in faults.injections] == [
        (Drop(), "a", "b"),
        (Drop(), "a", "b"),
        (Drop(), "a", "c"),
        (Drop(), "a", "c"),
    ]


def test_a_function_by_itself_or_by_name():
    faults = Faults()
    faults.drop(function=chosen)
    faults.drop(function="json.dumps")
    by_itself = Seen(frame=Frame(REQUEST, function=encode_function(chosen) or b""))
    by_name = Seen(frame=Frame(REQUEST, function=b"pjson\0dumps"))
    assert chosen(faults, "a", "b", 1, by_itself) == [True]
    assert chosen(faults, "a", "b", 1, by_name) == [True]
    assert chosen(faults, "a", "b", 1, CALL) == [False]
    with pytest.raises(ValueError, match="requests do not carry its name"):
        faults.drop(function=partial(chosen, faults))


def test_the_first_rule_that_applies_decides():
    faults = Faults()
    first = faults.drop(kind="request", count=1)
    second = faults.delay(1.0, kind="request")
    chosen(faults, "a", "b", 3)
    assert (first.hits, second.hits) == (1, 2)


def test_the_seed_makes_the_choice_whatever_else_happens():
    def choices(seed: int, disturbed: bool) -> list[bool]:
        faults = Faults(seed)
        faults.drop(kind="request", probability=0.5)
        if disturbed:
            chosen(faults, "a", "c", 17)
            faults = pickle.loads(pickle.dumps(faults))
        return chosen(faults, "a", "b", 64)

    assert choices(1, False) == choices(1, True)
    assert choices(1, False) != choices(2, False)
    assert 8 < sum(choices(1, False)) < 56


def test_a_rule_ends_when_lifted_or_with_its_block():
    faults = Faults()
    with faults.drop() as rule:
        assert chosen(faults, "a", "b", 1) == [True]
    assert rule.lifted
    assert chosen(faults, "a", "b", 1) == [False]
    with faults:
        faults.drop()
        faults.delay(1.0)
    assert faults.rules == ()


def test_pickled_it_begins_anew():
    faults = Faults(7)
    rule = faults.drop(kind="request", count=1)
    assert chosen(faults, "a", "b", 2) == [True, False]
    other = pickle.loads(pickle.dumps(faults))
    assert other.seed == 7
    assert chosen(other, "a", "b", 2) == [True, False]
    assert other.rules[0].hits == 1
    other.rules[0].lift()
    assert other.rules == ()
    assert faults.rules == (rule,)
    assert other.drop().number == 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda faults: faults.drop(count=0),
        lambda faults: faults.drop(skip=-1),
        lambda faults: faults.drop(probability=0.0),
        lambda faults: faults.drop(probability=1.5),
        lambda faults: faults.drop(kind="nothing"),
        lambda faults: faults.delay(-1.0),
        lambda faults: faults.fail(attempts=0),
        lambda faults: faults.duplicate(copies=0),
        lambda faults: faults.reorder(behind=0),
        lambda faults: faults.cut(skip=1),
        lambda faults: faults.half_open(-1.0),
        lambda faults: faults.throttle(0),
    ],
)
def test_what_makes_no_sense_is_refused(wrong):
    faults = Faults()
    with pytest.raises(ValueError):
        wrong(faults)
    assert faults.rules == ()


def test_a_node_has_the_latest_faults_installed_for_its_name():
    faults, mine = Faults(), Faults()
    with faults.installed():
        assert find_interference("w0") is faults
        with mine.installed("w1", "w2"):
            assert [find_interference(name) for name in ("w0", "w1", "w2")] == [faults, mine, mine]
        assert find_interference("w1") is faults
    assert find_interference("w0") is None


def test_installations_of_several_threads_need_not_end_in_order():
    first, second = Faults(), Faults()
    blocks = [first.installed("w0"), second.installed("w0")]
    for block in blocks:
        block.__enter__()
    blocks[0].__exit__(None, None, None)
    assert find_interference("w0") is second
    blocks[1].__exit__(None, None, None)
    assert find_interference("w0") is None


def test_a_transport_without_descriptor_is_refused():
    left, right = memory_pair()
    with pytest.raises(ValueError, match="tcp or unix"):
        Faults().wrap_transport(left, "a", "b", lambda call_id, why: None)
    left.close()
    right.close()
