"""docs/versions.md and what is declared to pip agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROWS = re.findall(r"^\| (3\.\d+)\S* \| (\d\.\d+)\S* *[^|]*\| [^|]*\| holds \|$", PAGE, re.MULTILINE)


def test_every_python_that_is_declared_was_tried() -> None:
    declared = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: Python :: 3\.\d+$", c)}
    assert declared == {python for python, _ in ROWS}
    oldest = min(declared, key=lambda python: int(python.partition(".")[2]))
    assert PROJECT["requires-python"] == f">={oldest}"


def test_the_oldest_torch_that_is_declared_was_tried() -> None:
    [declared] = [found for found in PROJECT["dependencies"] if found.startswith("torch")]
    oldest = min((torch for _, torch in ROWS), key=lambda torch: int(torch.partition(".")[2]))
    assert declared == f"torch>={oldest}"
