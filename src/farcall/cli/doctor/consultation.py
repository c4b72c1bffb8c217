"""The doctor's round: all findings, in order; and ``--listen``, for the doctors of other hosts."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from farcall.cli.doctor.finding import Finding, wrong
from farcall.cli.doctor.hosts import Host, visit
from farcall.cli.doctor.machine import look_at_machine, look_at_options
from farcall.cli.doctor.store import look_at_store, meeting_place
from farcall.errors import InitError
from farcall.options import RpcBackendOptions
from farcall.runtime.rendezvous.addresses import choose_host
from farcall.runtime.rendezvous.records import secret_of
from farcall.transport.interface import ListenFailed
from farcall.transport.tls import tls_for


def consult(init_method: str, hosts: Sequence[tuple[str, int]]) -> list[Finding]:
    """All findings, about this machine and ``hosts`` (names and ports)."""
    logging.getLogger("farcall").setLevel(logging.ERROR)  # the findings say more
    options, findings = look_at_options()
    if options is None:
        return findings
    place, about_place = meeting_place(init_method, os.environ)
    store_host = place.host if place is not None else None
    findings = look_at_machine(options, store_host) + findings + about_place
    if place is not None:
        findings += look_at_store(place)
    for host, port in hosts:
        # The address that a worker here would advertise if rank 0 were on that host.
        advertised = choose_host(options.advertise, host).host
        try:
            secret = secret_of(options)
            findings += visit(host, port, secret, advertised, tls_for(options))
        except InitError as error:
            findings.append(wrong(host, str(error), "give a secret"))
        except ValueError as error:
            findings.append(wrong(host, str(error), "make them again: farcall certificates"))
    return findings


def receive_visits(console: Console, port: int) -> bool:
    """Let other hosts' doctors visit this one, until Ctrl-C; False where that is not possible."""
    try:
        options = RpcBackendOptions()
        secret = secret_of(options)
        host = Host(secret, port, tls_for(options))
    except (TypeError, ValueError, InitError, ListenFailed) as error:
        console.print(f"cannot listen for other hosts' doctors: {escape(str(error))}", highlight=False, soft_wrap=True)
        return False
    where = choose_host(options.advertise, None).host
    console.print(f"on other hosts run: farcall doctor {where}:{host.port}    (Ctrl-C ends this)", highlight=False)
    try:
        host.serve(lambda line: console.print(escape(line), highlight=False, soft_wrap=True))
    except KeyboardInterrupt:
        pass
    finally:
        host.release()
    return True
