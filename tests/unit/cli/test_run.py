"""Options of engines, as ``farcall run --on ... --option NAME=VALUE`` takes them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest

from farcall.cli.run import _read_options
from farcall.launcher.engine import EngineError


def engine(hosts: Sequence[str], *, args: Sequence[str] = (), nodes: int = 1, python: str | None = None) -> None:
    """The arguments of an engine."""


PARAMETERS = inspect.signature(engine).parameters


@pytest.mark.parametrize(
    ("option", "read"),
    [
        ("hosts=a,b", {"hosts": ["a", "b"]}),
        ("hosts=a", {"hosts": ["a"]}),
        ('hosts=["a"]', {"hosts": ["a"]}),
        ("nodes=8", {"nodes": 8}),
        ("args=--gres=gpu:8", {"args": ["--gres=gpu:8"]}),
        ("python=/usr/bin/python3", {"python": "/usr/bin/python3"}),
    ],
)
def test_values(option: str, read: dict[str, object]) -> None:
    assert _read_options([option], PARAMETERS) == read


@pytest.mark.parametrize("option", ["hosts", "colour=blue"])
def test_what_is_no_option_is_told(option: str) -> None:
    with pytest.raises(EngineError, match="with one of hosts, args, nodes, python for NAME"):
        _read_options([option], PARAMETERS)
