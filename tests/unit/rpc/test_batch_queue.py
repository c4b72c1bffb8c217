"""The answers of a batch leave together."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from farcall.rpc.batch_queue import Item, Queue, Result, Rules
from farcall.runtime.calls.results import COMPLETING


def test_the_thread_that_hands_results_out_says_so_and_flushes_behind_the_last() -> None:
    order: list[Any] = []

    def answer(future: Any) -> None:
        order.append((future.value(), getattr(future, COMPLETING) == threading.get_ident()))

    server = SimpleNamespace(flush=lambda: order.append("flush"))
    node: Any = SimpleNamespace(server=server, device_list=())
    batches: Any = None
    queue = Queue(node, batches, Rules(list, 4, 0.0, again_alone=False))
    items = [Item(None, number, Result(), 0.0, None, None) for number in range(3)]
    for item in items:
        item.future.add_done_callback(answer)
    queue._hand_out(items, ["a", "b", "c"])
    assert order == [("a", True), ("b", True), ("c", True), "flush"]

    # One whose caller asks only now, on a thread that flushes nothing, must not be taken for one of them.
    late = threading.Thread(target=lambda: items[0].future.add_done_callback(answer))
    late.start()
    late.join(60)
    assert order[-1] == ("a", False)
