"""Findings: one for each thing that the doctor looked at, for people and as JSON.

A finding is "ok", a "note" (it works, and there is something to know) or "wrong" (a program would fail or hang because
of it). All but "ok" say what to do. Knows nothing of the things themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape

State = Literal["ok", "note", "wrong"]
_SIGNS: dict[State, str] = {"ok": "[green]ok   [/]", "note": "[yellow]note [/]", "wrong": "[bold red]WRONG[/]"}


@dataclass(frozen=True)
class Finding:
    """The state of one thing, and what to do about it."""

    subject: str
    state: State
    found: str
    advice: str = ""


def ok(subject: str, found: str) -> Finding:
    """It works."""
    return Finding(subject, "ok", found)


def note(subject: str, found: str, advice: str) -> Finding:
    """It works; ``advice`` says how to have it otherwise."""
    return Finding(subject, "note", found, advice)


def wrong(subject: str, found: str, advice: str) -> Finding:
    """It does not work; ``advice`` says what to do."""
    return Finding(subject, "wrong", found, advice)


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if something is wrong, else 0."""
    return int(any(finding.state == "wrong" for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """All findings, for programs."""
    return json.dumps(
        {"ok": exit_status(findings) == 0, "findings": [asdict(finding) for finding in findings]}, indent=2
    )


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """All findings, for people: a line for each, and below it what to do."""
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        line = f"{_SIGNS[finding.state]} [bold]{escape(finding.subject):<{width}}[/]  {escape(finding.found)}"
        console.print(line, highlight=False, soft_wrap=True)
        if finding.advice:
            console.print(f"{'':{width + 8}}[italic]{escape(finding.advice)}[/]", highlight=False, soft_wrap=True)
    count = sum(finding.state == "wrong" for finding in findings)
    verdict = f"[bold red]{count} wrong[/]" if count else "[green]nothing wrong[/]"
    console.print(f"{verdict}, {len(findings)} {'check' if len(findings) == 1 else 'checks'}", highlight=False)
