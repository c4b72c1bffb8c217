"""`farcall.launch`: workers from one program. Checks the arguments, finds the engine and makes the cluster.

Loads torch, which takes long, after the engine: that of this machine has a process that loads it at the same time.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from farcall.errors import LaunchFailed, RpcError
from farcall.imports import UNGUARDED, child_imports_program
from farcall.launcher.engine import Engine
from farcall.launcher.lives import Restarts
from farcall.launcher.worker import DRIVER
from farcall.option_checks import some_seconds
from farcall.options import RpcBackendOptions

if TYPE_CHECKING:
    from farcall.launcher.cluster import Cluster
    from farcall.rpc.handles import Worker

ENGINES: dict[str, str] = {
    "local": "farcall.launcher.local:LocalEngine",
    "ssh": "farcall.launcher.engines.ssh:SshEngine",
    "slurm": "farcall.launcher.engines.slurm:SlurmEngine",
    "ray": "farcall.launcher.engines.ray:RayEngine",
    "kubernetes": "farcall.launcher.engines.kubernetes:KubernetesEngine",
}


def launch(
    workers: int,
    *,
    on: str | Engine = "local",
    quorum: int | None = None,
    restart: Literal["never", "on-failure"] = "never",
    max_restarts: int = 3,
    backoff_s: float = 0.5,
    on_start: Callable[[Worker], object] | None = None,
    start_timeout: float = 120.0,
    quiet: bool = False,
    logs: str | os.PathLike[str] | None = None,
    ship: bool = False,
    directory: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    port: int = 0,
    options: RpcBackendOptions | None = None,
    **engine_options: Any,
) -> Cluster:
    """Start ``workers`` processes and return when they answer; this program is a member, too.

    They are called worker0, worker1, ...; leaving ``with``, or the end of this program, whatever its cause, ends them.

    Args:
        workers: the number of workers.
        on: ``"local"``, ``"ssh"``, ``"slurm"``, ``"ray"``, ``"kubernetes"``, or an engine of your own.
        quorum: return when this many answer; the others may come later. Default: all.
        restart: ``"on-failure"``: a worker that dies or ends with an exit code other than 0 is started again, with its
            name and rank.
        max_restarts: the most restarts of one worker.
        backoff_s: the pause before the first restart of a worker; each further one is twice as long.
        on_start: called with each new worker, also after a restart, before it counts as running: the place to restore
            its state.
        start_timeout: seconds that a worker may take from its start to its first answer.
        quiet: write the output of workers to files in ``logs``, one for each, and show nothing.
        logs: the folder for those files; by default a new one in the directory for temporary files.
        ship: send the working directory along, without the files that ``.gitignore`` names and known secrets (``.env``,
            ``*.pem``, ``*.key``, ``id_rsa``). Otherwise workers use the directory of the same path on their host.
        directory: the working directory of workers; by default that of this program.
        environment: variables for the workers, beside those that the engine passes on.
        port: where this program listens for its workers, the one port that firewalls must let in; 0: the system
            chooses.
        options: `RpcBackendOptions` of this program and its workers; ``rpc_timeout`` is the default for calls.
        **engine_options: options of the engine, see docs/launching.md.
    """
    check_number(workers, quorum)
    if restart not in ("never", "on-failure"):
        raise ValueError(f'restart must be "never" or "on-failure", not {restart!r}')
    start_timeout_s = some_seconds("start_timeout", start_timeout)
    if sys.platform != "linux":
        raise LaunchFailed(
            f"farcall.launch needs Linux, and this is {sys.platform}: start each process yourself, with init_rpc in it"
        )
    if child_imports_program():
        raise LaunchFailed(UNGUARDED)
    _check_free()
    engine = find_engine(on, engine_options)
    try:
        from farcall.launcher.cluster import Cluster

        cluster = Cluster(
            engine,
            restarts=Restarts(max_restarts if restart == "on-failure" else 0, backoff_s),
            on_start=on_start,
            start_timeout_s=start_timeout_s,
            logs=_log_folder(logs) if quiet or logs is not None else None,
            shows=not quiet,
            ship=ship,
            directory=os.path.abspath(directory or os.getcwd()),
            environment=dict(environment or {}),
            port=port,
            options=options or RpcBackendOptions(),
        )
    except BaseException:
        engine.close()
        raise
    try:
        cluster.grow(workers, quorum=quorum)
    except BaseException:
        cluster.shutdown(graceful=False)
        raise
    return cluster


def check_number(workers: object, quorum: int | None) -> None:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"launch starts at least one worker, not {workers!r}")
    if quorum is not None and not 1 <= quorum <= workers:
        raise ValueError(f"quorum must be from 1 to {workers}, the number of workers, not {quorum!r}")


def _check_free() -> None:
    """Raise if this process is a member already, before anything is started."""
    loaded: Any = sys.modules.get("farcall.runtime.node.current")  # not loaded: no member
    if loaded is None or loaded.slot.runtime is None:
        return
    name = loaded.slot.runtime.info.name
    remedy = "call shutdown() of its cluster, or leave its `with`" if name == DRIVER else "call farcall.shutdown()"
    raise RpcError(f"RPC is already initialized in this process, as {name!r}: {remedy} before you launch another")


def find_engine(on: str | Engine, options: dict[str, Any]) -> Engine:
    """The engine of that name, with these options."""
    if not isinstance(on, str):
        if options:
            raise TypeError(f"launch has no argument {', '.join(options)}: pass it to the engine")
        return on
    kind = engine_class(on)
    unknown = [name for name in options if name not in inspect.signature(kind).parameters]
    if unknown:
        raise TypeError(f"neither launch nor its engine {on!r} has an argument {', '.join(unknown)}")
    made: Engine = kind(**options)
    return made


def engine_class(on: str) -> Any:
    """The class of the engine of that name."""
    if on not in ENGINES:
        raise ValueError(f"on must be one of {', '.join(map(repr, ENGINES))}, or an engine, not {on!r}")
    module, name = ENGINES[on].split(":")
    return getattr(importlib.import_module(module), name)


def _log_folder(chosen: str | os.PathLike[str] | None) -> str:
    if chosen is None:
        return tempfile.mkdtemp(prefix="farcall-logs-")
    os.makedirs(chosen, exist_ok=True)
    return os.path.abspath(chosen)
