"""An allocation of Slurm's that this process asked for: pending, granted, gone.

``salloc`` asks and holds it; when ``salloc`` ends, Slurm takes the nodes back and kills what still runs there. It ends
when its standard input is closed, that is by `Allocation.close` or when this process dies: once the nodes are granted
it runs ``cat``, which ends then; before that a small shell around it waits for the same, and signals it. (Signalled
while its command ends, ``salloc`` 22.05 waits in a loop for a child that it reaped: so a file says which it is.)

One thread reads what ``salloc`` says, and tells. While the job is pending it asks ``squeue`` for the reason.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence

from farcall.launcher.engine import EngineError

REASON_EVERY_S = 3.0
ANSWER_S = 30.0
"""How long Slurm's controller may take to answer a question."""
CLOSE_S = 20.0
"""How long ``salloc`` may take to give the nodes back."""
_AROUND = """
exec 3<&0
salloc "$@" 2>&1 <&3 & held=$!
exec > /dev/null 2>&1
cat
[ -e "$GRANTED/now" ] || kill $held
wait $held
rm -r "$GRANTED"
"""
_INSIDE = ': > "$GRANTED/now"; exec cat'
_JOB = re.compile(r"salloc: (?:Pending|Granted) job allocation (\d+)")


def nodes_of(job: str) -> list[str]:
    """The names of an allocation's nodes."""
    compact = _ask(["squeue", "--noheader", f"--jobs={job}", "--format=%N"])
    nodes = _ask(["scontrol", "show", "hostnames", compact]).split() if compact else []
    if not nodes:
        raise EngineError(f"Slurm's job {job} has no nodes: check with `squeue --jobs={job}` whether it has ended")
    return nodes


def _ask(command: Sequence[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"Slurm does not answer {command[0]}: {error}") from error
    if answer.returncode:
        raise EngineError(f"{command[0]}: {answer.stderr.strip()}")
    return answer.stdout.strip()


class Allocation:
    """Asked for once the constructor returns.

    Args:
        options: those of ``salloc``.
        on_pending: called with the reason, whenever it changes.
        on_granted: called once, with the job's number and the names of its nodes.
        on_gone: called once, with what ``salloc`` said last. All three from the allocation's own thread.
    """

    def __init__(
        self,
        options: Sequence[str],
        on_pending: Callable[[str], None],
        on_granted: Callable[[str, Sequence[str]], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._on_pending = on_pending
        self._on_granted = on_granted
        self._on_gone = on_gone
        # A session of its own: Ctrl-C in the terminal is the driver's.
        self._process = subprocess.Popen(
            ["sh", "-c", _AROUND, "salloc", "--job-name=farcall", *options, "sh", "-c", _INSIDE],
            env={**os.environ, "GRANTED": tempfile.mkdtemp(prefix="farcall-slurm-")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self._job = ""
        self._last = ""
        self._reason = ""
        self._granted = False
        self._thread = threading.Thread(target=self._watch, name="farcall-slurm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the nodes back, or no longer ask for them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
            self._thread.join(CLOSE_S)
        except subprocess.TimeoutExpired:
            left = f"scancel {self._job}" if self._job else "squeue --me"
            raise EngineError(f"salloc did not end within {CLOSE_S:.0f} s; end it yourself: {left}") from None

    def _watch(self) -> None:
        assert self._process.stdout is not None
        output = self._process.stdout
        unfinished = b""
        with selectors.DefaultSelector() as selector, output:
            selector.register(output, selectors.EVENT_READ)
            while True:
                if not selector.select(None if self._granted else REASON_EVERY_S):
                    self._look()
                    continue
                data = output.read(4096)
                if not data:
                    break
                *lines, unfinished = (unfinished + data).split(b"\n")
                for line in lines:
                    self._hear(line.decode(errors="replace"))
        self._on_gone(self._last or "salloc ended")

    def _hear(self, line: str) -> None:
        self._last = line
        found = _JOB.search(line)
        if found is not None:
            self._job = found[1]
        if found is not None and "Granted" in line:
            self._granted = True
            try:
                self._on_granted(self._job, nodes_of(self._job))
            except EngineError as error:
                self._on_gone(str(error))
        elif not self._granted:
            self._tell(line.removeprefix("salloc: "))

    def _look(self) -> None:
        """Why does it wait?"""
        if self._job:
            try:
                reason = _ask(["squeue", "--noheader", f"--jobs={self._job}", "--format=%r, expected start %S"])
            except EngineError as error:
                reason = str(error)
            self._tell(f"Slurm's job {self._job} is pending: {reason.removesuffix(', expected start N/A')}")

    def _tell(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self._on_pending(reason)
