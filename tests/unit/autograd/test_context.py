"""Contexts: recording, backward over one or more workers, errors, release. No threads, no sockets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.unit.autograd.cluster import Hang, Network, Peer
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from farcall.autograd.context import Context
from farcall.autograd.contexts import Contexts
from farcall.autograd.passes import Gradient, LocalPass, Message
from farcall.errors import RpcError
from farcall.protocol.gradients import PassDone, PassId, StartPass

RECEIVE_NAME = "torch::distributed::autograd::RecvRpcBackward"


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(shape or (3, 3), requires_grad=True)


@pytest.fixture
def network() -> Network:
    return Network(3)


@pytest.fixture
def context(network: Network) -> Context:
    return network.workers[0].new_context()


def gradients(network: Network, context: Context, worker: int = 0) -> dict[torch.Tensor, torch.Tensor]:
    return network.workers[worker].get_gradients(context.id)


def test_what_crosses_is_recorded_at_both_ends(network: Network, context: Context) -> None:
    first, second = leaf(), leaf()
    arrived = network.move(context.id, 0, 1, [first, torch.ones(2), second])
    total = arrived[0] + arrived[2]
    (back,) = network.move(context.id, 1, 0, [total])
    (request,) = context._send_functions().values()
    assert [node.variable for node, _ in request.next_functions] == [first, second]
    assert [index for _, index in request.next_functions] == [0, 0]
    assert request.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"
    assert request.name() == "torch::distributed::autograd::SendRpcBackward"
    assert context._recv_functions() == {back.grad_fn.message_id: back.grad_fn}
    assert context._known_worker_ids() == {1}
    there = network.workers[1].retrieve(context.id)
    (response,) = there._send_functions().values()
    add = response.next_functions[0][0]
    assert add.name() == "AddBackward0"
    assert [node.name() for node, _ in add.next_functions] == [RECEIVE_NAME] * 2
    assert add.next_functions[0][0] == add.next_functions[1][0]
    assert not arrived[1].requires_grad


def test_nothing_is_recorded_where_nothing_needs_a_gradient(network: Network, context: Context) -> None:
    network.move(context.id, 0, 1, [torch.ones(2)])
    with torch.no_grad():
        (arrived,) = network.move(context.id, 0, 1, [leaf()])
    assert context._send_functions() == {}
    assert context._known_worker_ids() == {1}
    assert network.workers[1].retrieve(context.id)._recv_functions() == {}
    assert arrived.grad_fn is None


def test_gradients_are_in_the_context_and_not_in_grad(network: Network, context: Context) -> None:
    first, second = leaf(), leaf()
    a, b = network.move(context.id, 0, 1, [first, second])
    (product,) = network.move(context.id, 1, 0, [a @ b])
    network.workers[0].backward(context.id, [product.sum()])
    expected = torch.autograd.grad((first @ second).sum(), [first, second])
    found = gradients(network, context)
    torch.testing.assert_close([found[first], found[second]], list(expected))
    assert first.grad is None
    assert second.grad is None


def test_an_unused_result_neither_hangs_nor_counts(network: Network, context: Context) -> None:
    first = leaf()
    network.move(context.id, 1, 0, network.move(context.id, 0, 1, [first]))
    network.workers[0].backward(context.id, [(first * 3).sum()])
    assert torch.equal(gradients(network, context)[first], torch.full((3, 3), 3.0))


def test_one_round_trip_costs_two_gradients_a_start_and_a_done(network: Network, context: Context) -> None:
    (back,) = network.move(context.id, 1, 0, network.move(context.id, 0, 1, [leaf()]))
    network.workers[0].backward(context.id, [back.sum()])
    kinds = [type(message).__name__ for _, _, message in network.log]
    assert kinds == ["StartPass", "Gradient", "Gradient", "PassDone"]


def test_a_call_to_oneself(network: Network, context: Context) -> None:
    first = leaf()
    (here,) = network.move(context.id, 0, 0, [first])
    (back,) = network.move(context.id, 0, 0, [here * first])
    network.workers[0].backward(context.id, [back.sum()])
    torch.testing.assert_close(gradients(network, context)[first], 2 * first.detach())


def test_passes_add_up(network: Network, context: Context) -> None:
    first = leaf()
    (back,) = network.move(context.id, 1, 0, network.move(context.id, 0, 1, [first]))
    loss = back.sum()
    network.workers[0].backward(context.id, [loss], retain_graph=True)
    network.workers[0].backward(context.id, [loss])
    assert torch.equal(gradients(network, context)[first], torch.full((3, 3), 2.0))


def test_sparse_gradients(network: Network, context: Context) -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    both = torch.nn.Embedding(10, 3, sparse=True)
    (rows,) = network.move(context.id, 1, 0, [table(torch.tensor([1, 1, 4])) + both(torch.tensor([2, 2, 2]))])
    (more,) = network.move(context.id, 1, 0, [both.weight * 2])
    network.workers[0].backward(context.id, [rows.sum() + more.sum()])
    found = gradients(network, context, 1)
    assert found[table.weight].is_sparse
    assert found[table.weight].to_dense()[1].tolist() == [2, 2, 2]
    assert found[both.weight][2].tolist() == [5, 5, 5]


class TwiceTheSame(torch.autograd.Function):
    """Gives both inputs one sparse gradient, whose parts are not laid out densely."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        rows = torch.ones(1, 1, dtype=torch.long).expand(1, 4)
        gradient = torch.sparse_coo_tensor(rows, torch.ones(1, 3).expand(4, 3), (10, 3), check_invariants=False)
        return gradient, gradient


def test_sparse_gradients_have_memory_of_their_own(network: Network, context: Context) -> None:
    first, second = leaf(10, 3), leaf(10, 3)
    loss = TwiceTheSame.apply(first, second).sum()  # type: ignore[no-untyped-call]
    network.workers[0].backward(context.id, [loss], retain_graph=True)
    found = gradients(network, context)
    assert found[first]._values().data_ptr() != found[second]._values().data_ptr()
    network.workers[0].backward(context.id, [loss])
    assert gradients(network, context)[first].to_dense()[1].tolist() == [8, 8, 8]


def test_a_sparse_tensor_crosses(network: Network, context: Context) -> None:
    matrix = torch.eye(3).to_sparse().requires_grad_()
    (there,) = network.move(context.id, 0, 1, [matrix])
    (back,) = network.move(context.id, 1, 0, [there * 2])
    network.workers[0].backward(context.id, [torch.sparse.sum(back)])
    assert gradients(network, context)[matrix].to_dense().sum() == 6


def test_in_place_operations_on_what_arrived(network: Network, context: Context) -> None:
    first = leaf()
    (there,) = network.move(context.id, 0, 1, [first])
    there.mul_(3)
    there += 1
    (back,) = network.move(context.id, 1, 0, [there])
    network.workers[0].backward(context.id, [back.sum()])
    assert torch.equal(gradients(network, context)[first], torch.full((3, 3), 3.0))


def test_hooks_of_leaves_see_the_whole_gradient_once(network: Network, context: Context) -> None:
    first = leaf()
    seen: list[torch.Tensor] = []
    first.register_hook(lambda gradient: (seen.append(gradient), gradient * 10)[1])
    (back,) = network.move(context.id, 1, 0, network.move(context.id, 0, 1, [first]))
    network.workers[0].backward(context.id, [(back + first).sum()])
    assert torch.equal(torch.stack(seen), torch.full((1, 3, 3), 2.0))
    assert torch.equal(gradients(network, context)[first], torch.full((3, 3), 20.0))


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_sent_on_as_it_came_calls_its_hooks(network: Network, context: Context, kept: bool) -> None:
    """There and back twice: what came back first is sent away again untouched, and may be forgotten by then."""
    first = leaf()
    seen: list[torch.Tensor] = []
    (middle,) = network.move(context.id, 1, 0, network.move(context.id, 0, 1, [first]))
    middle.register_hook(lambda gradient: (seen.append(gradient), gradient * 10)[1])
    (last,) = network.move(context.id, 1, 0, [network.move(context.id, 0, 1, [middle])[0] * 3])
    holder = [middle] if kept else []
    del middle
    network.workers[0].backward(context.id, [last.sum()])
    assert torch.equal(torch.stack(seen), torch.full((1, 3, 3), 3.0))
    assert torch.equal(gradients(network, context)[first], torch.full((3, 3), 30.0))
    assert len(holder) == kept


def test_what_is_sent_on_as_it_came_keeps_its_gradient_if_asked_to(network: Network, context: Context) -> None:
    first = leaf()
    (middle,) = network.move(context.id, 1, 0, network.move(context.id, 0, 1, [first]))
    middle.retain_grad()
    (last,) = network.move(context.id, 1, 0, [network.move(context.id, 0, 1, [middle])[0] * 3])
    network.workers[0].backward(context.id, [last.sum()])
    assert middle.grad is not None
    assert torch.equal(middle.grad, torch.full((3, 3), 3.0))
    assert torch.equal(gradients(network, context)[first], torch.full((3, 3), 3.0))


def test_hooks_of_accumulators_run_after(network: Network, context: Context) -> None:
    first = leaf()
    twice = first + first
    seen: list[Any] = []
    twice.grad_fn.next_functions[0][0].register_hook(lambda results, given: seen.append((results, given[0].sum())))
    network.workers[0].backward(context.id, [twice.sum()])
    assert seen == [((), torch.tensor(18.0))]


def test_hooks_of_a_module_around_a_remote_call(network: Network, context: Context) -> None:
    """A residual connection: the module's output is used here and sent away, so its node runs alone."""
    module = torch.nn.Linear(3, 3)
    seen: list[Any] = []
    module.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].clone()))
    inner = module(leaf())
    (there,) = network.move(context.id, 0, 1, [inner])
    (back,) = network.move(context.id, 1, 0, [there * 2])
    network.workers[0].backward(context.id, [(back + inner).sum()])
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.full((3, 3), 3.0))
    assert torch.equal(gradients(network, context)[module.bias], torch.full((3,), 9.0))


class DerivedCheckpoint(CheckpointFunction):
    """A checkpoint of a program's own."""


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("kind", ["reentrant", "derived", "plain"])
def test_checkpointing(network: Network, context: Context, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reentrant = kind != "plain"
    if kind == "derived":
        monkeypatch.setattr(torch.utils.checkpoint, "CheckpointFunction", DerivedCheckpoint)
    outer, inner = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    start = leaf()

    def deep(value: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: inner(x).relu(), value, use_reentrant=reentrant) * 2

    def run(value: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: deep(outer(x)).sin(), value, use_reentrant=reentrant)

    (there,) = network.move(context.id, 0, 1, [start])
    (back,) = network.move(context.id, 1, 0, [run(there)])
    network.workers[0].backward(context.id, [back.sum()])
    found = gradients(network, context, 1)
    parameters = [*outer.parameters(), *inner.parameters()]
    assert all(parameter.grad is None for parameter in parameters)
    plain = deep(outer(start)).sin().sum() if not reentrant else run(start).sum()
    plain.backward()
    for parameter in parameters:
        torch.testing.assert_close(found[parameter], parameter.grad)
    torch.testing.assert_close(gradients(network, context)[start], start.grad)


def test_a_gradient_has_memory_of_its_own(network: Network, context: Context) -> None:
    first, second = leaf(), leaf()
    network.workers[0].backward(context.id, [(first + second).sum()])
    found = gradients(network, context)
    assert found[first].data_ptr() != found[second].data_ptr()
    assert found[first].is_contiguous()


class KeepsIts(torch.autograd.Function):
    """Gives both inputs one gradient, and keeps its address."""

    kept = 0

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.contiguous()
        KeepsIts.kept = gradient.data_ptr()
        return gradient, gradient


def test_of_gradients_that_share_memory_none_keeps_it(network: Network, context: Context) -> None:
    first, second = leaf(), leaf()
    network.workers[0].backward(context.id, [KeepsIts.apply(first, second).sum()])  # type: ignore[no-untyped-call]
    found = gradients(network, context)
    assert len({found[first].data_ptr(), found[second].data_ptr(), KeepsIts.kept}) == 3


def test_a_profiler_sees_the_pass(network: Network, context: Context) -> None:
    (there,) = network.move(context.id, 0, 1, [leaf()])
    (back,) = network.move(context.id, 1, 0, [there * 2])
    with torch.autograd.profiler.profile() as profile:
        network.workers[0].backward(context.id, [back.sum()])
    names = [event.name for event in profile.function_events]
    assert names.count("torch::distributed::autograd::backward") == 1
    assert RECEIVE_NAME in names
    assert "torch::distributed::autograd::SendRpcBackward" in names


def test_a_message_that_arrives_after_the_pass_began(network: Network, context: Context) -> None:
    first = leaf()
    here = network.workers[0]
    message_id = context.record_send(Peer(1), [first])
    assert message_id
    copy = first.detach().clone().requires_grad_()
    network.possible.append(lambda: network.context(context.id, 1).record_receive(Peer(0), message_id, [copy]))
    here.backward(context.id, [(first * 2).sum()])
    assert torch.equal(gradients(network, context)[first], torch.full((3, 3), 2.0))


def test_a_message_that_is_declined(network: Network, context: Context) -> None:
    first = leaf()
    here = network.workers[0]
    message_id = context.record_send(Peer(1), [first])
    assert message_id
    with pytest.raises(Hang):
        here.backward(context.id, [(first * 2).sum()])
    network.context(context.id, 1).decline_receive(Peer(0), message_id)
    network.drain()
    here.backward(context.id, [(first * 3).sum()])


def test_a_timeout_names_whom_it_waited_for(network: Network, context: Context) -> None:
    first = leaf()
    assert context.record_send(Peer(2), [first])
    with pytest.raises(RpcError, match="timed out"):
        network.workers[0].backward(context.id, [(first * 2).sum()], timeout_s=5.0)
    network.drain()
    assert all(worker.debug_info()["num_current_backward_passes"] == "0" for worker in network.workers)


@pytest.mark.parametrize(
    ("roots", "text"),
    [
        ([], "No tensors provided for gradient computation"),
        ([torch.rand(3, 3)], "requires_grad not set on"),
        ([torch.rand(3, 3, requires_grad=True)], "is not a scalar, all roots need to be scalar"),
        ([torch.rand(1, requires_grad=True)], "does not have a valid gradient function"),
    ],
)
def test_roots_that_cannot_be(network: Network, context: Context, roots: list[torch.Tensor], text: str) -> None:
    with pytest.raises(RpcError, match=text):
        network.workers[0].backward(context.id, roots)


@pytest.mark.parametrize(("context_id", "roots"), [(0, None), (None, None), (0, [1])])
def test_arguments_of_the_wrong_type(network: Network, context_id: Any, roots: Any) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        network.workers[0].backward(context_id, roots)


def test_unknown_and_nested_contexts(network: Network, context: Context) -> None:
    with pytest.raises(RpcError, match="Could not find autograd context with id: 100"):
        network.workers[0].backward(100, [(leaf() * 2).sum()])
    with pytest.raises(RpcError, match="Already have an autograd context id for this thread"):
        network.workers[0].new_context()
    network.workers[0].release(context.id)
    with pytest.raises(RpcError, match="no autograd context"):
        network.workers[0].current()
    assert not network.workers[0].is_valid(context.id)


def test_ids_begin_with_the_worker(network: Network) -> None:
    context = network.workers[2].new_context()
    assert context.id >> 48 == 2
    assert network.workers[2].max_id() == (2 << 48) | ((1 << 48) - 1)


def test_a_released_context_ends_its_pass_and_names_its_peers(network: Network, context: Context) -> None:
    (back,) = network.move(context.id, 1, 0, network.move(context.id, 0, 1, [leaf()]))
    network.possible.append(lambda: network.workers[0].release(context.id))
    network.workers[1].release(context.id)
    with pytest.raises(RpcError, match=f"Could not find autograd context with id: {context.id}"):
        network.workers[0].backward(context.id, [back.sum()])
    network.drain()
    assert network.workers[0].debug_info()["num_autograd_contexts"] == "0"
    assert network.workers[1].debug_info()["num_autograd_contexts"] == "0"


def test_a_start_for_a_context_not_heard_of_is_answered(network: Network) -> None:
    pass_id = PassId(0, 0)
    (local,) = network.workers[1].deliver(0, [StartPass(7, pass_id, (0, 1))])
    local.run()
    network.drain()
    assert [message for _, _, message in network.log] == [PassDone(7, pass_id)]


def test_plain_backward_into_a_receive_says_what_to_do(network: Network, context: Context) -> None:
    (there,) = network.move(context.id, 0, 1, [leaf()])
    with pytest.raises(RuntimeError, match=r"farcall\.autograd\.backward"):
        there.sum().backward()


def test_a_new_worker_with_the_origin_of_a_dead_one_has_contexts_of_its_own() -> None:
    network = Network(2)
    ours = network.workers[0]
    dead = network.workers[1].new_context()
    network.workers[1].release(dead.id)
    ours.admit(dead.id, 0)
    network.kill(1)
    assert ours.admit(dead.id, 0) is None
    new = Contexts(network.workers[1].port, first_number=1000)
    ours.worker_joined(1 << 16)
    context = new.new_context()
    assert ours.admit(context.id, 0) is not None
    assert ours.admit(dead.id, 0) is None
    new.release(context.id)


def test_messages_to_oneself_go_first(network: Network, context: Context) -> None:
    """The thread that sends the last ones goes on to read the link: nothing may be left to be sent then."""
    (there,) = network.move(context.id, 0, 1, [leaf()])
    (back,) = network.move(context.id, 1, 0, [there])
    (own,) = network.move(context.id, 0, 0, [back * 2])
    network.workers[0].backward(context.id, [own.sum()])
    targets = [target for source, target, _ in network.log if source == 0]
    assert targets[0] == 0
    assert 1 in targets


def test_an_interrupted_wait_ends_the_pass_everywhere(
    network: Network, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(local: LocalPass) -> None:
        local.flush()
        raise KeyboardInterrupt

    (back,) = network.move(context.id, 1, 0, network.move(context.id, 0, 1, [leaf()]))
    assert context.record_send(Peer(2), [back])  # never arrives: the pass cannot end by itself
    monkeypatch.setattr(network.workers[0].port, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        network.workers[0].backward(context.id, [back.sum()])
    network.drain()
    assert [worker.debug_info()["num_current_backward_passes"] for worker in network.workers] == ["0"] * 3


def test_ctrl_c_in_the_part_of_the_origin_is_raised_as_itself(network: Network, context: Context) -> None:
    (there,) = network.move(context.id, 0, 1, [leaf()])
    (back,) = network.move(context.id, 1, 0, [there])
    loss = (back * 2).sum()

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    loss.grad_fn.register_prehook(press)  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        network.workers[0].backward(context.id, [loss])
    network.drain()
    assert [worker.debug_info()["num_current_backward_passes"] for worker in network.workers] == ["0"] * 3


@pytest.mark.parametrize("target", [0, 2])
def test_a_message_for_which_there_is_no_memory_fails_the_pass(
    network: Network, context: Context, monkeypatch: pytest.MonkeyPatch, target: int
) -> None:
    """Worker 1 has messages for 0 and 2; the origin hears of the failure, and the others of the end of the pass."""
    (there,) = network.move(context.id, 0, 1, [leaf()])
    (further,) = network.move(context.id, 1, 2, [there])
    (back,) = network.move(context.id, 2, 1, [further])
    (home,) = network.move(context.id, 1, 0, [back])
    port = network.workers[1].port
    send, failing = port.send, [target]

    def short_of_memory(worker_id: int, messages: Sequence[Message], awaited: LocalPass | None = None) -> None:
        if worker_id in failing:
            failing.remove(worker_id)
            raise MemoryError
        send(worker_id, messages, awaited)

    monkeypatch.setattr(port, "send", short_of_memory)
    with pytest.raises(RpcError, match="Error on Node 1: MemoryError"):
        network.workers[0].backward(context.id, [home.sum()])
    network.drain()
    assert not failing
    assert [worker.debug_info()["num_current_backward_passes"] for worker in network.workers] == ["0"] * 3


def test_a_part_that_cannot_even_tell_of_its_failure_still_hears_of_the_end(
    network: Network, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(worker_id: int, messages: Sequence[Message], awaited: LocalPass | None = None) -> None:
        raise MemoryError

    def survives() -> bool:
        with suppress(MemoryError):  # where an executor logs it
            return step()
        return True

    step = network.step
    (back,) = network.move(context.id, 1, 0, network.move(context.id, 0, 1, [leaf()]))
    monkeypatch.setattr(network, "step", survives)
    monkeypatch.setattr(network.workers[1].port, "send", no_memory)
    with pytest.raises(RpcError, match=r"timed out waiting for worker\(s\) \[1\]"):
        network.workers[0].backward(context.id, [back.sum()], timeout_s=10)
    network.drain()
    [local] = network.context(context.id, 1).passes.values()
    assert local.machine.ended
    assert not local.working.locked()


def test_a_checkpoint_that_returns_its_input(network: Network, context: Context) -> None:
    """The recomputed graph has a leaf for a root, and a checkpoint of its own, so it runs in phases."""
    first = leaf()

    def inside(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return checkpoint(torch.sin, x, use_reentrant=True), x

    one, two = checkpoint(inside, first * 1, use_reentrant=True)
    network.workers[0].backward(context.id, [(one + two * 3).sum()])
    torch.testing.assert_close(gradients(network, context)[first], first.detach().cos() + 3)


def test_one_worker_brings_so_many_contexts_and_no_more(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.autograd.contexts.MOST_BROUGHT", 2)
    here = network.workers[1]
    assert here.admit(1, 0) is here.admit(1, 0)
    here.admit(2, 0)
    assert here.admit(3, 0) is None
    assert here.admit(2, 0) is not None
    assert here.admit(3, 2) is not None
    here.release(1)
    assert here.admit(4, 0) is not None
    assert here.new_context().brought_by is None


def test_a_pass_that_needs_one_context_too_many_fails_and_does_not_wait(
    network: Network, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farcall.autograd.contexts.MOST_BROUGHT", 0)
    value = torch.ones(2, requires_grad=True)
    message_id = context.record_send(Peer(1), [value])
    assert message_id
    with pytest.raises(RpcError, match="Could not find autograd context"):
        network.workers[0].backward(context.id, [value.sum()])


def test_gradients_come_from_the_worker_that_got_the_tensors(network: Network, context: Context) -> None:
    value = torch.ones(2, requires_grad=True)
    (there,) = network.move(context.id, 0, 1, [value * 1])
    (back,) = network.move(context.id, 1, 0, [there * 3])
    forged = {0: torch.full((2,), 666.0)}
    deliver = network.workers[0].deliver

    def with_a_forgery(sender: int, messages: Any) -> Any:
        real = [message for message in messages if isinstance(message, Gradient)]
        return [
            *deliver(2, [Gradient(one.context_id, one.pass_id, one.message_id, forged) for one in real]),
            *deliver(sender, messages),
        ]

    network.workers[0].deliver = with_a_forgery  # type: ignore[method-assign]
    network.workers[0].backward(context.id, [back.sum()])
    assert gradients(network, context)[value].tolist() == [3.0, 3.0]
