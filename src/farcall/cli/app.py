"""The commands and their options. Each command is a few lines over the module that does the work."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farcall import __version__

app = typer.Typer(
    name="farcall",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _console() -> Console:
    # Where nobody says how wide it is (a file, a pipe), tables need not be squeezed into 80 columns.
    return Console() if sys.stdout.isatty() else Console(width=120)


def _show_version(wanted: bool) -> None:
    if wanted:
        # From the metadata: importing torch only to ask it takes seconds.
        print(f"farcall {__version__} (torch {version('torch')}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which versions these are.")
    ] = False,
) -> None:
    """Remote procedure calls for PyTorch."""


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to run.")] = 10.0,
) -> None:
    """Four workers on this machine call each other, and you can watch."""
    from farcall.cli.demo import run

    run(_console(), seconds)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A program, or -m and a module; what follows are its own arguments.")],
    workers: Annotated[
        int | None, typer.Option(min=1, help="So many processes, told by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.")
    ] = None,
) -> None:
    """Run a program with farcall in the place of torch.distributed.rpc."""
    program = [script, *context.args]
    if workers is None:
        os.execv(sys.executable, [sys.executable, "-m", "farcall", *program])
    from farcall.cli.run import run_cluster

    raise typer.Exit(run_cluster(_console(), workers, program))


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Two short rounds: a glance, no proof.")] = False,
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Only cases whose name matches this regular expression.")
    ] = "",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How often everything is measured; 5, or 2 with --quick.")
    ] = None,
    json: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("farcall-bench.json"),
    plot: Annotated[Path, typer.Option(help="Where the picture goes (SVG).")] = Path("farcall-bench.svg"),
    stock: Annotated[bool, typer.Option(help="Measure torch.distributed.rpc too.")] = True,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a promise is broken.")] = False,
) -> None:
    """Measure farcall, stock torch.distributed.rpc and the floor in one run."""
    from farcall.cli.bench import driver, report, targets
    from farcall.cli.bench import plot as picture
    from farcall.cli.bench.cases import CASES

    try:
        pattern = re.compile(only)
    except re.error as error:
        raise typer.BadParameter(f"not a regular expression: {error}", param_hint="--only") from None
    cases = [case for case in CASES.values() if pattern.search(case.name)]
    if not cases:
        raise typer.BadParameter(f"no case matches; there are: {', '.join(CASES)}", param_hint="--only")
    contenders = [name for name in driver.CONTENDERS if stock or name != "stock"]
    rounds = rounds or (2 if quick else 5)
    console = _console()
    with Console(stderr=True).status("starting") as status:
        results = driver.run(cases, contenders, rounds, 0.1 if quick else 0.4, status.update)
    verdicts = targets.judge(results)
    report.print_results(console, results, rounds)
    report.print_verdicts(console, verdicts)
    json.write_bytes(report.as_json(results, verdicts, rounds))
    plot.write_text(picture.as_svg(results))
    console.print(f"wrote {json} and {plot}")
    if check and any(verdict.held is False for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def doctor(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HOST:PORT]...", help="Where `farcall doctor --listen PORT` runs on other hosts."),
    ] = None,
    listen: Annotated[
        int | None, typer.Option(metavar="PORT", min=0, max=65535, help="Let other hosts' doctors visit; 0: any port.")
    ] = None,
    init_method: Annotated[
        str, typer.Option(metavar="URL", help="Where members meet; by default what the environment says.")
    ] = "env://",
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what works here, and between these hosts; and for what does not, why, and what to do. Exits with 1 then."""
    from farcall.cli.doctor.consultation import consult, receive_visits
    from farcall.cli.doctor.finding import as_json, exit_status, print_findings

    places = []
    for place in hosts or []:
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal():
            raise typer.BadParameter(f"not HOST:PORT: {place}", param_hint="HOST:PORT")
        places.append((host.strip("[]"), int(port)))
    findings = consult(init_method, places)
    if json:
        print(as_json(findings))
    else:
        print_findings(_console(), findings)
    listened = listen is None or receive_visits(_console(), listen)
    raise typer.Exit(exit_status(findings) if listened else 1)
