"""What farcall changes in a process, outside of itself, begins with the first node and ends with the last."""

from __future__ import annotations

import gc
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from torch.autograd import profiler

import farcall
import farcall.api
from farcall.serialize import code


def foreign() -> list[Any]:
    """What others see: callbacks of garbage collections, finders of modules, methods of profilers and picklers."""
    methods = [profiler.profile.__dict__[name] for name in ("_start_trace", "__exit__", "export_chrome_trace")]
    return [*gc.callbacks, *sys.meta_path, *methods, ForkingPickler.__dict__.get("reducer_override")]


def test_nothing_stays_after_the_last_node(tmp_path: Path) -> None:
    before = foreign()
    options = farcall.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    for _ in range(2):
        with farcall.Node("alone", rank=0, world_size=1, options=options) as node:
            assert foreign() != before
            if code.is_available():
                assert node.rpc_sync("alone", eval("lambda: foreign()[-1]", globals())) is not None
        assert foreign() == before


def test_a_profiler_that_ends_after_its_node_has_the_calls(tmp_path: Path) -> None:
    options = farcall.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    node = farcall.Node("alone", rank=0, world_size=1, options=options)
    node.start()
    with profiler.profile() as profile:
        node.rpc_sync("alone", divmod, args=(7, 2))
        node.shutdown()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "divmod(alone -> alone)" in (tmp_path / "trace.json").read_text()
