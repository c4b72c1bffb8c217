"""What members say is shown on a terminal, and not obeyed by it."""

from __future__ import annotations

import io

import pytest
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from farcall.cli.screen import CommandConsole

HOSTILE = "f\x1b[2J\x1b]0;title\x07\x9b2J\u202eend\r\x08"


def table() -> Table:
    made = Table("function")
    made.add_row(Text(HOSTILE))
    return made


@pytest.mark.parametrize(
    "what", [Text(HOSTILE), f"[red]{escape(HOSTILE)}[/]", table()], ids=["text", "markup", "table"]
)
def test_control_characters_of_members_are_shown(what: Text | str | Table) -> None:
    written = io.StringIO()
    screen = CommandConsole(file=written, width=120, force_terminal=True)
    screen.print(what)
    with Live(console=screen, auto_refresh=False, screen=True) as live:
        live.update(what, refresh=True)
    text = written.getvalue()
    assert text.count(r"\x1b") == 4
    for control in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\u202e", "\x08"):
        assert control not in text


def test_its_own_colours_and_lines_stay() -> None:
    written = io.StringIO()
    CommandConsole(file=written, width=80, force_terminal=True, color_system="standard").print("[red]one\ntwo[/]")
    assert written.getvalue() == "\x1b[31mone\x1b[0m\n\x1b[31mtwo\x1b[0m\n"
