"""The documentation builds as a site, with warnings as errors: links that lead nowhere, names that do not exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the docs extra is not installed")
pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
ROOT = Path(__file__).parents[2]


def test_the_site_builds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rpc_sync" in (tmp_path / "api.html").read_text()
    assert "<code>examples/README.md</code>" in (tmp_path / "tutorial.html").read_text()
    assert "magic" in (tmp_path / "wire_format.html").read_text()
