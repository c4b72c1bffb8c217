"""examples/notebook.ipynb, by ``jupyter execute``: from the first cell to the last, as its reader would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")
pytest.importorskip("cloudpickle", reason="the notebook extra is not installed")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def shown(cell: dict) -> str:
    """Everything below a cell, as text."""
    parts = []
    for output in cell.get("outputs", []):
        parts += output.get("text", [])
        for kind in ("text/plain", "text/html"):
            parts += output.get("data", {}).get(kind, [])
    return "".join(parts)


@pytest.mark.timeout(240)
def test_the_notebook_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "JUPYTER_PLATFORM_DIRS": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
    environment |= {name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    done = subprocess.run(
        [sys.executable, "-m", "jupyter", "execute", "--output", str(tmp_path / "done.ipynb"), str(NOTEBOOK)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [cell for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    told = [shown(cell) for cell in cells]
    assert "<th>worker1</th>" in told[0]  # a table, which refreshes
    assert told[1] == "tensor([2., 2., 2.])\n[0, 3, 6, 9, 12]\n"
    assert told[2].startswith("1 2\n")
    assert "worker1 (rank 1)" in told[2]
    assert any("worker0 | hello from there" in text.replace("\x1b[36m", "").replace("\x1b[0m", "") for text in told)
    assert "(3, 6)" in told[4]
    assert "True {'worker0': 'running', 'worker1': 'running'}" in told[5]
    assert "Cluster: ended" in told[6]
