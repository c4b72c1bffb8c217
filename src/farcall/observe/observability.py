"""The observable side of a node, as its options say: spans, answers, metrics, the live page, a presence file.

One per runtime, made while the node starts. Calls pay for their counters only. By default, only the answers to other
members are loaded, since they must explain a timeout within milliseconds; options cause the import of the rest.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING

from farcall.observe.answering import TRACE_BEGIN, TRACE_END, Answering
from farcall.observe.presence import Presence, PresenceFile, process_start
from farcall.private_files import pid_namespace, runtime_directory
from farcall.protocol.hello import observer_key
from farcall.runtime.node import Runtime
from farcall.transport.tls import tls_for

if TYPE_CHECKING:
    from farcall.observe.cluster import Recordings
    from farcall.observe.observer import Observer

logger: logging.Logger = logging.getLogger("farcall")


class Observability:
    """The observable side of one node: ``runtime.part(Observability)``."""

    def __init__(self, runtime: Runtime) -> None:
        options = runtime.options
        self._runtime = runtime
        self.metrics_port: int | None = None
        self.dashboard_url: str | None = None
        observing = options.observing
        if observing.opentelemetry:
            from farcall.observe.telemetry import TracedCalls

            assert isinstance(runtime.calls, TracedCalls)
            runtime.server.wrap = runtime.calls.telemetry.traced
        subjects = runtime.part(Answering).subjects
        subjects[TRACE_BEGIN] = lambda peer, argument: self._recordings().begin(peer, argument)
        subjects[TRACE_END] = lambda peer, argument: self._recordings().end(peer, argument)
        self._left_file = not observing.observable
        self._leave_file()
        # A newcomer that was given an address only hears the id of the cluster from the first member that it meets.
        runtime.hooks.peer_joined.append(lambda peer: self._leave_file())
        if observing.metrics_port is not None:
            from farcall.observe.prometheus import MetricsServer

            tls = tls_for(options)
            server = MetricsServer(runtime, observing.metrics_host, observing.metrics_port, tls)
            runtime.hooks.ended.append(server.close)
            self.metrics_port = server.port
            is_another = observing.metrics_port not in (0, server.port)
            why = f": another process has port {observing.metrics_port}" if is_another else ""
            level = logging.WARNING if is_another else logging.INFO  # whoever scrapes has to know
            logger.log(level, "%s serves metrics on port %d%s", runtime.info.name, server.port, why)
        if observing.dashboard_port is not None:
            self._serve_dashboard(observing.dashboard_port)

    def _recordings(self) -> Recordings:
        from farcall.observe.cluster import Recordings  # few nodes are ever asked for a trace

        return self._runtime.part(Recordings)

    def _serve_dashboard(self, port: int) -> None:
        from farcall.observe.dashboard.server import Dashboard
        from farcall.observe.observer import Observer

        runtime = self._runtime

        def connect() -> Observer:
            key = observer_key(runtime.observers_secret.values[0])
            return Observer.connect_any(
                runtime.addresses, key, runtime.membership.cluster_id, runtime.info.name, runtime.options
            )

        tls, host = tls_for(runtime.options), runtime.options.observing.dashboard_host
        dashboard = Dashboard(connect, port, host, tls=tls, name=runtime.options.advertise or "")
        runtime.hooks.ended.append(dashboard.close)
        self.dashboard_url = dashboard.url
        # Printed, not logged: a user who asks for a page needs its address.
        print(f"{runtime.info.name}: live page at {dashboard.url}", file=sys.stderr, flush=True)

    def _leave_file(self) -> None:
        """Write the presence file, through which commands find this node, once the id of its cluster is known."""
        runtime = self._runtime
        if self._left_file or not runtime.membership.cluster_id:
            return
        self._left_file = True
        secret, directory = runtime.observers_secret, runtime.options.observing.runtime_directory
        presence = Presence(
            name=runtime.info.name,
            rank=runtime.info.id,
            cluster_id=runtime.membership.cluster_id,
            addresses=runtime.addresses,
            key="" if secret.path else observer_key(secret.values[0]).hex(),
            secret_file=os.path.abspath(secret.path) if secret.path else "",
            process_id=os.getpid(),
            process_start=process_start(os.getpid()),
            namespace=pid_namespace(),
            started_at=time.time(),
            cluster_name=runtime.options.observing.cluster_name or "",
            encrypts=runtime.options.encrypts,
            program=_program(),
        )
        try:
            file = PresenceFile(runtime_directory(directory), presence)
        except OSError as error:
            level = logging.INFO if directory is None else logging.WARNING
            logger.log(
                level, "%s: farcall top, stacks and trace will not find this worker: %s", runtime.info.name, error
            )
        else:
            runtime.hooks.ended.append(file.remove)


def _program() -> str:
    """The name of the program that runs here; empty for a worker of `farcall.launch`, and at a prompt."""
    path = sys.argv[0] if sys.argv else ""
    is_ours = path.startswith(("farcall.", os.path.dirname(os.path.dirname(__file__))))
    return "" if is_ours or path == "-c" else os.path.basename(path)
