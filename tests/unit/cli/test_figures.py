"""Durations, sizes and rates as people read them."""

from __future__ import annotations

import pytest

from farcall.cli.figures import duration, rate, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "-"),
        (1e-7, "<1 us"),
        (1e-6, "1 us"),
        (0.00099, "990 us"),
        (0.0123, "12.3 ms"),
        (0.9993, "999 ms"),
        (0.9996, "1 s"),
        (2.0, "2 s"),
        (12_345.6, "12,346 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (999.9, "0.976 KiB"), (1024, "1 KiB"), (3 << 19, "1.5 MiB"), (5 << 40, "5 TiB")],
)
def test_sizes(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


@pytest.mark.parametrize(("per_s", "text"), [(0.0, "0"), (0.52, "0.5"), (10.4, "10"), (12_000.0, "12,000")])
def test_rates(per_s: float, text: str) -> None:
    assert rate(per_s) == text
