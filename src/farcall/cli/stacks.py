"""``farcall stacks``: threads that wait for each other, in words.

Owns the display of snapshots: stuck calls first, then a line for each call that a worker serves or makes, with its age,
thread and line, and under it the call for which it waits in turn.
"""

from __future__ import annotations

import linecache
import os
import time
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from farcall.observe.observer import Observer
from farcall.observe.snapshot import STARTING, OutgoingCall, ServedCall, StackLine, ThreadView, WorkerSnapshot
from farcall.observe.troubles import ThreadKey, find_troubles, long_turns, still_threads

_MOST_CALLS_SHOWN = 20
_MOST_MISSING_SHOWN = 5


def show(console: Console, observer: Observer, between_s: float, full: bool) -> bool:
    """Take two snapshots, ``between_s`` apart, and show the second; True: something is stuck."""
    before = observer.snapshots()
    time.sleep(between_s)
    heard = observer.snapshots()
    still = still_threads(before.answers, heard.answers)
    troubles = find_troubles(heard.answers, still)
    calls = sum(len(one.calls) + one.calls_left_out for one in heard.answers)
    head = f"cluster {heard.cluster_id}: {len(heard.answers)} workers, {calls} calls in flight"
    console.print(Text(head, style="bold"))
    for trouble in troubles:
        console.print(Text(f"{trouble.kind.upper()}: {trouble.text}", style="bold red"))
        for step in trouble.steps:
            console.print(Text(f"  {step}", style="red"), soft_wrap=True)
    for worker in heard.silent:
        why = worker.gone or "it did not answer: its process may be stopped, or busy in native code"
        console.print(Text(f"{worker.name} (rank {worker.rank}): {why}", style="yellow"))
    starting = [one for one in heard.answers if one.state == STARTING]
    if starting:
        console.print(Text(_starting(starting), style="yellow"), soft_wrap=True)
    display = _Display(console, still, full)
    for snapshot in heard.answers:
        display.worker(snapshot)
    if troubles:
        return True
    turns = long_turns(heard.answers)
    for turn in turns:
        console.print(Text(turn, style="yellow"), soft_wrap=True)
    if turns:
        console.print("No circle of waits was found: they go on if that call does.", style="yellow")
    else:
        console.print("Nothing seems stuck.", style="green")
    return False


def _starting(starting: list[WorkerSnapshot]) -> str:
    """The workers that are still missing, while a cluster starts."""
    missing = Counter(name for one in starting for name in one.unconnected)
    named = ", ".join(f"{name} (to {count} of them)" for name, count in missing.most_common(_MOST_MISSING_SHOWN))
    more = f" and {len(missing) - _MOST_MISSING_SHOWN} others" if len(missing) > _MOST_MISSING_SHOWN else ""
    waits = f"; not connected yet: {named}{more}" if missing else ""
    return f"still starting: {len(starting)} of the workers{waits}"


@dataclass(frozen=True)
class _Display:
    """The lines of each worker."""

    console: Console
    still: set[ThreadKey]
    full: bool

    def worker(self, one: WorkerSnapshot) -> None:
        pool = one.pool
        self.console.print(
            f"\n[bold]{escape(one.worker)}[/] rank {one.rank}, process {one.process_id} on {escape(one.host)}, "
            f"{one.state}; "
            f"{pool.busy} of {pool.threads} threads busy ({pool.parked} wait for calls), {pool.queued} calls queued"
        )
        waiting = {call.thread_id: call for call in one.calls if call.thread_id}
        for served in one.served[:_MOST_CALLS_SHOWN]:
            self._served(one, served, waiting.pop(served.thread_id, None))
        self._more(len(one.served) + one.served_left_out, "served")
        loose = [call for call in one.calls if call.thread_id in waiting]
        for call in loose[:_MOST_CALLS_SHOWN]:
            self._line(f"  {_outgoing(call)}")
            self._stack(one.thread(call.thread_id), "    ")
        self._more(len(loose), "waited for")
        self._calls_ahead(one)
        told = {call.thread_id for call in one.calls} | {served.thread_id for served in one.served}
        for thread in one.threads:
            if thread.id not in told:  # the main thread, which waits for no call
                self._stack(thread, "  ")

    def _served(self, one: WorkerSnapshot, served: ServedCall, waits_for: OutgoingCall | None) -> None:
        stands = waits_for is None and served.thread_id and (one.worker, served.thread_id) in self.still
        mark = " [yellow](does not move)[/]" if stands else ""
        holder = served.behind
        behind = "" if holder is None or not holder.function else f", behind {escape(holder.function)}()"
        self._line(
            f"  serves {escape(served.title)}() for [cyan]{escape(served.caller)}[/]: {served.state} for "
            f"{_seconds(served.for_s)}{mark}{behind}"
        )
        if waits_for is not None:
            self._line(f"    {_outgoing(waits_for)}")
        self._stack(one.thread(served.thread_id), "    ")

    def _calls_ahead(self, one: WorkerSnapshot) -> None:
        """The calls that no thread waits for, one line for each kind."""
        kinds: dict[tuple[str, str], list[OutgoingCall]] = {}
        for call in one.calls:
            if not call.thread_id:
                kinds.setdefault((call.to, call.function), []).append(call)
        for calls in kinds.values():
            oldest = max(calls, key=lambda call: call.for_s)
            self._line(f"  {_outgoing(oldest)}" + (f", and {len(calls) - 1} more of these" if len(calls) > 1 else ""))
        if one.calls_left_out:
            self.console.print(f"  ... and {one.calls_left_out} younger calls made")

    def _stack(self, thread: ThreadView | None, indent: str) -> None:
        if thread is None:
            return
        for index, frame in enumerate(thread.stack if self.full else thread.stack[:1]):
            prefix = f"thread {thread.name} at " if index == 0 else "called from "
            text = Text(f"{indent}{prefix}{_place(frame)}", style="dim" if index else "")
            self.console.print(text, soft_wrap=True)

    def _more(self, count: int, kind: str) -> None:
        if count > _MOST_CALLS_SHOWN:
            self.console.print(f"  ... and {count - _MOST_CALLS_SHOWN} more calls {kind}")

    def _line(self, text: str) -> None:
        self.console.print(text, highlight=False)


def _outgoing(call: OutgoingCall) -> str:
    limit = f" of {_seconds(call.timeout_s)}" if call.timeout_s else ", without a timeout"
    verb = "waits for" if call.thread_id else "has called"
    return f"{verb} [cyan]{escape(call.to)}[/] {escape(call.title)}(): {_seconds(call.for_s)}{limit}"


def _place(frame: StackLine) -> str:
    # A worker on another host may have files that are not here: then there is no line to show.
    line = linecache.getline(frame.file, frame.line).strip()
    file = os.path.relpath(frame.file) if frame.file.startswith(os.getcwd() + os.sep) else frame.file
    return f"{file}:{frame.line} in {frame.function}" + (f": {line}" if line else "")


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
