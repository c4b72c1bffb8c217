"""`farcall.Node`: a member that can be looked at.

The node of calls and references, plus what shows what it does: metrics, answers to observers, the file by which
commands find it, and what its options ask for beside that. Nothing of this makes calls slower than counting them.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from farcall.observe.cluster import Tracing
from farcall.observe.logs import log_as_told
from farcall.observe.metrics import Metrics, collect
from farcall.observe.observer import Observer
from farcall.observe.presence import Presence, PresenceFile, namespace, process_start, runtime_directory
from farcall.observe.prometheus import MetricsServer
from farcall.observe.snapshot import WorkerSnapshot
from farcall.observe.telemetry import Telemetry, TracedCalls
from farcall.observe.threads import take_snapshot
from farcall.protocol.hello import observer_key
from farcall.rpc import node
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.rendezvous.rendezvous import Membership

if TYPE_CHECKING:
    from farcall.observe.dashboard.server import Dashboard

__all__ = ["Node"]

logger: logging.Logger = logging.getLogger("farcall")


class Node(node.Node):
    """One member. A context manager: it starts on entry, and leaves, gracefully unless something was raised, on exit.

    Args:
        name: unique name; letters, digits, ``_``, ``:`` and ``-``, under 128 characters.
        rank: unique number, below ``world_size`` if there is one.
        world_size: number of members; None: the group has no fixed size, unless the environment or the url says one.
        options: see `RpcBackendOptions`.
    """

    _telemetry: Telemetry | None = None
    _dashboard: Dashboard | None = None
    metrics_port: int | None = None
    """Where metrics are served for Prometheus, if they are."""

    dashboard_url: str | None = None
    """Where the live page is, if it is served."""

    def start(self) -> None:
        """Meet the other members and connect to each; raises within the options' start timeout."""
        log_as_told(self.options.log)
        if self.options.opentelemetry:
            self._telemetry = Telemetry(self._name)
        super().start()

    def __enter__(self) -> Node:
        super().__enter__()
        return self

    def _make_calls(self) -> CallTable:
        if self._telemetry is None:
            return super()._make_calls()
        return TracedCalls(
            self._loop.timer,
            self.executor,
            self.options.when_overloaded,
            self._telemetry,
            on_given_up=self.something_ended,
        )

    def _become_member(self, membership: Membership) -> None:
        super()._become_member(membership)
        if self._telemetry is not None:
            self.server.wrap = self._telemetry.traced
        self.part(Tracing)
        if self.options.observable:
            self._show(membership)
        if self.options.metrics_port is not None:
            server = MetricsServer(self, self.options.metrics_host, self.options.metrics_port)
            self.on_end(server.close)
            self.metrics_port = server.port
            logger.info("%s: metrics are served at port %d", self.info.name, server.port)
        if self.options.dashboard_port is not None:
            self._serve_dashboard(membership, self.options.dashboard_port)

    def _serve_dashboard(self, membership: Membership, port: int) -> None:
        from farcall.observe.dashboard.server import Dashboard  # a web server is not loaded for nothing

        me, key = membership.me, observer_key(membership.secret)

        def connect() -> Observer:
            return Observer.connect_any(me.addresses, key, membership.cluster_id, me.name)

        self._dashboard = Dashboard(connect, self.options.dashboard_host, port, self.options.secret_bytes)
        self._dashboard.start()
        self.on_end(self._dashboard.close)
        self.dashboard_url = self._dashboard.url
        logger.info("%s: the dashboard is at %s", me.name, self.dashboard_url)

    def _show(self, membership: Membership) -> None:
        """Leave a file by which commands find this node."""
        presence = Presence(
            name=membership.me.name,
            rank=membership.me.rank,
            cluster_id=membership.cluster_id,
            addresses=membership.me.addresses,
            key=observer_key(membership.secret).hex(),
            process_id=os.getpid(),
            process_start=process_start(os.getpid()),
            namespace=namespace(),
            started_at=time.time(),
        )
        try:
            file = PresenceFile(runtime_directory(self.options.runtime_directory), presence)
        except OSError as error:
            level = logging.INFO if self.options.runtime_directory is None else logging.WARNING
            logger.log(level, "%s: commands will not find this node: %s", self.info.name, error)
        else:
            self.on_end(file.remove)

    def metrics(self) -> Metrics:
        """What this worker has done so far, and what it has now: see `farcall.observe.metrics.Metrics`."""
        return collect(self)

    def snapshot(self) -> WorkerSnapshot:
        """The calls that this worker makes and serves at this moment, and where its threads are."""
        return take_snapshot(self)
