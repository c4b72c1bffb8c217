"""The console of all commands.

What members say may be hostile: names of functions, texts of errors. An escape in it could clear the terminal, set its
title, or hide a line. So control characters of texts are shown as escapes; only rich's own reach the terminal.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from farcall.runtime.io.log_lines import printable


class CommandConsole(Console):
    """A console that shows control characters instead of obeying them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style)
