"""Where, when and with what a run was made: the stamp on its file. Knows nothing of what was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch


def stamp() -> dict[str, str | int | None]:
    return {
        "farcall": version("farcall"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }


def processor() -> str:
    """Its name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str:
    """The commit of the checkout that farcall lies in; empty where it is installed, or where git is not."""
    root = Path(__file__).parents[4]
    if not (root / ".git").exists():  # the environment of a program may lie in a checkout of that program
        return ""
    try:
        command = ["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
