"""benchmarks/others.py measures what is here, farcall itself; the table of weights has a verdict for each target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_farcall_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "others.py"),
        "--system",
        "farcall",
        "--budget",
        "0.05",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "the error: PeerDead: callee is gone" in done.stdout
    figures = json.loads(out.read_text())["figures"]
    assert len(figures) == 6
    assert all(value > 0 for value in figures.values()), figures


def test_kept_weights_are_judged() -> None:
    command = [sys.executable, str(BENCHMARKS / "weights_table.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    targets = [line for line in done.stdout.splitlines() if ">=" in line or "<=" in line]
    assert len(targets) == 10
    assert all(line.endswith(("met", "MISSED", "not measured")) for line in targets)
    assert "floor / farcall" in done.stdout
