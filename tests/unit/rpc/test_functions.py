"""Functions with a schema: their arguments are checked, and operators named, before anything is sent."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from farcall.rpc.functions import async_execution
from farcall.rpc.schemas import name_function
from farcall.serialize import TablePickler, decode_function, use_rpc_pickler


def add_numbers(first: int, second: int = 2) -> int:
    return first + second


def start(first: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return torch.jit.fork(torch.neg, first)  # type: ignore[no-any-return]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchScript is deprecated, and says so
    scripted = torch.jit.script(add_numbers)
    started = async_execution(torch.jit.script(start))

ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, 2, 3), {}, r"add_numbers\(\) expected at most 2"),
        ((), {}, "missing value for argument 'first'"),
        ((1,), {"third": 3}, "Unknown keyword argument 'third'"),
        (("one",), {}, "Expected a value of type 'int' for argument 'first' but instead found type 'str'"),
    ],
)
def test_arguments_of_scripts_are_checked_by_their_schema(
    args: tuple[Any, ...], kwargs: dict[str, int], text: str
) -> None:
    with pytest.raises(RuntimeError, match=text):
        name_function(scripted, args, kwargs)
    named = name_function(scripted, (1,), {"second": 3})
    assert named is not None
    assert decode_function(named)(1, second=3) == 4


def test_so_are_those_of_scripts_that_return_futures() -> None:
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'"):
        name_function(started, ("one",), None)
    assert name_function(started, (ONES,), None) is None  # it goes with its arguments


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "overload"),
    [
        (torch.add, (ONES, ONES), None, b"baten.add.Tensor"),
        (torch.add, (ONES, 1), {"alpha": 2}, b"baten.add.Tensor"),
        (torch.sum, (ONES,), None, b"baten.sum.default"),
        (torch.sum, (ONES, [0]), None, b"baten.sum.dim_IntList"),
        (torch.ones, ((2, 3),), None, b"baten.ones.default"),
        (torch.cat, ([ONES, ONES],), None, b"baten.cat.default"),
    ],
)
def test_an_operator_is_named_with_its_overload(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, overload: bytes
) -> None:
    for _ in range(2):  # found, and remembered
        assert name_function(function, args, kwargs) == overload
    assert torch.equal(decode_function(overload)(*args, **(kwargs or {})), function(*args, **(kwargs or {})))


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (torch.ones, (2, 3), None),  # sizes that are not in a list
        (torch.ones, ((2, 3),), {"requires_grad": True}),
        (torch.max, (ONES, 0), None),  # two results, which have names
        (math.floor, (1.5,), None),
        (torch.tensor, ([1.0, 2.0],), None),  # TorchScript's operator of that name takes no list of floats
        (torch.get_num_threads, (), None),  # TorchScript knows the name, and no schema
    ],
)
def test_what_only_python_knows_goes_by_path(function: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    named = name_function(function, args, kwargs)
    assert named is not None
    assert named[:1] in (b"p", b"k")
    assert decode_function(named)(*args, **(kwargs or {})) is not None


def test_wrong_arguments_of_an_operator_are_an_error_here() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed to match any schema"):
            name_function(torch.add, (), None)
        with pytest.raises(RuntimeError, match="failed to match any schema"):
            name_function(torch.add, (ONES, "one"), None)
    assert name_function(torch.add, (ONES, ONES), None) == b"baten.add.Tensor"


def test_a_pickler_of_the_users_writes_operators_as_well() -> None:
    name_function(torch.add, (ONES, ONES), None)
    with use_rpc_pickler(TablePickler()):
        assert name_function(torch.add, (ONES, ONES), None) is None
