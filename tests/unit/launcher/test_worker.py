"""What a worker makes of its spec."""

from __future__ import annotations

import pickle

from farcall.launcher.engine import WorkerSpec
from farcall.launcher.worker import options_of
from farcall.options import MembershipOptions, RpcBackendOptions


def test_options_are_the_drivers_but_for_its_own() -> None:
    drivers = RpcBackendOptions(
        rpc_timeout=7.0,
        port=2222,
        advertise="10.0.0.1",
        membership=MembershipOptions(suspicion_s=3.0),
        secret="0123456789abcdef",
    )
    sent = WorkerSpec(
        name="worker0", rank=0, secret="fedcba9876543210", meet="farcall://10.0.0.1:2222", options=pickle.dumps(drivers)
    )
    found = options_of(WorkerSpec.decode(sent.encode()))
    assert (found.rpc_timeout, found.port, found.advertise, found.secret) == (7.0, 0, None, "fedcba9876543210")
    assert found.init_method == "farcall://10.0.0.1:2222"
    # One that the driver holds for dead is ended, and replaced: it must not come back beside its successor.
    assert found.membership == MembershipOptions(suspicion_s=3.0, rejoin=False)
