"""The commands and their options. Each command is a few lines over a module of its own."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from farcall import __version__
from farcall.cli.screen import CommandConsole

if TYPE_CHECKING:
    from farcall.observe.observer import Observer

app: typer.Typer = typer.Typer(
    name="farcall",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# The headings of --help, in the order in which a newcomer needs them.
_START = "Start a program"
_LOOK = "Look at a running cluster"
_MACHINE = "Prepare and check machines"

_NUMBER_ELSEWHERE = frozenset(("-n", "-np", "--np", "--ntasks", "--num-workers", "--nproc", "--nproc-per-node"))
"""The names that torchrun, mpirun and srun give to ``--workers``."""


def _console() -> Console:
    # A file or a pipe has no width: tables need not be squeezed into 80 columns there.
    return CommandConsole() if sys.stdout.isatty() else CommandConsole(width=140)


def _given_up(error: Exception) -> typer.Exit:
    """Print ``error`` as one line; the exit of a command that cannot go on."""
    CommandConsole(stderr=True).print(f"farcall: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        # From the metadata: importing torch takes seconds.
        print(f"farcall {__version__} (torch {version('torch')}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the versions.")
    ] = False,
) -> None:
    """Remote procedure calls for PyTorch."""


@app.command(rich_help_panel=_START)
def demo(
    steps: Annotated[int, typer.Option(min=40, help="Number of training steps; even.")] = 1200,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the files; by default a new one, farcall-demo.")
    ] = None,
) -> None:
    """Train a small model on this machine, with parameter servers; one is killed and comes back: about 10 s."""
    from farcall.cli.demo.show import run

    raise typer.Exit(run(_console(), steps // 2 * 2, output))


@app.command(
    rich_help_panel=_START,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM [ARGS]...", help="A file, or -m and a module, and its own arguments.", show_default=False
        ),
    ],
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of processes, each with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as by torchrun. "
            "Without it, one process runs.",
        ),
    ] = None,
    restart: Annotated[
        int,
        typer.Option(min=0, help="Restarts of each failing worker; the group has no fixed size (no WORLD_SIZE)."),
    ] = 0,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going", help="Let the other workers go on when one has failed; the status is still the failure's."
        ),
    ] = False,
    on: Annotated[
        str, typer.Option(help="Where: local, ssh, slurm, ray or kubernetes; see docs/launching.md.")
    ] = "local",
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of that engine: hosts=a,b; repeatable.")
    ] = None,
) -> None:
    """Run a program in one or more processes. Programs written for torch.distributed.rpc run over farcall."""
    from farcall.compat.program import is_program

    program = [script, *context.args]
    if script.startswith("-") and script != "-m":  # the parser passes options that it does not know, for -m
        known = [name for parameter in context.command.params for name in parameter.opts if name[:2] == "--"]
        near = get_close_matches(script, known, 1) or [name for name in known if name.startswith(f"-{script}")]
        if script.replace("_", "-").partition("=")[0] in _NUMBER_ELSEWHERE:
            near = ["--workers"]
        context.fail(f"No such option: {script}" + "".join(f" (did you mean {name}?)" for name in near[:1]))
    if on == "local" and not is_program(program):
        context.fail(f"{script} is no program: name a file, or -m and a module")
    if workers is None and on != "local":
        raise typer.BadParameter("needs --workers: how many to start there", param_hint="--on")
    if workers is None and keep_going:
        raise typer.BadParameter("needs --workers: a single process has no others", param_hint="--keep-going")
    if workers is None and restart:
        raise typer.BadParameter("needs --workers: a single process is restarted by its user", param_hint="--restart")
    if workers is None:
        from farcall.cli.ranks import told_by_launcher
        from farcall.errors import InitError

        try:
            environment = {**os.environ, **told_by_launcher(os.environ)}
        except InitError as error:
            raise _given_up(error) from None
        os.execve(sys.executable, [sys.executable, "-m", "farcall", *program], environment)
    from farcall.cli.run import run_cluster
    from farcall.launcher.engine import EngineError

    try:
        code = run_cluster(_console(), workers, program, restart, on=on, options=option or (), keeps_going=keep_going)
    except (EngineError, ValueError, TypeError) as error:
        raise _given_up(error) from None
    raise typer.Exit(code)


_Connect = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="A worker of a cluster elsewhere; needs FARCALL_SECRET.")
]
_Cluster = Annotated[str, typer.Option(help="A cluster on this host: the beginning of its id, or of a worker's name.")]


@contextmanager
def _observer(connect: str, cluster: str) -> Iterator[Observer]:
    """A connection to the cluster that the options name."""
    from farcall.errors import RpcError
    from farcall.observe.observer import Observer

    try:
        with Observer.connect_with_secret(connect) if connect else Observer.find(cluster) as observer:
            yield observer
    except (RpcError, ConnectionError, ValueError) as error:
        raise _given_up(error) from None


@app.command(rich_help_panel=_LOOK)
def top(
    connect: _Connect = "",
    cluster: _Cluster = "",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end, for scripts.")] = False,
) -> None:
    """Show workers, calls per second, latencies, bytes, queues and references, live."""
    from farcall.cli.live import show_once, watch

    with _observer(connect, cluster) as observer:
        if once:
            show_once(_console(), observer, every)
            return
        try:
            watch(_console(), observer, every)
        except KeyboardInterrupt:
            pass


@app.command(rich_help_panel=_LOOK)
def dashboard(
    connect: _Connect = "",
    cluster: _Cluster = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0: any free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to serve on; others than loopback need FARCALL_TLS_CA, _CERT and _KEY.")
    ] = "127.0.0.1",
) -> None:
    """Serve a live page for the browser: workers, calls, latencies, callers and callees, waiting calls and errors."""
    from farcall.cli.live import serve_dashboard

    with _observer(connect, cluster) as observer:
        serve_dashboard(_console(), observer, connect, (host, port))


@app.command(rich_help_panel=_LOOK)
def stacks(
    connect: _Connect = "",
    cluster: _Cluster = "",
    full: Annotated[bool, typer.Option("--full", help="Whole stacks, not only the innermost line.")] = False,
    between: Annotated[
        float, typer.Option(min=0.05, help="Seconds between two samples; a thread that has not moved counts as stuck.")
    ] = 0.3,
) -> None:
    """Show which call waits for which, and on which line; exits with 1 if something seems stuck for good."""
    from farcall.cli.stacks import show

    with _observer(connect, cluster) as observer:
        stuck = show(_console(), observer, between, full)
    raise typer.Exit(1 if stuck else 0)


@app.command(rich_help_panel=_LOOK)
def trace(
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Duration of the recording.")] = 5.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file; compressed if it ends with .gz.")] = Path(
        "trace.json"
    ),
    shapes: Annotated[bool, typer.Option("--shapes", help="Record the shapes of arguments.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Record memory that operators take and free.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Record Python stacks of operators.")] = False,
    connect: _Connect = "",
    cluster: _Cluster = "",
) -> None:
    """Record all workers of a running cluster into one trace for Perfetto."""
    from farcall.cli.live import write_trace
    from farcall.observe.capture import Detail

    options = Detail.SHAPES * shapes | Detail.MEMORY * memory | Detail.STACKS * stacks
    with _observer(connect, cluster) as observer:
        write_trace(_console(), observer, seconds, output, options)


@app.command(rich_help_panel=_MACHINE)
def doctor(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOST:PORT", help="Other hosts, where `farcall doctor --listen PORT` runs."),
    ] = None,
    listen: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=65535, help="Port for the doctors of other hosts; 0: any free one."),
    ] = None,
    init_method: Annotated[
        str, typer.Option(metavar="URL", help="Where workers meet (init_method); default: from the environment.")
    ] = "env://",
    on: Annotated[
        str | None,
        typer.Option(
            metavar="SITE", help="Check what farcall.launch(on=SITE) needs: ssh HOST..., slurm, ray or kubernetes."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Check this machine, and connections to others; name the remedy of each fault. Exits with 1 if there are any."""
    from farcall.cli.doctor.consultation import consult, receive_visits
    from farcall.cli.doctor.finding import as_json, exit_status, print_findings
    from farcall.cli.doctor.sites import SITES, look_at_site

    if on is not None and on not in SITES:
        raise typer.BadParameter(f"one of {', '.join(SITES)}, not {on}", param_hint="--on")
    about_site = look_at_site(on, hosts or []) if on is not None else []
    if on == "ssh":
        hosts = []  # they are names for ssh, not addresses of doctors
    places = []
    for place in hosts or []:
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal():
            raise typer.BadParameter(f"{place!r} is not a host, a colon and a port", param_hint="HOST:PORT")
        places.append((host.strip("[]"), int(port)))
    findings = consult(init_method, places) + about_site
    if json:
        print(as_json(findings))
    else:
        print_findings(_console(), findings)
    listened = listen is None or receive_visits(_console(), listen)
    raise typer.Exit(exit_status(findings) if listened else 1)


@app.command(rich_help_panel=_MACHINE)
def certificates(
    directory: Annotated[Path, typer.Argument(help="Folder for the authority and the certificates; made if needed.")],
    hosts: Annotated[list[str], typer.Argument(help="Names or addresses of hosts, or NAME=ADDRESS,ADDRESS.")],
    name: Annotated[
        list[str] | None, typer.Option(help="Name of a worker that the certificates are for (bind_names); repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificates are valid.")] = 365,
) -> None:
    """Make certificates for TLS between the hosts of a cluster; called again, renew them."""
    from farcall.cli.certificates import make_certificates

    for host, certificate, key in make_certificates(directory, hosts, name or (), days):
        typer.echo(
            f"{host}: FARCALL_TLS_CA={directory / 'ca.pem'} FARCALL_TLS_CERT={certificate} FARCALL_TLS_KEY={key}"
        )
    typer.echo(
        f"Copy ca.pem and its own two files to each host. Keep {directory / 'ca.key'} here: it signs new certificates."
    )


@app.command(rich_help_panel=_MACHINE)
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Two short rounds, for a first impression.")] = False,
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Only cases whose name matches this regular expression.")
    ] = "",
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds; 5, or 2 with --quick.")] = None,
    json: Annotated[Path, typer.Option(help="File for the figures.")] = Path("farcall-bench.json"),
    plot: Annotated[Path, typer.Option(help="File for the picture (SVG).")] = Path("farcall-bench.svg"),
    stock: Annotated[bool, typer.Option(help="Measure torch.distributed.rpc too.")] = True,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a promise is broken.")] = False,
) -> None:
    """Measure farcall beside stock torch.distributed.rpc, and beside bare sockets and shared memory (the floor)."""
    from farcall.cli.bench import report
    from farcall.cli.bench.cases import CASES
    from farcall.cli.bench.contenders import CONTENDERS
    from farcall.cli.bench.driver import Driver
    from farcall.cli.bench.results import judge

    try:
        pattern = re.compile(only)
    except re.error as error:
        raise typer.BadParameter(f"not a regular expression: {error}", param_hint="--only") from None
    cases = [case for case in CASES.values() if pattern.search(case.name)]
    if not cases:
        raise typer.BadParameter(f"no case matches; there are: {', '.join(CASES)}", param_hint="--only")
    contenders = [name for name in CONTENDERS if stock or name != "stock"]
    rounds = rounds or (2 if quick else 5)
    console = _console()
    with CommandConsole(stderr=True).status("starting") as status:
        driver = Driver(contenders=contenders, rounds=rounds, budget_s=0.1 if quick else 0.4, on_progress=status.update)
        results = driver.run(cases)
    verdicts = judge(results)
    report.print_results(console, results, rounds)
    report.print_verdicts(console, verdicts)
    json.write_bytes(report.as_json(results, verdicts, rounds))
    plot.write_text(report.as_svg(results))
    console.print(f"wrote {json} and {plot}")
    if check and any(verdict.held is False for verdict in verdicts):
        raise typer.Exit(1)


torchscript: typer.Typer = typer.Typer(no_args_is_help=True)
app.add_typer(torchscript, name="torchscript", rich_help_panel=_MACHINE)


@torchscript.callback()  # makes a group of one command: its name stays `torchscript build`
def _torchscript() -> None:
    """Build the extension for RPC in TorchScript code."""


@torchscript.command()
def build() -> None:
    """Build the extension now, in about a minute, instead of at its first use; once for each torch."""
    from farcall.errors import RpcError
    from farcall.torchscript import extension

    try:
        typer.echo(extension.build())
    except RpcError as error:
        typer.echo(f"farcall torchscript build: {error}", err=True)
        raise typer.Exit(1) from None
