"""For the site: links from a page to files outside docs become the names of those files.

On a repository's web page such links work, on the site there is nothing behind them. A hook of mkdocs (mkdocs.yml). A
link to a file that does not exist is left alone, and mkdocs warns of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>(?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        target = (folder / link["target"]).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT) or not target.exists():
            return link[0]
        name = f"`{target.relative_to(ROOT)}`"
        return name if link["text"].strip("`") in name else f"{link['text']} ({name})"

    return _LINK.sub(replace, markdown)
