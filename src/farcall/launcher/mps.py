"""A daemon of NVIDIA's MPS (`channel/mps.py`) for the workers of one cluster, in folders of its own.

It ends, with the server that it starts, as workers do: the kernel kills it when the other end of its lifeline closes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from time import monotonic, sleep

from farcall.channel.mps import CONTROL, ENV_PIPES, is_served
from farcall.errors import LaunchFailed
from farcall.launcher.own_folder import OwnFolder
from farcall.launcher.worker import hold_lifeline
from farcall.transport.descriptors import close_in_children

START_S = 30.0
_LOOK_S = 0.01
_BEGIN = "import sys; sys.path[:] = sys.argv[2:]; from farcall.launcher.mps import become; become(sys.argv[1])"


class MpsDaemon:
    """The driver's end; the constructor returns when the daemon listens."""

    def __init__(self) -> None:
        command = shutil.which(CONTROL)
        if command is None:
            raise LaunchFailed(f"launch(mps=True) needs {CONTROL}, a part of NVIDIA's driver, and it is not on PATH")
        self._folder = OwnFolder("farcall-mps-")
        pipes, logs = (os.path.join(self._folder.name, name) for name in ("pipe", "log"))
        self.environment: dict[str, str] = {ENV_PIPES: pipes, "CUDA_MPS_LOG_DIRECTORY": logs}
        """What leads a worker there."""
        for folder in (pipes, logs):
            os.mkdir(folder)
        environment = {**os.environ, **self.environment}
        # Else MPS would number the devices anew, and workers choose among its numbers.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        log = os.path.join(logs, "control.log")
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BEGIN, command, *sys.path],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        close_in_children(self)
        give_up_at = monotonic() + START_S
        while not is_served(pipes):
            if self._process.poll() is not None or monotonic() > give_up_at:
                with open(log, errors="replace") as said:
                    told = said.read().strip().rpartition("\n")[2] or "it says nothing"
                self.close()
                raise LaunchFailed(f"{command} does not listen: {told}")
            sleep(_LOOK_S)

    def close(self) -> None:
        """End it, after its workers; again is no error."""
        self.close_after_fork()
        self._process.wait()
        self._folder.cleanup()

    def close_after_fork(self) -> None:
        """In a forked child: the lifeline is the driver's alone."""
        if self._process.stdin is not None:
            self._process.stdin.close()  # nothing is buffered, so nothing is written


def become(command: str) -> None:
    """In the new process: be the daemon, which keeps the lifeline as its standard input."""
    hold_lifeline(0)
    os.execv(command, [command, "-f"])
