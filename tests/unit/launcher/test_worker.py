"""What a worker makes of its spec."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from farcall.launcher.engine import ENV_SPEC_FILE, WorkerSpec
from farcall.launcher.worker import options_of, read_spec
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


def test_a_spec_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0").write_bytes(WorkerSpec(name="worker0", rank=0, secret="deep", meet="farcall://driver:1").encode())
    monkeypatch.setenv(ENV_SPEC_FILE, str(tmp_path / "0"))
    assert read_spec().secret == "deep"
    assert ENV_SPEC_FILE not in os.environ
