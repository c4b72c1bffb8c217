"""The ``farcall`` command, for people in a terminal. No program imports it."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what to install if its libraries are not there."""
    try:
        import rich
        import typer
    except ModuleNotFoundError as missing:
        sys.exit(f"the farcall command needs {missing.name}: pip install 'farcall[cli]'")
    del rich, typer

    from farcall.cli.app import app

    app()
