"""mypy over a program that uses farcall."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_mypy(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Check a program in a folder of its own, as strictly as the sources of farcall are checked.

    Where `make lint` ran, what it knows of torch and farcall is used: half a minute less. It is copied, since several
    processes must not write to it.
    """
    cache = program.parent / "mypy_cache"
    if (known := ROOT / ".mypy_cache").exists():
        shutil.copytree(known, cache)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), *options, str(program)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
