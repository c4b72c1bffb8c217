"""What farcall changes in a process, outside of itself, begins with the first node and ends with the last."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

import farcall
import farcall.api
from farcall.serialize import code


def foreign() -> list[Any]:
    """What others see: Python's hooks, finders, handlers of signals and threads; methods of profilers and picklers."""
    hooks = [sys.excepthook, sys.unraisablehook, threading.excepthook, sys.getswitchinterval(), gc.get_threshold()]
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    seen = [*gc.callbacks, *sys.meta_path, *hooks, *handlers, *threading.enumerate(), torch.set_num_threads]
    methods = [profiler.profile.__dict__[name] for name in ("_start_trace", "__exit__", "export_chrome_trace")]
    return [*seen, *methods, ForkingPickler.__dict__.get("reducer_override")]


def descriptors() -> list[str]:
    """What each open descriptor of this process leads to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


def test_nothing_stays_after_the_last_node(tmp_path: Path) -> None:
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its event loop keeps a pipe for the process
    before, opened = foreign(), descriptors()
    options = farcall.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    for _ in range(2):
        with farcall.Node("alone", rank=0, world_size=1, options=options) as node:
            assert foreign() != before
            if code.is_available():
                assert node.rpc_sync("alone", eval("lambda: foreign()[-1]", globals())) is not None
        assert foreign() == before
        assert descriptors() == opened


def test_a_profiler_that_ends_after_its_node_has_the_calls(tmp_path: Path) -> None:
    options = farcall.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    node = farcall.Node("alone", rank=0, world_size=1, options=options)
    node.start()
    with profiler.profile() as profile:
        node.rpc_sync("alone", divmod, args=(7, 2))
        node.shutdown()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "divmod(alone -> alone)" in (tmp_path / "trace.json").read_text()
