"""Durations, sizes and rates as people read them: three digits and a unit."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """ "1.5 ms", "12 s"; "-" for none at all."""
    if seconds == 0:
        return "-"
    if seconds < 0.9995e-6:
        return "<1 us"
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    # From 0.9995 of a unit on: three digits of 999.9 ms would be 1e+03.
    factor, unit = next(row for row in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds >= row[0] * 0.9995)
    return f"{seconds / factor:.3g} {unit}"


def size(size_bytes: float) -> str:
    """ "512 B", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


def rate(per_s: float) -> str:
    """How often in a second: "0.5", "12,000"."""
    return f"{per_s:,.0f}" if per_s >= 10 or per_s == 0 else f"{per_s:.1f}"
