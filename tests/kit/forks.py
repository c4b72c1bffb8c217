"""Work in a forked child of this process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from tests.kit.times import LONG_S


def in_a_fork(work: Callable[..., Any], *args: Any) -> Any:
    """What ``work`` returns in a forked child."""
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            sending.send(work(*args))
        except BaseException as error:
            sending.send(error)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    sending.close()
    assert receiving.poll(LONG_S), "the child hangs"
    result = receiving.recv()
    receiving.close()
    process.join(LONG_S)
    assert process.exitcode == 0
    if isinstance(result, BaseException):
        raise result
    return result
