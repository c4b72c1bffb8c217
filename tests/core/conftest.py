"""Each pair of implementations of the core, joined over unix sockets or over TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.kit.cores import Pair, implementation

from farcall.core.contract import Core


@pytest.fixture(params=["compiled-compiled", "plain-plain", "compiled-plain"])
def makers(request: pytest.FixtureRequest) -> tuple[Callable[..., Core], Callable[..., Core]]:
    near, far = request.param.split("-")
    return implementation(near), implementation(far)


@pytest.fixture(params=["unix", "tcp"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_pair(makers: tuple[Callable[..., Core], Callable[..., Core]]) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(family: str = "unix", **options: Any) -> Pair:
        pair = Pair(makers[0](**options), makers[1](**options), family)
        made.append(pair)
        pair.admit()
        return pair

    yield make
    for pair in made:
        try:
            pair.near.end()
        finally:
            pair.far.end()


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    """Over a unix socket, admitted, no workers."""
    pair = make_pair()
    pair.connect()
    return pair


@pytest.fixture
def either(make_pair: Callable[..., Pair], family: str) -> Pair:
    """The same over unix sockets and over TCP."""
    pair = make_pair(family)
    pair.connect()
    return pair
