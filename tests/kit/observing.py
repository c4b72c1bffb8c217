"""A look into a cluster from outside, on a machine that may be busy."""

from __future__ import annotations

from pathlib import Path

from tests.kit.waiting import wait_until

from farcall.observe.observer import NothingToObserve, Observer
from farcall.options import ObservingOptions, RpcBackendOptions


def find_observer(directory: Path, cluster: str = "") -> Observer:
    """An observer of the cluster whose members leave their files in ``directory``, as soon as one of them answers.

    `Observer.find` gives a member three seconds, which a busy machine may take for something else.
    """
    options = RpcBackendOptions(observing=ObservingOptions(runtime_directory=str(directory)))
    found: list[Observer] = []

    def look() -> bool:
        try:
            found.append(Observer.find(cluster, options))
        except NothingToObserve:
            return False
        return True

    wait_until(look, f"a member in {directory} answers an observer")
    return found[0]
