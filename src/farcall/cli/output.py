"""The output of several workers in one stream: each byte as it was written, each line behind its worker's number.

    what a worker wrote        where it goes
    a whole line               out, at once
    text that ends in ``\\r``   out, at once: the next state of a progress bar overwrites it
    an unfinished line         kept until it is finished, so that no other worker's line gets into it; on a terminal
                               only for `HOLD_S`, since it may be a question

Knows nothing of processes. Invariant: without the numbers, the output of a worker is byte for byte what it wrote, but
for a line end between what two workers left unfinished.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from rich.console import Console

__all__ = ["Output", "Source"]

COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
HOLD_S = 0.2
_ENDS = (b"\n", b"\r")
_ENDED = re.compile(rb"(?<=\n)|(?<=[^\r\n]\r)(?!\n)")
_CLEAR_LINE = b"\x1b[K"


class Output:
    """One stream, and the workers that share it.

    Its state: whose line the cursor is in, and how the bytes before it ended.
    """

    def __init__(self, console: Console, workers: int) -> None:
        self._console = console
        self._width = len(str(workers - 1))
        self._sources: list[Source] = []
        self._writing: Source | None = None
        self._last = b"\n"
        self.is_terminal: bool = console.is_terminal

    def source(self, rank: int) -> Source:
        """The place for what one more process writes."""
        color = COLORS[rank % len(COLORS)]
        with self._console.capture() as captured:
            self._console.print(f"[{color}]{rank:>{self._width}} |[/] ", end="", highlight=False)
        made = Source(self, captured.get().encode())
        self._sources.append(made)
        return made

    def show_unfinished(self) -> None:
        """On a terminal, let people see lines that stay unfinished."""
        if self.is_terminal:
            for source in self._sources:
                source.show_unfinished()

    def begin_line(self) -> None:
        """Before somebody else writes: finish the line that the cursor is in."""
        if self._last != b"\n":
            self._write(b"\n")
            self._console.file.flush()
        self._writing = None

    def put(self, source: Source, pieces: Sequence[bytes]) -> None:
        """Write pieces of a worker's output: lines, states of a progress bar, the part of a line."""
        for piece in pieces:
            is_new = self._writing is not source
            if is_new and (self._last not in _ENDS or (self._last == b"\r" and not self.is_terminal)):
                self._write(b"\n")
            if is_new or self._last == b"\n" or (self._last == b"\r" and piece != b"\n"):  # that is the rest of \r\n
                if self.is_terminal and self._last == b"\r" and is_new:
                    self._write(_CLEAR_LINE)
                # A progress bar may begin with \r: the number comes after it, or would be overwritten.
                text = piece.lstrip(b"\r")
                self._write(piece[: len(piece) - len(text)] + source.prefix + text)
            else:
                self._write(piece)
            self._writing = source
        self._console.file.flush()

    def _write(self, data: bytes) -> None:
        self._console.file.buffer.write(data)  # type: ignore[attr-defined]
        self._last = data[-1:]


class Source:
    """What one process writes, and the line of it that is not finished."""

    def __init__(self, output: Output, prefix: bytes) -> None:
        self._output = output
        self.prefix = prefix
        self._unfinished = b""
        self._since = 0.0

    def write(self, data: bytes) -> None:
        """Pass on what came."""
        *pieces, self._unfinished = _ENDED.split(self._unfinished + data)
        self._output.put(self, pieces)
        self._since = time.monotonic()

    def show_unfinished(self) -> None:
        if self._unfinished and time.monotonic() - self._since > HOLD_S:
            self._flush()

    def end(self) -> None:
        """The process writes no more; its last line need not be finished."""
        if self._unfinished:
            self._flush()
            self._output.begin_line()

    def _flush(self) -> None:
        self._output.put(self, [self._unfinished])
        self._unfinished = b""
