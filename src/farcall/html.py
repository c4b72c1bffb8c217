"""Tables for notebooks, for ``_repr_html_`` of nodes, references, members and metrics.

Knows none of them, and no style but the notebook's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(title: str, rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """A small table under a title; the first cell of each row names the others."""
    from html import escape  # its 2,500 entities are not loaded for nothing

    parts = [f"<table><caption><b>{escape(title)}</b></caption>"]
    if head:
        parts.append("<tr>" + "".join(f"<th>{escape(one)}</th>" for one in head) + "</tr>")
    for first, *others in rows:
        cells = "".join(f"<td>{_cell(escape(str(one)))}</td>" for one in others)
        parts.append(f"<tr><th>{escape(str(first))}</th>{cells}</tr>")
    return "".join([*parts, "</table>"])


def _cell(text: str) -> str:
    return f'<a href="{text}">{text}</a>' if text.startswith("http://") else text
