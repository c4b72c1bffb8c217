"""``farcall dashboard``: the live page of a cluster that runs already, served by this command."""

from __future__ import annotations

import threading

from rich.console import Console

from farcall.observe.dashboard.server import Dashboard
from farcall.observe.observer import Observer
from farcall.options import RpcBackendOptions

__all__ = ["serve"]


def serve(console: Console, observer: Observer, address: str, host: str, port: int) -> None:
    """Serve the page until Ctrl-C. ``observer`` is connected; ``address``: where to, if it was chosen by address."""
    cluster_id = observer.metrics().cluster_id
    first: list[Observer] = [observer]

    def connect() -> Observer:
        if first:
            return first.pop()
        return Observer.connect_with_secret(address) if address else Observer.find(cluster_id)

    page = Dashboard(connect, host, port, RpcBackendOptions().secret_bytes)
    page.start()
    try:
        console.print(f"the dashboard of cluster {cluster_id} is at {page.url} (Ctrl-C ends it)", soft_wrap=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        page.close()
