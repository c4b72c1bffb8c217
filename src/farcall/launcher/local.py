"""Workers on this machine, forked from a server that has torch loaded (`fork_server.py`)."""

from __future__ import annotations

import dataclasses
import os

from farcall.launcher.commands import CommandEngine, Spawned
from farcall.launcher.engine import EngineError, WorkerSpec
from farcall.launcher.fork_server import ForkServer
from farcall.launcher.mps import MpsDaemon


class LocalEngine(CommandEngine):
    """Processes of this machine. The server loads while the driver becomes a member."""

    driver_host: str | None = "127.0.0.1"

    def __init__(self, mps: bool = False) -> None:
        """``mps``: they use a GPU at the same time, by a daemon of NVIDIA's that ends with them."""
        super().__init__()
        self._mps = MpsDaemon() if mps else None
        self._server = ForkServer()

    def running_detail(self, spec: WorkerSpec) -> str:
        return "on this machine"

    def spawn(self, spec: WorkerSpec) -> Spawned:
        stdin, lifeline = os.pipe()
        output, stdout = os.pipe()
        try:
            server, process = self._fork(stdin, stdout)
        except BaseException:
            os.close(lifeline)
            os.close(output)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)

        def wait() -> int:
            try:
                return server.reap(process)
            except EngineError:
                return 1  # the server was killed, and it alone knew how the worker ended

        return Spawned(process, os.fdopen(lifeline, "wb", 0), os.fdopen(output, "rb", 0), wait)

    def _fork(self, stdin: int, stdout: int) -> tuple[ForkServer, int]:
        try:
            return self._server, self._server.start(stdin, stdout)
        except EngineError:
            if self._closed.is_set():
                raise
            self._server.close()  # somebody killed it
            self._server = ForkServer()
            if self._closed.is_set():  # meanwhile: `close` may have closed only the server before this one
                self._server.close()
                raise
            return self._server, self._server.start(stdin, stdout)

    def line(self, spec: WorkerSpec) -> bytes:
        # Workers inherit the environment of the server's start: variables set since then travel with the spec.
        news = {name: text for name, text in os.environ.items() if self._server.environment.get(name) != text}
        news["LOCAL_RANK"] = str(spec.rank)
        if self._mps is not None:
            news |= self._mps.environment
        return super().line(dataclasses.replace(spec, environment={**news, **spec.environment}))

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._server.close()
            if self._mps is not None:
                self._mps.close()
