"""Options of all kinds of nonsense: a TypeError or a ValueError that says which one, and nothing else."""

from __future__ import annotations

import dataclasses
import math
from datetime import timedelta
from typing import Any

from tests.fuzz.mutations import rounds

from farcall.options import LimitOptions, MembershipOptions, MemoryOptions, ObservingOptions, RpcBackendOptions

NONSENSE: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 10**400, -(10**400), 0.5, -0.0, 1e300, math.inf, -math.inf, math.nan),
    *("", "x", "\0", "\ud800", "tcp://[::1", "tcp://h:99999", "file://", "a:b", "127.0.0.1", "9" * 5000, "é" * 300),
    *(b"", b"x" * 16, b"\xff" * 40, (), [], {}, [1], {"a": 1}, {"w1": {"cuda:0": "cuda:1"}}, {"w1": {0: None}}),
    *(object(), type, timedelta(seconds=1), ["tcp"], ["unix", 3], {"tcp"}, "unix,tcp", "tcp,,"),
]
KINDS = (RpcBackendOptions, MembershipOptions, MemoryOptions, LimitOptions, ObservingOptions)


def test_nonsense_is_refused_in_words() -> None:
    names = {kind: [field.name for field in dataclasses.fields(kind)] for kind in KINDS}
    for seed, chance in rounds(4000):
        kind = chance.choice(KINDS)
        chosen = {name: chance.choice(NONSENSE) for name in chance.sample(names[kind], min(2, len(names[kind])))}
        try:
            made = kind(**chosen)
        except (TypeError, ValueError):
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {kind.__name__}({chosen!r})") from error
        assert dataclasses.replace(made) == made, seed
