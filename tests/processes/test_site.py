"""The documentation as a site: it builds without a warning, needs no network, and can be searched from a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.processes.browser import Browser, find_chromium

pytest.importorskip("mkdocs", reason="the docs extra is not installed")
pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
ROOT = Path(__file__).parents[2]
_TAG = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?(?P<address>[^\s\">]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_builds(site: Path) -> None:
    assert "rpc_sync" in (site / "api.html").read_text()
    assert "<code>examples/README.md</code>" in (site / "tutorial.html").read_text()
    assert "magic" in (site / "wire_format.html").read_text()


def test_its_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]  # which only servers show
    assert len(pages) > 40
    for page in pages:
        loaded = [match["address"] for match in _TAG.finditer(page.read_text())]
        assert any("iframe-worker" in address for address in loaded), page
        for address in loaded:
            assert not re.match(r"(https?:)?//", address), (page, address)
            assert address.startswith("data:") or (page.parent / address.partition("?")[0]).exists(), (page, address)


@pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium here: install one (Debian: chromium), or set FARCALL_CHROMIUM"
)
@pytest.mark.parametrize("page", ["index.html", "launching/ssh.html"])
def test_it_can_be_searched_from_a_folder(site: Path, tmp_path: Path, page: str) -> None:
    with Browser(tmp_path) as browser:
        browser.open((site / page).as_uri())
        browser.write("input.md-search__input", "Supersede")
        browser.command("Input.dispatchKeyEvent", type="keyDown", key="d", text="d")
        browser.command("Input.dispatchKeyEvent", type="keyUp", key="d")  # which is when the page looks at the field
        found = "[...document.querySelectorAll('a.md-search-result__link')].map(link => link.href)"
        browser.wait_for(f"{found}.some(address => address.includes('/weights.html'))")
        assert browser.complaints == []
