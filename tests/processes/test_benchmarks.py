"""benchmarks/others.py measures what is here: farcall itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "others.py"


def test_farcall_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(PROGRAM), "--system", "farcall", "--budget", "0.05", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "the error: PeerDead: callee is gone" in done.stdout
    figures = json.loads(out.read_text())["figures"]
    assert len(figures) == 6
    assert all(value > 0 for value in figures.values()), figures
