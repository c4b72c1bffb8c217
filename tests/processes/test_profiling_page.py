"""The code on the page about profiling is run as a reader would run it, all blocks of it, on three workers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.processes.trace_reader import Trace

PAGE = Path(__file__).parents[2] / "docs" / "profiling.md"
PROGRAM = """
import os

def everything(rank):
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=3)
    if rank == 0:
        profile_a_call()
        profile_as_ever()
    farcall.shutdown()

if __name__ == "__main__":
    main(int(os.environ["RANK"]))
    everything(int(os.environ["RANK"]))
"""


def test_every_block_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    example = tmp_path / "example.py"
    example.write_text("\n\n".join(blocks) + PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [sys.executable, *launcher, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for promised in re.findall(r"`(\d rpc_sync#.*?)`", PAGE.read_text()):
        assert promised in done.stdout
    for name in ("trace.json", "of_torch.json"):
        trace = Trace(tmp_path / name)
        call = trace.only("rpc_sync#work(w0 -> w1)", "w0")
        assert call.contains(trace.only("work", "w1"))
        assert trace.named("aten::sin", "w2")
