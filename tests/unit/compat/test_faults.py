"""The options of stock's faulty agent: each name means farcall's message, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from farcall.compat.rpc import backend_registry
from farcall.compat.rpc.faults import (
    MESSAGES,
    FaultyTensorPipeRpcBackendOptions,
    is_available,
    to_faults,
)
from farcall.protocol.frames import REQUEST, Frame
from farcall.protocol.notes import Notes, encode_notes
from farcall.serialize import encode_function
from farcall.testing.faults import Delay, Fail


def add_to_itself(tensor):
    return tensor + tensor


script_function = torch.jit.script(add_to_itself)


def python_function() -> None:
    pass


@dataclass
class Seen:
    names: frozenset[str]
    function: bytes = b""
    notes: bytes = b""

    @property
    def frame(self) -> Frame:
        return Frame(REQUEST, function=self.function, notes=self.notes)


def meant(name: str, message: Seen) -> bool:
    faults = to_faults(FaultyTensorPipeRpcBackendOptions(messages_to_fail=[name], num_fail_sends=1))
    return faults.judge(faults.direction("a", "b"), message)[0] is not None


@pytest.mark.parametrize(("kind", "suffix"), [("call", "CALL"), ("create", "REMOTE_CALL")])
def test_operators_and_scripts_are_told_from_python_functions(kind, suffix):
    names = frozenset({"request", kind})
    for function in (torch.add, torch.matmul, script_function):
        seen = Seen(names, encode_function(function) or b"")
        assert meant(f"SCRIPT_{suffix}", seen), function
        assert not meant(f"PYTHON_{suffix}", seen), function
    for segment in (encode_function(python_function) or b"", b""):
        assert meant(f"PYTHON_{suffix}", Seen(names, segment))
        assert not meant(f"SCRIPT_{suffix}", Seen(names, segment))
    other = frozenset({"request", "create" if kind == "call" else "call"})
    assert not meant(f"PYTHON_{suffix}", Seen(other))


def test_calls_of_an_autograd_context_have_another_name_in_stock():
    names = frozenset({"request", "call"})
    inside = Seen(names, notes=encode_notes(Notes([], None, "", 3, 4)))
    assert meant("PYTHON_CALL", Seen(names, notes=encode_notes(Notes())))
    assert not meant("PYTHON_CALL", inside)
    assert not meant("SCRIPT_CALL", inside)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("RREF_FORK_REQUEST", "Register"),
        ("RREF_CHILD_ACCEPT", "Accept"),
        ("RREF_USER_DELETE", "Release"),
        ("CLEANUP_AUTOGRAD_CONTEXT_REQ", "ReleaseContext"),
        ("SCRIPT_RREF_FETCH_CALL", "fetch"),
        ("PYTHON_RREF_FETCH_CALL", "fetch"),
    ],
)
def test_other_names(name, kind):
    assert meant(name, Seen(frozenset({kind})))
    assert not meant(name, Seen(frozenset({"request", "call"})))


def test_failing_goes_before_delaying_and_needs_a_number():
    options = FaultyTensorPipeRpcBackendOptions(
        messages_to_fail=["PYTHON_CALL"], messages_to_delay={"PYTHON_CALL": 1.5}, num_fail_sends=2
    )
    assert [rule.fault for rule in to_faults(options).rules] == [Fail(2, 0.05), Delay(1.5, 0.0, False)]
    options.num_fail_sends = 0
    assert [rule.fault for rule in to_faults(options).rules] == [Delay(1.5, 0.0, False)]


def test_an_unknown_name_is_an_error_that_names_the_known():
    with pytest.raises(ValueError, match=r"'PYTHON_CALLS'.*PYTHON_CALL, "):
        to_faults(FaultyTensorPipeRpcBackendOptions(messages_to_delay={"PYTHON_CALLS": 1.0}))


def test_the_backend_is_registered_and_makes_its_options():
    assert is_available()
    backend = backend_registry.BackendType["FAULTY_TENSORPIPE"]
    options = backend_registry.construct_rpc_backend_options(
        backend, num_worker_threads=8, messages_to_fail=[*MESSAGES], messages_to_delay={}, num_fail_sends=3
    )
    assert (options.num_worker_threads, options.num_fail_sends) == (8, 3)
    assert len(to_faults(options).rules) == len(MESSAGES)
