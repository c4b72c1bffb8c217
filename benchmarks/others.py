"""farcall beside stock torch RPC, Ray, Dask and Monarch: the same things between two processes of one machine.

    python benchmarks/others.py --ray RAY_VENV/bin/python --dask DASK_VENV/bin/python --monarch MONARCH_VENV/bin/python

Each system runs in the environment of the interpreter named for it, one at a time: a round starts a system, measures
all cases, ends it, and goes on to the next one. Systems that are not named are left out. farcall and stock run in this
interpreter. The figures of all rounds go to --out, and a table of medians is printed.

    case                  what is timed
    no-op                 one call of a function that does nothing, until its answer is there
    no-op, 64 in flight   such calls per second; of a window that slides and of batches the better, for each system
    echo 1 MiB            one call that sends a tensor and gets it back
    send 64 MiB           one call that sends a tensor; the callee reads the last byte, and answers with it
    killed                from SIGKILL to the callee, amid a call, until the caller has an error

Every system is called through its ordinary blocking interface, with the settings in its `start` below and no others.
What comes back is compared with what was sent, once for each case. This file needs torch and the system measured, and
nothing of farcall's where farcall is not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

IN_FLIGHT = 64
ECHO_BYTES = 1 << 20
SEND_BYTES = 64 << 20
WARM_UP_SHARE = 0.3
LEAST_SAMPLES = 10
ROUND_TIMEOUT_S = 120.0
DEATH_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
CASES = {
    "no-op, us": "a call of a function that does nothing",
    "no-op p99, us": "the slowest of a hundred of them",
    "no-op, 64 in flight, calls/s": "such calls in a second, 64 in flight",
    "echo 1 MiB, us": "echo of a 1 MiB tensor",
    "send 64 MiB, us": "send of a 64 MiB tensor",
    "killed, us": "the callee is killed: its caller knows after",
}
"""Each figure, with its unit, and its name in the table. What is not counted by the second is better if low."""
RATE = "calls/s"
TITLES = {"farcall": "farcall", "stock": "stock torch RPC"}
"""Names of systems that are more than their first letter, made large."""


def noop() -> None:
    pass


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def last_byte(tensor: torch.Tensor) -> int:
    return int(tensor[-1])


def process_id() -> int:
    return os.getpid()


def nap() -> None:
    time.sleep(10 * DEATH_TIMEOUT_S)


class System(ABC):
    """One system of remote calls, at its caller."""

    package: str
    settings: str
    """In words, for whoever reads the results."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def begin(self, name: str, *arguments: Any) -> Any:
        """Start a call of the function of that name; what ``result`` takes."""

    @abstractmethod
    def result(self, call: Any) -> Any: ...

    def results(self, calls: list[Any]) -> None:
        """Wait for all of them."""
        for call in calls:
            self.result(call)

    def call(self, name: str, *arguments: Any) -> Any:
        return self.result(self.begin(name, *arguments))

    @abstractmethod
    def stop(self) -> None: ...


class _TwoMembers(System):
    """farcall or stock: a second process of this same file is the callee."""

    name: str
    rpc: Any

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        url = f"tcp://127.0.0.1:{port}"
        self._callee = subprocess.Popen([sys.executable, __file__, "--callee", self.name, "--url", url])
        self.join(0, url)

    @abstractmethod
    def join(self, rank: int, url: str) -> None: ...

    def begin(self, name: str, *arguments: Any) -> Any:
        return self.rpc.rpc_async("callee", FUNCTIONS[name], args=arguments)

    def result(self, call: Any) -> Any:
        return call.wait()

    def call(self, name: str, *arguments: Any) -> Any:
        return self.rpc.rpc_sync("callee", FUNCTIONS[name], args=arguments)

    def stop(self) -> None:
        self.rpc.shutdown()
        self._callee.wait(ROUND_TIMEOUT_S)


class Farcall(_TwoMembers):
    name = "farcall"
    package = "farcall"
    settings = "as it comes: unix sockets and shared memory"

    def join(self, rank: int, url: str) -> None:
        import farcall

        self.rpc = farcall
        options = farcall.RpcBackendOptions(init_method=url)
        farcall.init_rpc(("caller", "callee")[rank], rank=rank, world_size=2, rpc_backend_options=options)


class Stock(_TwoMembers):
    name = "stock"
    package = "torch"
    settings = "as it comes: the TensorPipe agent picks transports and channels"

    def join(self, rank: int, url: str) -> None:
        warnings.simplefilter("ignore")  # of its deprecation
        import torch.distributed.rpc as rpc

        self.rpc = rpc
        options = rpc.TensorPipeRpcBackendOptions(init_method=url)
        rpc.init_rpc(("caller", "callee")[rank], rank=rank, world_size=2, rpc_backend_options=options)


class Ray(System):
    package = "ray"
    settings = (
        "an actor; ray.init(num_cpus=2, include_dashboard=False), RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1, so that "
        "tensors are mapped from the object store and not copied out of it"
    )

    def start(self) -> None:
        os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        warnings.simplefilter("ignore")  # that mapped tensors are read-only
        import ray

        self._ray = ray
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self._actor = ray.remote(num_cpus=1)(Callee).remote()

    def begin(self, name: str, *arguments: Any) -> Any:
        return getattr(self._actor, name).remote(*arguments)

    def result(self, call: Any) -> Any:
        return self._ray.get(call)

    def results(self, calls: list[Any]) -> None:
        self._ray.get(calls)

    def stop(self) -> None:
        self._ray.shutdown()


class Dask(System):
    package = "distributed"
    settings = "an actor; LocalCluster(n_workers=1, threads_per_worker=1), Client(direct_to_workers=True)"

    def start(self) -> None:
        from distributed import Client, LocalCluster

        self._cluster = LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None)
        self._client = Client(self._cluster, direct_to_workers=True)
        self._actor = self._client.submit(Callee, actor=True).result()

    def begin(self, name: str, *arguments: Any) -> Any:
        return getattr(self._actor, name)(*arguments)

    def result(self, call: Any) -> Any:
        return call.result()

    def stop(self) -> None:
        self._client.close()
        self._cluster.close()


class Monarch(System):
    package = "torchmonarch"
    settings = (
        "an actor in a process of its own on this_host(), call_one; tensors travel inside messages; an "
        "unhandled_fault_hook that does nothing, for else the death of the callee ends the caller, too"
    )

    def start(self) -> None:
        import monarch.actor
        from monarch.actor import Actor, endpoint, this_host

        monarch.actor.unhandled_fault_hook = lambda failure: None
        # Endpoints are made by a decorator that only this environment has.
        members = {name: endpoint(lambda self, *arguments, _f=f: _f(*arguments)) for name, f in FUNCTIONS.items()}
        actor_class = type("MonarchCallee", (Actor,), members)
        self._host = this_host()
        self._actor = self._host.spawn_procs({"callees": 1}).spawn("callee", actor_class)

    def begin(self, name: str, *arguments: Any) -> Any:
        return getattr(self._actor, name).call_one(*arguments)

    def result(self, call: Any) -> Any:
        return call.get()

    def stop(self) -> None:
        from monarch.actor import shutdown_context

        shutdown_context().get()


class Callee:
    """The actor, for systems that have actors."""

    def noop(self) -> None:
        noop()

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        return echo(tensor)

    def last_byte(self, tensor: torch.Tensor) -> int:
        return last_byte(tensor)

    def process_id(self) -> int:
        return process_id()

    def nap(self) -> None:
        nap()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (noop, echo, last_byte, process_id, nap)
}
SYSTEMS: dict[str, type[System]] = {
    "farcall": Farcall,
    "stock": Stock,
    "ray": Ray,
    "dask": Dask,
    "monarch": Monarch,
}


# ---------------------------------------------------------------------- in the process of one system


def durations_s(operation: Callable[[], Any], budget_s: float) -> list[float]:
    """Sorted, after a warm-up."""
    warm_at = time.perf_counter() + budget_s * WARM_UP_SHARE
    operation()
    while time.perf_counter() < warm_at:
        operation()
    took: list[float] = []
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(took) < LEAST_SAMPLES:
        begun = time.perf_counter()
        operation()
        took.append(time.perf_counter() - begun)
    return sorted(took)


def sliding_rate(system: System, budget_s: float) -> float:
    """Calls per second where each answer is followed by a new call."""
    calls = deque(system.begin("noop") for _ in range(IN_FLIGHT))
    count = 0
    begun = time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < budget_s:
        system.result(calls.popleft())
        calls.append(system.begin("noop"))
        count += 1
    for call in calls:
        system.result(call)
    return count / elapsed


def batch_rate(system: System, budget_s: float) -> float:
    """The same where all answers are waited for before the next calls."""
    count = 0
    begun = time.perf_counter()
    while (elapsed := time.perf_counter() - begun) < budget_s:
        system.results([system.begin("noop") for _ in range(IN_FLIGHT)])
        count += IN_FLIGHT
    return count / elapsed


def measure(system: System, budget_s: float) -> dict[str, float]:
    no_op = durations_s(lambda: system.call("noop"), budget_s)
    batch_rate(system, budget_s * WARM_UP_SHARE)
    rate = max(sliding_rate(system, budget_s / 2), batch_rate(system, budget_s / 2))
    small = torch.arange(ECHO_BYTES, dtype=torch.int64).to(torch.uint8)
    if not torch.equal(system.call("echo", small), small):
        raise AssertionError("another tensor came back")
    echoed = durations_s(lambda: system.call("echo", small), budget_s)
    large = torch.full((SEND_BYTES,), 7, dtype=torch.uint8)
    if system.call("last_byte", large) != 7:
        raise AssertionError("another tensor arrived")
    sent = durations_s(lambda: system.call("last_byte", large), budget_s)
    values: tuple[float, ...] = (
        statistics.median(no_op) * 1e6,
        no_op[int(len(no_op) * 0.99)] * 1e6,
        rate,
        statistics.median(echoed) * 1e6,
        statistics.median(sent) * 1e6,
    )
    return dict(zip(list(CASES)[:-1], values, strict=True))


def kill_callee(system: System) -> float | None:
    """How long, in microseconds, until a call fails whose callee is killed; None: too long. Ends the system."""
    callee = system.call("process_id")
    ended: list[tuple[float, str]] = []

    def wait() -> None:
        try:
            system.result(call)
        except BaseException as error:
            ended.append((time.perf_counter(), f"{type(error).__name__}: {str(error)[:200]}"))

    call = system.begin("nap")
    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    time.sleep(0.5)  # the call is to be under way, and nobody can say when it is
    os.kill(callee, signal.SIGKILL)
    killed = time.perf_counter()
    waits.join(DEATH_TIMEOUT_S)
    if not ended:
        return None
    print("the error:", ended[0][1])
    return (ended[0][0] - killed) * 1e6


def measure_here(name: str, budget_s: float, out: Path) -> None:
    system = SYSTEMS[name]()
    begun = time.perf_counter()
    system.start()
    system.call("noop")
    start_s = time.perf_counter() - begun
    figures: dict[str, float | None] = {**measure(system, budget_s)}
    figures["killed, us"] = kill_callee(system)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        system.package: version(system.package),
    }
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps({"figures": figures, "start_s": start_s, "versions": versions}))
    partial.rename(out)  # all of it or nothing, whatever the system does to this process after the death
    # Some end in order after that, and some never do: whatever they started ends with this process.
    stops = threading.Thread(target=system.stop, daemon=True)
    stops.start()
    stops.join(STOP_TIMEOUT_S)
    sys.stdout.flush()
    os._exit(0)


def be_called(name: str, url: str) -> None:
    system = SYSTEMS[name]()
    assert isinstance(system, _TwoMembers)
    system.join(1, url)
    system.rpc.shutdown()


# ---------------------------------------------------------------------- in the process that has them take turns


def take_turn(name: str, python: str, budget_s: float) -> dict[str, Any]:
    """One system in one round; ``failure`` instead of figures where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [python, __file__, "--system", name, "--budget", str(budget_s), "--out", str(out)]
        with log.open("wb") as file:
            try:
                code = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=ROUND_TIMEOUT_S, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        if out.exists():
            document: dict[str, Any] = json.loads(out.read_text())
            return document
        last_lines = log.read_text(errors="replace").strip().splitlines()[-3:]
        return {"failure": f"ended with {code}: {' / '.join(last_lines)}"}


def take_turns(pythons: dict[str, str], rounds: int, budget_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {name: {"settings": SYSTEMS[name].settings, "rounds": []} for name in pythons}
    for number in range(1, rounds + 1):
        for name, python in pythons.items():
            print(f"round {number} of {rounds}: {name}", file=sys.stderr, flush=True)
            turn = take_turn(name, python, budget_s)
            if "failure" in turn:
                found[name].setdefault("failures", []).append(turn["failure"])
                print(f"  {turn['failure']}", file=sys.stderr, flush=True)
                continue
            found[name]["versions"] = turn["versions"]
            found[name]["rounds"].append({"start_s": turn["start_s"], **turn["figures"]})
    for system in found.values():
        if system["rounds"]:
            system["median"] = {
                key: statistics.median(math.inf if each[key] is None else each[key] for each in system["rounds"])
                for key in system["rounds"][0]
            }
    return found


def as_table(found: dict[str, Any]) -> str:
    """For people, and for the README: the best of each row is bold."""
    titles = [TITLES.get(name, name.capitalize()) for name in found]
    lines = ["| | " + " | ".join(titles) + " |", "|---|" + "---|" * len(found)]
    for key, title in CASES.items():
        values = [system.get("median", {}).get(key) for system in found.values()]
        best = (max if key.endswith(RATE) else min)((value for value in values if value is not None), default=None)
        cells = [f"**{_cell(key, value)}**" if value == best else _cell(key, value) for value in values]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "failed"
    if value == math.inf:
        return f"not in {DEATH_TIMEOUT_S:g} s"
    if key.endswith(RATE):
        return f"{value:,.0f}"
    factor, unit = next((factor, unit) for factor, unit in ((1e6, "s"), (1e3, "ms"), (1, "us")) if value >= factor)
    return f"{value / factor:.{0 if value >= 10 * factor else 1}f} {unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("ray", "dask", "monarch"):
        parser.add_argument(
            f"--{name}", metavar="PYTHON", help=f"the interpreter of an environment with {name} and torch"
        )
    parser.add_argument("--stock", metavar="PYTHON", default=sys.executable, help="by default this one")
    parser.add_argument("--farcall", metavar="PYTHON", default=sys.executable, help="by default this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=1.2, help="seconds for each case in a round")
    parser.add_argument("--out", type=Path, default=Path("others.json"))
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--callee", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.callee:
        be_called(arguments.callee, arguments.url)
    elif arguments.system:
        measure_here(arguments.system, arguments.budget, arguments.out)
    else:
        from farcall.cli.bench.stamp import stamp

        pythons = {name: getattr(arguments, name) for name in SYSTEMS if getattr(arguments, name)}
        found = take_turns(pythons, arguments.rounds, arguments.budget)
        document = {**stamp(), "rounds": arguments.rounds, "budget_s": arguments.budget, "systems": found}
        text = json.dumps(document, indent=1).replace("Infinity", "null")  # which JSON has not
        arguments.out.write_text(text + "\n")
        print(as_table(found))


if __name__ == "__main__":
    main()
