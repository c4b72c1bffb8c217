"""Published weights between nodes of one process: whole versions, shared memory, takeovers, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from time import monotonic

import pytest
import torch
from tests.kit.team import dynamic_team, team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until
from torch import nn

import farcall
from farcall.errors import CorruptWeights, PublicationClosed, RpcTimeout, Superseded
from farcall.protocol.weights import publisher
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import runtime_of
from farcall.weights import subscriptions
from farcall.weights.node import Weights


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[farcall.Node]]:
    monkeypatch.setattr(publisher, "CLAIM_S", 10 * LONG_S)  # all know the publisher, however busy the machine is
    with team([None] * 3, size=3) as nodes:
        yield nodes


class Net(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def filled(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for tensor in chain(model.parameters(), model.buffers()):
            tensor.fill_(value)
    return model


def weights_of(node: farcall.Node) -> Weights:
    return node._runtime.part(Weights)


def test_every_subscriber_loads_what_was_pushed(nodes: list[farcall.Node]) -> None:
    model = filled(Net(), 1)
    subscriptions = [node.subscribe("policy") for node in nodes]
    policy = nodes[0].publish("policy", model)
    version = policy.push()
    for subscription in subscriptions:
        assert subscription.wait(timeout=LONG_S) == version
        copy = filled(Net(), 0)
        assert subscription.load_into(copy) == version
        for name, tensor in copy.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
        assert subscription.publisher == nodes[0].get_worker_info()
    wait_until(lambda: set(policy.subscribers.values()) == {version})
    assert sorted(policy.subscribers) == ["w0", "w1", "w2"]


def test_a_later_subscriber_gets_the_newest_version(nodes: list[farcall.Node]) -> None:
    values = {"x": torch.zeros(4)}
    with nodes[1].publish("late", values) as late:
        for step in range(5):
            values["x"].fill_(step)
            version = late.push()
        subscription = nodes[2].subscribe("late")
        assert subscription.wait(timeout=LONG_S) == version
        assert subscription.get()["x"].tolist() == [4.0] * 4


def test_a_version_stays_as_it_was_while_somebody_reads_it(nodes: list[farcall.Node]) -> None:
    values = {"x": torch.zeros(1000)}
    publication = nodes[0].publish("held", values)
    subscription = nodes[1].subscribe("held")
    first = publication.push()
    subscription.wait(timeout=LONG_S)
    held = subscription.get()
    for step in range(1, 20):
        values["x"].fill_(step)
        newest = publication.push()
        subscription.wait(newer_than=first, timeout=LONG_S)
        wait_until(lambda: subscription.version == newest)  # noqa: B023
        assert held["x"].eq(0).all()
    assert subscription.get()["x"].eq(19).all()
    # A release may come late; the next push trims.
    wait_until(lambda: len(weights_of(nodes[0]).blocks._blocks) <= 6 or publication.push() is None)


def test_memory_is_bounded_and_filled_again(nodes: list[farcall.Node]) -> None:
    values = {"x": torch.zeros(1 << 18)}
    publication = nodes[0].publish("bounded", values)
    subscriptions = [node.subscribe("bounded") for node in nodes]
    for step in range(30):
        values["x"].fill_(step)
        version = publication.push()
        for subscription in subscriptions:
            wait_until(lambda: subscription.version == version)  # noqa: B023
            assert subscription.get()["x"].eq(step).all()
    gc.collect()
    blocks = weights_of(nodes[0]).blocks
    wait_until(lambda: len(blocks._blocks) <= 5 or publication.push() is None)
    assert max(block.fill for block in blocks._blocks.values()) > 3


def test_a_stray_write_harms_nobody_else(nodes: list[farcall.Node]) -> None:
    values = {"x": torch.ones(5000)}
    publication = nodes[0].publish("stray", values)
    mine, other = nodes[1].subscribe("stray"), nodes[2].subscribe("stray")
    publication.push()
    mine.wait(timeout=LONG_S)
    other.wait(timeout=LONG_S)
    mine.get()["x"].fill_(7)
    assert mine.get()["x"].eq(1).all()
    assert other.get()["x"].eq(1).all()
    other.verify()


def test_unchanged_tensors_are_shared_between_versions(nodes: list[farcall.Node]) -> None:
    values = {"body": torch.zeros(1 << 16), "head": torch.zeros(16)}
    publication = nodes[0].publish("only", values)
    subscription = nodes[1].subscribe("only")
    first = publication.push()
    subscription.wait(timeout=LONG_S)
    values["body"].fill_(1)
    values["head"].fill_(1)
    second = publication.push(only=["head"])
    assert subscription.wait(newer_than=first, timeout=LONG_S) == second
    tensors = subscription.get()
    assert tensors["head"].eq(1).all()
    assert tensors["body"].eq(0).all()
    old = subscription.get(first)
    assert old["head"].eq(0).all()
    subscription.verify()
    assert weights_of(nodes[0]).blocks.total_bytes < 2 * values["body"].nbytes
    with pytest.raises(KeyError, match="no tensor hand"):
        publication.push(only=["hand"])


def test_tied_tensors_views_and_other_values_travel(nodes: list[farcall.Node]) -> None:
    base = torch.arange(100.0)
    values = {
        "tied": {"a": base, "b": base},
        "window": base[10:20],
        "turned": torch.arange(6.0).view(2, 3).t(),
        "count": torch.tensor(3),
        "nothing": torch.empty(0, 4),
        "complex": torch.tensor([1 + 2j]).conj(),
        "layers": [torch.ones(2), (torch.zeros(1), "kept")],
        "step": 17,
        "text": {"name": "policy", "sizes": [1, 2]},
        "none": {},
    }
    publication = nodes[0].publish("kinds", values)
    subscription = nodes[1].subscribe("kinds")
    publication.push()
    subscription.wait(timeout=LONG_S)
    got = subscription.get()
    assert got["tied"]["a"].data_ptr() == got["tied"]["b"].data_ptr()
    assert got["window"].data_ptr() == got["tied"]["a"].data_ptr() + 40
    got["window"][0] = -1
    assert got["tied"]["b"][10] == -1
    assert torch.equal(got["turned"], values["turned"])
    assert got["count"] == 3
    assert got["nothing"].shape == (0, 4)
    assert torch.equal(got["complex"], values["complex"])
    assert got["layers"][0].tolist() == [1.0, 1.0]
    assert got["layers"][1][1] == "kept"
    assert isinstance(got["layers"][1], tuple)
    assert (got["step"], got["text"], got["none"]) == (17, {"name": "policy", "sizes": [1, 2]}, {})


def test_a_push_may_convert(nodes: list[farcall.Node]) -> None:
    model = nn.Linear(3, 3)
    publication = nodes[0].publish("half", {"weight": model.weight, "bias": model.bias, "step": torch.tensor(5)})
    subscription = nodes[1].subscribe("half")
    publication.push(dtype=torch.bfloat16)
    subscription.wait(timeout=LONG_S)
    got = subscription.get()
    assert (got["weight"].dtype, got["step"].dtype) == (torch.bfloat16, torch.int64)
    copy = nn.Linear(3, 3)
    subscription.load_into(copy)
    assert torch.equal(copy.weight, model.weight.bfloat16().float())


def test_tensors_that_are_alike_can_be_changed_in_place_and_trained(nodes: list[farcall.Node]) -> None:
    publication = nodes[0].publish("alike", {name: torch.ones(64) for name in "abc"})
    subscription = nodes[1].subscribe("alike")
    publication.push()
    subscription.wait(timeout=LONG_S)
    found = subscription.get()
    factor = torch.full((64,), 3.0, requires_grad=True)
    found["a"].mul_(factor).sum().backward()
    assert factor.grad is not None
    assert factor.grad.eq(1).all()
    assert found["a"].eq(3).all()
    assert found["b"].eq(1).all()
    (found["c"].requires_grad_() * 2).sum().backward()
    assert found["c"].grad.eq(2).all()
    assert subscription.get()["b"].eq(1).all()


def test_what_does_not_fit_changes_nothing(nodes: list[farcall.Node]) -> None:
    publication = nodes[0].publish("fit", {"a": torch.ones(3), "b": torch.ones(2, 2)})
    subscription = nodes[1].subscribe("fit")
    with pytest.raises(LookupError, match="wait"):
        subscription.get()
    publication.push()
    subscription.wait(timeout=LONG_S)
    for wrong in (torch.zeros(3, 3), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(1).expand(2, 2)):
        target = {"a": torch.zeros(3), "b": wrong}
        with pytest.raises(ValueError, match="nothing was loaded: b "):
            subscription.load_into(target)
        assert target["a"].eq(0).all()
    with pytest.raises(ValueError, match="c is not in the version"):
        subscription.load_into({"a": torch.zeros(3), "c": torch.zeros(3)})
    part = {"b": torch.zeros(1, 2)}
    subscription.load_into(part, slices={"b": (slice(0, 1), slice(None))})
    assert part["b"].eq(1).all()


def test_a_load_is_noticed_by_a_backward_pass(nodes: list[farcall.Node]) -> None:
    model = nn.Linear(4, 4)
    publication = nodes[0].publish("noticed", model)
    subscription = nodes[1].subscribe("noticed")
    publication.push()
    subscription.wait(timeout=LONG_S)
    loss = model(torch.ones(1, 4, requires_grad=True)).sum()
    subscription.load_into(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_wait_ends_at_its_deadline_and_says_why(nodes: list[farcall.Node]) -> None:
    subscription = nodes[1].subscribe("nobody's")
    with pytest.raises(RpcTimeout, match="nobody has published it"):
        subscription.wait(timeout=0.01)
    publication = nodes[0].publish("nobody's", {"x": torch.ones(1)})
    with pytest.raises(RpcTimeout, match="w0 publishes it, and has pushed none"):
        subscription.wait(timeout=0.01)
    version = publication.push()
    assert subscription.wait(timeout=LONG_S) == version
    with pytest.raises(RpcTimeout, match=f"newer than {version}"):
        subscription.wait(newer_than=version, timeout=0.01)


def test_another_publisher_takes_over(nodes: list[farcall.Node]) -> None:
    subscription = nodes[2].subscribe("name")
    old = nodes[0].publish("name", {"x": torch.zeros(8)})
    first = old.push()
    subscription.wait(timeout=LONG_S)
    new = nodes[1].publish("name", {"x": torch.ones(8)})
    with pytest.raises(Superseded, match="w1 has published 'name' since"):
        old.push()
    assert subscription.get()["x"].eq(0).all()
    second = new.push()
    assert second > first
    assert second.number == first.number + 1
    assert subscription.wait(newer_than=first, timeout=LONG_S) == second
    assert subscription.get()["x"].eq(1).all()
    assert subscription.publisher == nodes[1].get_worker_info()
    again = nodes[0].publish("name", {"x": torch.full((8,), 2.0)})
    third = again.push()
    assert subscription.wait(newer_than=second, timeout=LONG_S) == third


def test_a_worker_that_publishes_a_name_twice_is_told_so(nodes: list[farcall.Node]) -> None:
    first = nodes[0].publish("name", {"x": torch.zeros(8)})
    second = nodes[0].publish("name", {"x": torch.ones(8)})
    with pytest.raises(Superseded, match=r"this worker has published 'name' again since .*push to that one"):
        first.push()
    version = second.push()
    assert nodes[1].subscribe("name").wait(timeout=LONG_S) == version


def test_bytes_that_changed_are_found_and_named(nodes: list[farcall.Node]) -> None:
    publication = nodes[0].publish("corrupt", {"good": torch.ones(5000), "bad": torch.ones(5000)})
    subscription = nodes[1].subscribe("corrupt")
    publication.push()
    subscription.wait(timeout=LONG_S)
    subscription.verify()
    [block] = weights_of(nodes[0]).blocks._blocks.values()
    block.view[block.size // 2 + 4096] ^= 1
    with pytest.raises(CorruptWeights, match="the bytes of bad are not"):
        subscription.verify()


def test_versions_come_as_an_async_iterator(nodes: list[farcall.Node]) -> None:
    values = {"x": torch.zeros(3)}
    publication = nodes[0].publish("async", values)
    subscription = nodes[1].subscribe("async")

    async def read() -> list[float]:
        seen = []
        publication.push()
        async for version in subscription:
            seen.append(subscription.get(version)["x"][0].item())
            if len(seen) == 4:
                break
            values["x"].fill_(len(seen))
            publication.push()
        return seen

    assert asyncio.run(asyncio.wait_for(read(), LONG_S)) == [0.0, 1.0, 2.0, 3.0]


def test_a_subscription_that_ends_gives_its_memory_back(nodes: list[farcall.Node]) -> None:
    values = {"x": torch.zeros(1000)}
    publication = nodes[0].publish("ends", values)
    subscription = nodes[1].subscribe("ends")
    publication.push()
    subscription.wait(timeout=LONG_S)
    kept = subscription.get()["x"]
    del subscription
    gc.collect()
    wait_until(lambda: not publication.subscribers)
    values["x"].fill_(1)
    for _ in range(4):
        publication.push()
    assert kept.eq(0).all()
    again = nodes[1].subscribe("ends")
    again.wait(timeout=LONG_S)
    del kept
    gc.collect()
    for _ in range(10):
        publication.push()
    wait_until(lambda: again.version == publication.version)
    again.verify()
    assert again.get()["x"].eq(1).all()


def test_waiters_hear_that_the_publisher_has_closed_it(nodes: list[farcall.Node]) -> None:
    values = {"x": torch.zeros(10)}
    subscription = nodes[1].subscribe("closed")
    policy = nodes[0].publish("closed", values)
    last = policy.push()

    async def read() -> list[object]:
        return [version async for version in nodes[2].subscribe("closed")]

    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(subscription.wait, newer_than=last, timeout=None) for _ in range(2)]
        reading = threads.submit(asyncio.run, read())
        wait_until(lambda: len(policy.subscribers) == 2 and set(policy.subscribers.values()) == {last})
        wait_until(lambda: len(subscription._versions._gates) == 2)  # both wait: only who waits is told
        policy.close()
        for future in waiting:
            with pytest.raises(PublicationClosed, match=f"'closed' has closed it, and its last version is {last}"):
                future.result(LONG_S)
        assert reading.result(LONG_S) == [last]
    with pytest.raises(RuntimeError, match="is closed"):
        policy.push()
    assert policy._source is None  # a model is not kept alive by what was published of it
    assert subscription.publisher is None
    assert subscription.load_into({"x": torch.ones(10)}) == last
    assert subscription.wait(timeout=LONG_S) == last
    with pytest.raises(RpcTimeout, match="closed it, and no other has taken over"):
        subscription.wait(newer_than=last, timeout=0.01)  # it was told before
    version = nodes[2].publish("closed", values).push()
    assert subscription.wait(newer_than=last, timeout=LONG_S) == version
    subscription.close()
    with pytest.raises(RuntimeError, match="the subscription to 'closed' is closed"):
        subscription.get()


def test_the_last_push_before_the_close_arrives(nodes: list[farcall.Node]) -> None:
    values = {"x": torch.zeros(1000)}
    subscription = nodes[1].subscribe("last")
    with nodes[0].publish("last", values) as policy:
        for step in range(50):
            values["x"].fill_(step)
            last = policy.push()
    version = None
    while version != last:
        version = subscription.wait(newer_than=version, timeout=LONG_S)
    with pytest.raises(PublicationClosed):
        subscription.wait(newer_than=last, timeout=LONG_S)
    assert subscription.get()["x"].eq(49).all()


def test_the_last_push_of_one_that_leaves_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "ANSWER_AFTER_S", 0.5)  # so the first push is unanswered when the last one comes
    values = {"x": torch.zeros(1000)}
    with dynamic_team(2, tmp_path) as nodes:
        subscription = nodes[1].subscribe("last")
        policy = nodes[0].publish("last", values)
        policy.push()
        values["x"].fill_(1)
        last = policy.push()
        policy.close()
        nodes[0].shutdown()
        version = None
        while version != last:
            version = subscription.wait(newer_than=version, timeout=LONG_S)
        assert subscription.get()["x"].eq(1).all()


def test_one_that_leaves_does_not_wait_for_good_for_subscribers_that_do_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subscriptions, "ANSWER_AFTER_S", 10 * LONG_S)
    monkeypatch.setattr("farcall.weights.node.LAST_VERSION_S", 0.1)
    with dynamic_team(2, tmp_path) as nodes:
        subscription = nodes[1].subscribe("last")
        policy = nodes[0].publish("last", {"x": torch.zeros(1000)})
        policy.push()
        subscription.wait(timeout=LONG_S)
        nodes[0].shutdown()
    assert "w0 leaves; these lack its last versions: w1" in caplog.text


@pytest.mark.parametrize("timeout", [LONG_S, None])
def test_one_that_leaves_waits_no_longer_than_its_timeout(tmp_path: Path, timeout: float | None) -> None:
    told: list[float] = []
    with dynamic_team(2, tmp_path) as nodes:
        runtime_of(nodes[0]).hooks.agreed.append(told.append)
        began = monotonic()
        nodes[0].shutdown(timeout=timeout)
        [deadline] = told
    assert (began + LONG_S <= deadline <= monotonic() + LONG_S) if timeout else deadline == NEVER


def test_what_is_to_be_done_later_is_done_though_something_before_it_fails(
    nodes: list[farcall.Node], caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()
    found = weights_of(nodes[0]).subscriptions

    def fail() -> None:
        raise RuntimeError("this fails")

    found._later.extend([fail, done.set])
    found._later_timer.at(0.0)
    assert done.wait(LONG_S)
    assert "this fails" in caplog.text


def test_waiters_hear_that_their_subscription_is_closed(nodes: list[farcall.Node]) -> None:
    subscription, other = nodes[0].subscribe("shut"), nodes[0].subscribe("shut")

    async def read() -> list[object]:
        return [version async for version in other]

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(subscription.wait, timeout=None)
        reading = threads.submit(asyncio.run, read())
        wait_until(lambda: len(subscription._versions._gates) == 2)
        subscription.close()
        with pytest.raises(RuntimeError, match="the subscription to 'shut' is closed"):
            waiting.result(LONG_S)
        assert not reading.done(), "it waits with another one"
        other.close()
        with pytest.raises(RuntimeError, match="the subscription to 'shut' is closed"):
            reading.result(LONG_S)


def test_waiters_hear_that_the_node_ends() -> None:
    with team([None], size=1) as [node]:
        subscription = node.subscribe("never")
    with pytest.raises(farcall.errors.NotInitialized):
        subscription.wait(timeout=LONG_S)
    with pytest.raises(farcall.errors.NotInitialized):
        subscription.get()


def test_names_and_values_that_cannot_be(nodes: list[farcall.Node]) -> None:
    for wrong in ("", "x" * 257, 7):
        with pytest.raises(ValueError, match="under a name"):
            nodes[0].publish(wrong, {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        nodes[0].publish("name", {}, keep=0)
    with pytest.raises(TypeError, match="not int"):
        nodes[0].publish("wrong", 7).push()
    with pytest.raises(TypeError, match="neither a text nor a number"):
        nodes[0].publish("wrong", {None: torch.ones(1)}).push()
    with pytest.raises(TypeError, match="only dense ones"):
        nodes[0].publish("wrong", {"x": torch.eye(2).to_sparse()}).push()


def test_metrics_tell_names_versions_and_memory(nodes: list[farcall.Node]) -> None:
    publication = nodes[0].publish("told", {"x": torch.zeros(1 << 16)})
    subscription = nodes[1].subscribe("told")
    publication.push()
    version = publication.push()
    wait_until(lambda: subscription.version == version)
    [one] = nodes[0].metrics().weights
    assert (one.name, one.role, one.state, one.number, one.total) == (
        "told",
        "publishes",
        "published",
        version.number,
        2,
    )
    assert nodes[0].metrics().weights_bytes >= 2 * one.size_bytes > 0
    [other] = nodes[1].metrics().weights
    assert (other.role, other.state, other.number) == ("subscribes", "subscribed", version.number)
    assert nodes[2].metrics().weights == []
