"""Draws docs/images/layers.svg: the parts of farcall by layer, and which imports which.

    python tools/draw_layers.py

Layers come from the import-linter contract in pyproject.toml, imports from the code itself (grimp, which import-linter
brings along). ``tests/unit/test_layers_picture.py`` fails where the picture is out of date. Nothing in it depends on
the machine: the same code gives the same bytes. Of what everybody imports (errors, ids, options) no lines are drawn.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "layers.svg"

BOX_WIDTH, BOX_HEIGHT, GAP, ROW = 120, 34, 26, 84
MARGIN = 20
FOR_ALL = ("options", "ids", "errors")
STYLE = """
  rect { fill: #eef2fb; stroke: #4a63b8; stroke-width: 1.2; rx: 6 }
  text { font: 14px sans-serif; fill: #1c2750; text-anchor: middle; dominant-baseline: middle }
  path { fill: none; stroke: #4a63b8; stroke-opacity: 0.5; stroke-width: 1.5 }
"""


def layers() -> list[list[str]]:
    """The parts, the highest layer first, as far as they exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    [contract] = [contract for contract in contracts if contract["type"] == "layers"]
    rows = [[part.strip(" ()") for part in re.split(r"[|:]", row)] for row in contract["layers"]]
    found = [[part for part in row if _exists(part)] for row in rows]
    return [*(row for row in found if row and not set(row) & set(FOR_ALL)), list(FOR_ALL)]


def _exists(part: str) -> bool:
    source = ROOT / "src" / "farcall"
    return (source / part / "__init__.py").exists() or (source / f"{part}.py").exists()


def imports() -> set[tuple[str, str]]:
    """Which part imports something of which other."""
    graph = grimp.build_graph("farcall", cache_dir=None)
    pairs = {
        (_part(module), _part(imported))
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    }
    return {(importer, part) for importer, part in pairs if importer and part and importer != part}


def _part(module: str) -> str:
    _, _, rest = module.partition(".")
    return rest.partition(".")[0]


def draw() -> str:
    """The picture."""
    rows = layers()
    width = max(len(row) for row in rows) * (BOX_WIDTH + GAP) - GAP + 2 * MARGIN + 120
    height = len(rows) * ROW - (ROW - BOX_HEIGHT) + 2 * MARGIN
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * (BOX_WIDTH + GAP) + GAP) / 2
        # Rows are shifted by turns, so that lines between boxes that are not neighbours do not hide each other.
        shift = 40 * (number % 3 - 1)
        for column, part in enumerate(row):
            places[part] = (left + column * (BOX_WIDTH + GAP) + shift, MARGIN + number * ROW)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<title>farcall: what imports what</title><style>{STYLE}</style>",
    ]
    for importer, part in sorted(imports()):
        if importer in places and part in places and part not in FOR_ALL:
            lines.append(_line(places[importer], places[part]))
    for part, (x, y) in places.items():
        lines.append(f'<rect x="{x:.0f}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>')
        lines.append(f'<text x="{x + BOX_WIDTH / 2:.0f}" y="{y + BOX_HEIGHT / 2:.0f}">{part}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _line(above: tuple[float, float], below: tuple[float, float]) -> str:
    x1, y1 = above[0] + BOX_WIDTH / 2, above[1] + BOX_HEIGHT
    x2, y2 = below[0] + BOX_WIDTH / 2, below[1]
    middle = (y1 + y2) / 2
    path = f"M {x1:.0f} {y1:.0f} C {x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="{path}"/>'


def main() -> None:
    PICTURE.write_text(draw())
    print(f"wrote {PICTURE.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
