"""Several nodes in this very process, which a test can look into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.kit.ports import tcp_url
from tests.kit.waiting import PATIENCE_S, wait_until

import farcall
from farcall.options import ObservingOptions, RpcBackendOptions
from farcall.testing.faults import Faults


def together(actions: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


@contextmanager
def team(faults: Faults | list[Faults | None], size: int = 2, **options: Any) -> Iterator[list[farcall.Node]]:
    """Nodes w0, w1, ... in this process; they leave gracefully, or if the block raises at once."""
    url = tcp_url()
    given = faults if isinstance(faults, list) else [faults] * size
    nodes = [
        farcall.Node(
            f"w{rank}",
            rank=rank,
            world_size=size,
            options=farcall.RpcBackendOptions(init_method=url, **options),
        )
        for rank in range(size)
    ]
    with ExitStack() as installed:
        for rank, one in enumerate(given):
            if one is not None:
                installed.enter_context(one.installed(f"w{rank}"))
        together([node.start for node in nodes])
    try:
        yield nodes
    except BaseException:
        for node in nodes:
            node.shutdown(graceful=False)
        raise
    together([node.shutdown for node in nodes])


@contextmanager
def dynamic_team(size: int, path: Path, **options: Any) -> Iterator[list[farcall.Node]]:
    """Members of a group without a fixed size, in this process."""
    chosen = {
        "init_method": f"file://{path}/meet",
        "observing": ObservingOptions(runtime_directory=str(path / "run")),
        **options,
    }
    with ExitStack() as stack:
        nodes = [farcall.Node(f"w{rank}", rank, options=RpcBackendOptions(**chosen)) for rank in range(size)]
        for node in nodes:
            node.start()
            stack.callback(node.shutdown, False)
        for node in nodes:
            wait_until(lambda node=node: len(node.workers()) == size)
        yield nodes
