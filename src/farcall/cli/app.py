"""The commands and their options. Each command is a few lines over the module that does the work."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="farcall",
    help="Remote procedure calls for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _console() -> Console:
    # Where nobody says how wide it is (a file, a pipe), tables need not be squeezed into 80 columns.
    return Console() if sys.stdout.isatty() else Console(width=120)


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


torchscript = typer.Typer(help="The extension for RPC in TorchScript code.", no_args_is_help=True)
app.add_typer(torchscript, name="torchscript")


@torchscript.callback()
def _torchscript() -> None:
    """The extension for RPC in TorchScript code."""


@torchscript.command()
def build() -> None:
    """Build it now, about a minute, instead of when it is first needed; once for each torch."""
    from farcall.errors import RpcError
    from farcall.torchscript import extension

    try:
        typer.echo(extension.build())
    except RpcError as error:
        typer.echo(f"farcall torchscript build: {error}", err=True)
        raise typer.Exit(1) from None


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
