"""The pages of the documentation as their readers use them: files to save, commands to type, output to compare.

    on the page                                what the tests do
    ```python title="hello.py"                 write it to a file of that name, in an empty folder
    ```console                                 type the lines after `$` in that folder, in turn, with farcall
                                               from its wheel; compare the output with what the page shows
    ```python title="Part of hello.py"         find it, line by line, in that file
    ```python title="Not run: why"             nothing; the title is what a reader sees, too

Lines of output may come in any order, since workers take turns as they like. `...` stands for any text in a line; as
a line of its own, for any lines. A command that is to fail is followed by a line `[exit status 1]`, which a reader does
not see in a terminal.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tests.kit.wheel import Installed

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_TITLE = re.compile(r'title="(?P<title>[^"]*)"')
_STATUS = re.compile(r"\[exit status (\d+)\]")
COMMAND_S = 250.0


@dataclass(frozen=True)
class Block:
    """One fenced block, and where it is."""

    page: str
    line: int
    kind: str
    title: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command of a console block, and what the page says comes of it."""

    text: str
    shown: tuple[str, ...]
    status: int


def pages() -> list[str]:
    """The README and everything under docs, by path."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    text = (ROOT / page).read_text()
    found = []
    for match in _FENCE.finditer(text):
        title = _TITLE.search(match["info"])
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(Block(page, line, match["kind"], title["title"] if title else "", textwrap.dedent(match["text"])))
    return found


def files_of(page: str) -> dict[str, str]:
    """The files that a reader saves, by name."""
    named = [block for block in blocks_of(page) if block.title and " " not in block.title]
    files = {block.title: block.text for block in named}
    assert len(files) == len(named), f"{page}: two files of one name"
    return files


def commands_of(page: str) -> list[Command]:
    """The commands that a reader types, in order."""
    found: list[Command] = []
    for block in blocks_of(page):
        if block.kind != "console":
            continue
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            status = _STATUS.search(shown)
            lines = [line.rstrip() for line in _STATUS.sub("", shown).splitlines()]
            found.append(Command(command, tuple(filter(None, lines)), int(status[1]) if status else 0))
    return found


def run_page(page: str, installed: Installed, folder: Path) -> None:
    """Save the page's files, type its commands, and compare."""
    for name, text in files_of(page).items():
        (folder / name).write_text(text)
    for command in commands_of(page):
        done = installed.run("bash", "-c", command.text, timeout_s=COMMAND_S, cwd=folder)
        output = done.stdout + done.stderr
        assert done.returncode == command.status, f"{page}: $ {command.text}\n{output}"
        problem = compare(command.shown, output)
        assert not problem, f"{page}: $ {command.text}\n{problem}; the output was\n{output}"


SLOW = ("Are all workers started?", "shutdown waits: ")
"""What workers say when others take long, as on a busy machine."""


def compare(shown: tuple[str, ...], output: str) -> str:
    """What is wrong with the output that a page shows; nothing: it is right."""
    left = [line.rstrip() for line in output.splitlines() if line.strip() and not any(text in line for text in SLOW)]
    for line in shown:
        if line == "...":
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in line.split("...")))
        match = next((one for one in left if pattern.fullmatch(one)), None)
        if match is None:
            return f"the page shows a line that did not come: {line!r}"
        left.remove(match)
    return f"a line came that the page does not show: {left[0]!r}" if left and "..." not in shown else ""
