"""``farcall trace``: what all workers of a running cluster do for a while, in one file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from farcall.observe import capture
from farcall.observe.cluster import record
from farcall.observe.observer import Observer
from farcall.observe.trace import chrome_trace, write_json

__all__ = ["write_trace"]


def write_trace(
    console: Console, observer: Observer, seconds: float, output: Path, shapes: bool, memory: bool, stacks: bool
) -> None:
    """Record for ``seconds``, and write ``output``."""
    output.touch()  # whoever may not write there learns it now
    options = capture.SHAPES * shapes | capture.MEMORY * memory | capture.STACKS * stacks
    console.print(f"recording for {seconds:g} s ...")
    found = record(observer, seconds, options)
    write_json(chrome_trace(found.harvest, found.origin), output)
    workers = len(found.harvest.names)
    console.print(
        f"{output}: {workers} workers, {found.calls} calls, {found.operators} operators; open it at "
        "https://ui.perfetto.dev",
        soft_wrap=True,
    )
    if found.harvest.dropped:
        console.print(f"{found.harvest.dropped} more operators did not fit", style="yellow")
    for worker in found.missing:
        why = worker.gone or "it did not answer in time"
        console.print(Text(f"not in it: {worker.name} ({why})", style="yellow"))
