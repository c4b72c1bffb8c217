"""The demo on the screen: a bar and events while it runs, then the figures and the files.

In a terminal the bar moves; elsewhere there is a line from time to time.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from farcall.cli.demo.picture import as_svg
from farcall.cli.demo.play import DemoFailed, Figures, Play, latency_s, writing
from farcall.cli.demo.training import OPERATIONS, SERVERS, TRAINERS

FOLDER = "farcall-demo"
PICTURE, TRACE, FIGURES = "demo.svg", "trace.json", "figures.json"
_LINE_EVERY_S = 1.0


def run(console: Console, steps: int, output: Path | None) -> int:
    """Play, write the files, and print the figures or the failure; returns the exit code."""
    folder = output or _fresh(Path.cwd())
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _complain(f"cannot make a folder for the files: {error}. Name another one: farcall demo --output FOLDER")
        return 2
    try:
        return _run(console, steps, folder)
    finally:
        if is_new:
            with suppress(OSError):  # there are files in it, as there should be
                folder.rmdir()


def _run(console: Console, steps: int, folder: Path) -> int:
    begun_s = monotonic()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    try:
        with bar:
            figures = Play(_Screen(console, bar, steps), steps, folder / TRACE).run()
        for name, text in ((PICTURE, as_svg(figures)), (FIGURES, figures.as_json())):
            with writing(folder / name) as path:
                path.write_text(text)
    except DemoFailed as error:
        _complain(f"the demo failed: {error}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; all workers have ended")
        return 130
    _tell(console, figures, folder, monotonic() - begun_s)
    return 0


def _fresh(parent: Path) -> Path:
    """A folder that is not there yet: the files of an earlier demo stay."""
    folder = parent / FOLDER
    number = 1
    while folder.exists():
        number += 1
        folder = parent / f"{FOLDER}-{number}"
    return folder


class _Screen:
    """The `Stage` of a terminal or a file."""

    def __init__(self, console: Console, bar: Progress, steps: int) -> None:
        self._console = console
        self._bar = bar
        self._total = steps
        self._begun_s = self._line_s = monotonic()
        self._task = bar.add_task("starting", total=steps, loss="")

    def on_event(self, text: str) -> None:
        self._console.print(f"{monotonic() - self._begun_s:5.1f} s  {text}", highlight=False, soft_wrap=True)

    def on_steps(self, done: int, loss: float) -> None:
        self._bar.update(self._task, description="training", completed=done, loss=f", loss {loss:.3f}")
        if not self._console.is_terminal and monotonic() - self._line_s > _LINE_EVERY_S:
            self._line_s = monotonic()
            self.on_event(f"{done} of {self._total} steps, loss {loss:.3f}")


def _tell(console: Console, figures: Figures, folder: Path, took_s: float) -> None:
    death = figures.death
    errors = ", ".join(sorted({outage.error.partition(":")[0] for outage in figures.outages})) or "none"
    waited_s = max((outage.ended_s - outage.begun_s for outage in figures.outages), default=0.0)
    lines = [
        "",
        f"[bold green]Done in {took_s:.0f} s.[/] {len(SERVERS)} parameter servers and {len(TRAINERS)} trainers took "
        f"{len(figures.steps)} steps through distributed autograd.",
        f"  loss       from {figures.loss_at_first():.3f} to {figures.loss_at_last():.3f}; {figures.accuracy:.1%} of "
        "the points that were held out are put on the right spiral",
        f"  failure    {death.worker} was killed after {death.after_steps} steps; it was known to be dead after "
        f"{(death.noticed_s - death.killed_s) * 1e3:.0f} ms, and back after {death.back_s - death.killed_s:.2f} s with "
        f"the parameters of step {death.saved_steps}",
        f"             {len(figures.outages)} steps failed ({errors}) and were done again; no trainer waited "
        f"longer than {waited_s:.2f} s",
    ]
    for index, name in enumerate(OPERATIONS):
        half_s, most_s = latency_s(figures.steps, index)
        heading = "latency" if index == 0 else ""
        lines.append(f"  {heading:<10} {name:<23} p50 {half_s * 1e3:6.2f} ms   p99 {most_s * 1e3:6.2f} ms")
    lines += [
        "",
        f"Files, in {folder.resolve()}:",
        f"  {PICTURE:<13} loss, latencies and what the model has learned; open it in a browser",
        f"  {TRACE:<13} the last steps of all workers, for https://ui.perfetto.dev",
        f"  {FIGURES:<13} the figures behind the picture",
    ]
    for name, why in figures.missing_in_trace.items():
        lines.append(f"[bold yellow]  {name} is not in the trace: {why}[/]")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _complain(text: str) -> None:
    Console(stderr=True).print(f"farcall: {text}", style="bold red", markup=False, highlight=False, soft_wrap=True)
