"""The picture of the architecture is that of the code."""

from __future__ import annotations

from tools.draw_layers import PICTURE, draw, imports, layers


def test_every_part_has_its_place() -> None:
    named = {part for row in layers() for part in row}
    assert {part for pair in imports() for part in pair} - named <= {"__main__"}


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text() == draw(), "run: python tools/draw_layers.py"
