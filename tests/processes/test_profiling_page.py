"""The page about profiling: its programs write traces that show what the page promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.wheel import Installed
from tests.processes.documentation import run_page
from tests.processes.trace_reader import Trace


@pytest.mark.timeout(900)
def test_the_traces_have_the_work_of_all_workers(installed: Installed, tmp_path: Path) -> None:
    run_page("docs/profiling.md", installed, tmp_path)
    for name in ("trace.json", "of_torch.json"):
        trace = Trace(tmp_path / name)
        call = trace.only("rpc_sync#work(w0 -> w1)", "w0")
        assert call.contains(trace.only("work", "w1"))
        assert trace.named("aten::sin", "w2")
