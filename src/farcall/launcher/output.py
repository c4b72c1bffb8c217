"""The output of several workers in one stream: each byte as it was written, each line behind its worker's name.

    output of a worker         where it goes
    a whole line               out, at once
    text that ends in ``\\r``   out, at once: the next state of a progress bar overwrites it
    an unfinished line         kept until it is finished, so that no other worker's line gets into it; on a terminal
                               only for `HOLD_S`, since it may be a question

Knows nothing of processes; any thread may write. Invariant: without the names, the output of a worker is byte for byte
its own, but for a line end between the unfinished lines of two workers.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import IO, BinaryIO

COLORS = (36, 32, 33, 35, 34, 96, 92, 95)
"""As terminals number them: cyan, green, yellow, magenta, blue, and three brighter ones."""
HOLD_S = 0.2
LONGEST_LINE_BYTES = 4096
_ENDS = (b"\n", b"\r")
_ENDED = re.compile(rb"(?<=\n)|(?<=[^\r\n]\r)(?!\n)")
_CLEAR_LINE = b"\x1b[K"


class Output:
    """One stream, and the workers that share it.

    Mutable, under the lock: the worker whose line the cursor is in, and the last byte before the cursor.
    """

    def __init__(self, file: IO[str], *, is_terminal: bool | None = None, width: int = 0) -> None:
        """``width``: of the names, which are aligned to the right."""
        self._file = file
        self._width = width
        self._lock = threading.RLock()
        self._sources: list[Source] = []
        self._writing: Source | None = None
        self._last = b"\n"
        self.is_terminal: bool = file.isatty() if is_terminal is None else is_terminal
        # A notebook shows colours, and has no cursor to move.
        self._has_colors = (self.is_terminal or not hasattr(file, "buffer")) and "NO_COLOR" not in os.environ

    def source(self, name: str, number: int) -> Source:
        """The place for the output of one more process; ``number`` chooses its colour."""
        prefix = f"{name:>{self._width}} |"
        if self._has_colors:
            prefix = f"\x1b[{COLORS[number % len(COLORS)]}m{prefix}\x1b[0m"
        made = Source(self, f"{prefix} ".encode())
        with self._lock:
            self._sources.append(made)
        return made

    def bare_source(self) -> Source:
        """A place for lines of our own, without a name."""
        return Source(self, b"")

    def forget(self, source: Source) -> None:
        """Its process has ended."""
        with self._lock:
            if source in self._sources:
                self._sources.remove(source)

    def show_unfinished(self) -> None:
        """On a terminal, let people see lines that stay unfinished."""
        if self.is_terminal:
            with self._lock:
                for source in self._sources:
                    source.show_unfinished()

    def begin_line(self) -> None:
        """Finish the line that the cursor is in, before another writer begins."""
        with self._lock:
            if self._last != b"\n":
                self._write(b"\n")
                self._flush()
            self._writing = None

    def put(self, source: Source, pieces: Sequence[bytes]) -> None:
        """Write pieces of a worker's output: lines, states of a progress bar, the part of a line."""
        with self._lock:
            for piece in pieces:
                self._put(source, piece)
            self._flush()

    def _put(self, source: Source, piece: bytes) -> None:
        is_new = self._writing is not source
        if is_new and (self._last not in _ENDS or (self._last == b"\r" and not self.is_terminal)):
            self._write(b"\n")
        if is_new or self._last == b"\n" or (self._last == b"\r" and piece != b"\n"):  # that is the rest of \r\n
            if self.is_terminal and self._last == b"\r" and is_new:
                self._write(_CLEAR_LINE)
            # A progress bar may begin with \r: the name comes after it, or would be overwritten.
            text = piece.lstrip(b"\r")
            self._write(piece[: len(piece) - len(text)] + source.prefix + text)
        else:
            self._write(piece)
        self._writing = source

    def _flush(self) -> None:
        # The bytes alone: the text layer above may hold half a line that the program itself is printing.
        getattr(self._file, "buffer", self._file).flush()

    def _write(self, data: bytes) -> None:
        if not data:
            return
        buffer = getattr(self._file, "buffer", None)
        if buffer is not None:
            buffer.write(data)
        else:
            self._file.write(data.decode(errors="replace"))  # a notebook's stream takes only text
        self._last = data[-1:]


class Source:
    """The output of one process, and its unfinished line."""

    def __init__(self, output: Output, prefix: bytes) -> None:
        self._output = output
        self.prefix = prefix
        self._unfinished = b""
        self._since = 0.0

    def write(self, data: bytes) -> None:
        """Pass ``data`` on."""
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
        self._output.forget(self)

    def _flush(self) -> None:
        self._output.put(self, [self._unfinished])
        self._unfinished = b""


class LastLines:
    """The last lines of a process: of a progress bar its last state, of a long line its end."""

    def __init__(self, most: int) -> None:
        self._lines: deque[bytes] = deque(maxlen=most)

    def write(self, data: bytes) -> None:
        for piece in data.splitlines(keepends=True):
            line = piece
            if self._lines and not self._lines[-1].endswith(b"\n"):
                before = self._lines.pop()
                if piece == b"\n" or not before.endswith(b"\r"):  # after \r the line is overwritten
                    line = before + piece
            self._lines.append(line[-LONGEST_LINE_BYTES:])

    def clear(self) -> None:
        self._lines.clear()

    def texts(self) -> list[str]:
        """The lines, without their ends."""
        return [line.decode(errors="replace").rstrip("\r\n") for line in self._lines]


class WorkerOutput:
    """The output of a cluster's workers: to a stream, behind their names, and into files, one for each.

    Any thread may call it. While a program waits, a terminal has one more line below the others: `show_status`.
    """

    def __init__(self, stream: Output | None, folder: str | None) -> None:
        self._stream = stream
        self._folder = folder
        self._lock = threading.Lock()
        self._sources: dict[Hashable, Source] = {}
        self._files: dict[Hashable, BinaryIO] = {}
        self._status: Source | None = None

    def write(self, process: Hashable, name: str, rank: int, data: bytes) -> None:
        """A process of the worker ``name`` wrote ``data``."""
        with self._lock:
            if self._stream is not None:
                if process not in self._sources:
                    self._sources[process] = self._stream.source(name, rank)
                self._sources[process].write(data)
            if self._folder is not None:
                if process not in self._files:
                    # Appended to: a worker that is started again goes on in the same file.
                    self._files[process] = open(f"{self._folder}/{name}.log", "ab", buffering=0)  # noqa: SIM115
                self._files[process].write(data)

    def end(self, process: Hashable) -> None:
        """The process writes no more."""
        with self._lock:
            source, file = self._sources.pop(process, None), self._files.pop(process, None)
            if source is not None:
                source.end()
        if file is not None:
            file.close()

    def close(self) -> None:
        """No process writes any more."""
        for process in [*self._sources, *self._files]:
            self.end(process)

    def show_unfinished(self) -> None:
        with self._lock:  # which guards the unfinished lines
            if self._stream is not None:
                self._stream.show_unfinished()

    def show_status(self, text: str) -> None:
        """Show one line below all others, instead of the one before; empty: none. On terminals only."""
        with self._lock:
            if self._stream is None or not self._stream.is_terminal or (not text and self._status is None):
                return
            if self._status is None:
                self._status = self._stream.bare_source()
            # A line that wraps would not be overwritten by the next one.
            line = " ".join(text.split())[: shutil.get_terminal_size().columns - 1]
            self._status.write(_CLEAR_LINE + line.encode() + b"\r")
            if not text:
                self._status.end()
                self._status = None
