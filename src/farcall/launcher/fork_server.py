"""A process that has torch and farcall loaded, and forks workers: each starts in a fraction of a second.

Owns the server's process and the socket to it (`ForkServer`, in the driver), and what runs there (`main`). One question
at a time, each answered at once:

    question                                          answer
    "start", with a worker's stdin and stdout         its process id
    "reap", a process id, once that has ended         its exit code

A worker that has ended stays a zombie until it is reaped: its number is given to no other process, so the driver may
signal it. The server ends with the driver, by its lifeline; workers have their own, and outlive the server.

``multiprocessing`` has a fork server, too: one for the whole program, which runs its ``__main__`` again.
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from farcall.launcher.engine import EngineError
from farcall.launcher.worker import INTERRUPTED, hold_lifeline
from farcall.transport.descriptors import close_in_children

START_S = 120.0
"""Importing torch may take long on a machine that has never done it."""
_ANSWER_S = 30.0
# The driver's own path, and nothing of the directory that it happens to be in: others may have put a torch.py there.
_BEGIN = "import sys; sys.path[:] = sys.argv[2:]; from farcall.launcher.fork_server import main; main(int(sys.argv[1]))"
_MESSAGE_BYTES = 64
_DESCRIPTOR_BYTES = array.array("i").itemsize


class ForkServer:
    """The driver's end. The constructor starts the process, which loads torch while the driver does so, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BEGIN, str(theirs.fileno()), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.environment: dict[str, str] = dict(os.environ)
        """The variables that its workers begin with."""
        self._has_answered = False
        close_in_children(self)

    def start(self, stdin: int, stdout: int) -> int:
        """Fork a worker with these descriptors; its process id."""
        return self._ask(b"start", (stdin, stdout))

    def reap(self, process: int) -> int:
        """The exit code of a worker that has ended, as `subprocess` tells it."""
        return self._ask(b"reap %d" % process)

    def _ask(self, question: bytes, descriptors: tuple[int, ...] = ()) -> int:
        with self._lock:
            try:
                self._socket.settimeout(_ANSWER_S if self._has_answered else START_S)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
                self._socket.sendmsg([question], rights)
                answer = self._socket.recv(_MESSAGE_BYTES)
            except OSError as error:
                self._socket.close()  # a late answer must not be taken for that of the next question
                raise EngineError(f"the process that forks workers does not answer: {error}") from error
            if not answer:
                raise EngineError(f"the process that forks workers has ended (exit code {self._process.poll()})")
            self._has_answered = True
            return int(answer)

    def close(self) -> None:
        """End the server; all of its workers have been reaped, or end by themselves. From any thread."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with self._lock:  # a thread that waits for an answer has just heard that there is none
            self._socket.close()

    def close_after_fork(self) -> None:
        """In a forked child: the lifeline is the driver's alone."""
        self._socket.close()
        if self._process.stdin is not None:
            self._process.stdin.close()  # nothing is buffered, so nothing is written


def main(descriptor: int) -> None:
    """The server: load, then answer until the driver closes the socket."""
    hold_lifeline(0)
    _load()
    questions = socket.socket(fileno=descriptor)
    while True:
        question, rights, _, _ = questions.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(2 * _DESCRIPTOR_BYTES))
        descriptors = array.array("i")
        for _, _, data in rights:
            descriptors.frombytes(data[: len(data) - len(data) % _DESCRIPTOR_BYTES])
        if not question:
            return
        if question == b"start":
            process = os.fork()
            if process == 0:
                _become_worker(questions, *descriptors)
            for one in descriptors:
                os.close(one)
            questions.send(b"%d" % process)
        else:
            _, status = os.waitpid(int(question.split()[1]), 0)
            questions.send(b"%d" % os.waitstatus_to_exitcode(status))


def _load() -> None:
    """Import the modules of a worker's first call: all workers share that memory until they write to it."""
    for name in ("farcall.api", "farcall.launcher.parcel", "farcall.launcher.worker", "encodings.idna"):
        importlib.import_module(name)
    with suppress(ModuleNotFoundError):  # an extra
        importlib.import_module("cloudpickle")
    gc.collect()
    gc.freeze()


def _become_worker(questions: socket.socket, stdin: int, stdout: int) -> NoReturn:
    """In the child: let go of everything of the server's but its modules."""
    code = 1
    try:
        os.setsid()
        questions.close()
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stdout, 2)
        os.close(stdin)
        os.close(stdout)
        sys.argv = ["farcall.launcher.worker"]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        numpy = sys.modules.get("numpy")  # need not be installed
        if numpy is not None:
            numpy.random.seed()  # Python's generator does this by itself; torch's always begins with the same seed
        from farcall.launcher.worker import main as work

        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
