"""Options are complete and valid once they exist; what is refused says what is allowed."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import farcall.options
from farcall.options import (
    LimitOptions,
    MembershipOptions,
    MemoryOptions,
    ObservingOptions,
    RpcBackendOptions,
    TlsOptions,
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    tls = (farcall.options.ENV_ENCRYPTION, *farcall.options.ENV_TLS_FILES)
    for name in ("FARCALL_ADVERTISE", "FARCALL_SECRET", "FARCALL_SECRET_FILE", "FARCALL_TRANSPORTS", *tls):
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    options = RpcBackendOptions()
    assert options.rpc_timeout == 60.0
    assert options.init_method == "env://"
    assert options.num_worker_threads == 16
    assert options.allowed_transports == ("unix", "tcp")
    assert options.given_secret() is None
    assert options.advertise is None
    assert (options.limits.max_queued_calls, options.limits.when_overloaded) == (100_000, "wait")


def test_timeout_and_place_may_be_positional_the_rest_not() -> None:
    options = RpcBackendOptions(5, "file:///tmp/x")
    assert (options.rpc_timeout, options.init_method) == (5.0, "file:///tmp/x")
    with pytest.raises(TypeError):
        RpcBackendOptions(5, "file:///tmp/x", 4)  # type: ignore[misc]


def test_options_are_frozen_and_replace_checks_again() -> None:
    options = RpcBackendOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.rpc_timeout = 5  # type: ignore[misc]
    assert options.replace(rpc_timeout=5).rpc_timeout == 5.0
    with pytest.raises(ValueError, match="rpc_timeout"):
        options.replace(rpc_timeout=-1)


@pytest.mark.parametrize(("rpc_timeout", "expected"), [(None, 60.0), (0.5, 60.0), (60, 60.0), (600, 600.0)])
def test_starting_takes_a_minute_or_the_longer_call_timeout(rpc_timeout: float | None, expected: float) -> None:
    assert RpcBackendOptions(rpc_timeout).start_deadline_s == expected


def test_start_timeout_wins() -> None:
    assert RpcBackendOptions(600, start_timeout_s=3).start_deadline_s == 3.0


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "text"),
    [
        (RpcBackendOptions, {"rpc_timeout": -1}, ValueError, "None means no limit"),
        (RpcBackendOptions, {"rpc_timeout": 0}, ValueError, "more than 0: None means no limit"),
        (RpcBackendOptions, {"rpc_timeout": float("nan")}, ValueError, "finite"),
        (RpcBackendOptions, {"rpc_timeout": float("inf")}, ValueError, "None means no limit"),
        (RpcBackendOptions, {"rpc_timeout": timedelta(seconds=3)}, TypeError, r"pass 3\.0"),
        (RpcBackendOptions, {"rpc_timeout": "3"}, TypeError, "number of seconds"),
        (RpcBackendOptions, {"rpc_timeout": True}, TypeError, "number of seconds"),
        (RpcBackendOptions, {"membership": {"suspicion_s": 1}}, TypeError, "farcall.MembershipOptions"),
        (MembershipOptions, {"suspicion_s": 0}, ValueError, "more than 0"),
        (MembershipOptions, {"indirect_probes": 0}, ValueError, "at least 1"),
        (ObservingOptions, {"metrics_port": 1 << 16}, ValueError, "0 to 65535"),
        (ObservingOptions, {"log": "loud"}, ValueError, "info, debug"),
        (ObservingOptions, {"cluster_name": 7}, TypeError, "cluster_name must be a str"),
        (RpcBackendOptions, {"start_timeout_s": 0}, ValueError, "more than 0"),
        (RpcBackendOptions, {"init_method": 3}, TypeError, "must be a str"),
        (RpcBackendOptions, {"init_method": "localhost"}, ValueError, "env://"),
        (RpcBackendOptions, {"init_method": "tcp://localhost"}, ValueError, "tcp://host:port"),
        (RpcBackendOptions, {"init_method": "tcp://localhost:port"}, ValueError, "not a url"),
        (RpcBackendOptions, {"init_method": "file://"}, ValueError, "path"),
        (RpcBackendOptions, {"num_worker_threads": 0}, ValueError, "at least 1"),
        (RpcBackendOptions, {"num_worker_threads": 1.5}, TypeError, "must be an int"),
        (MemoryOptions, {"shared_memory": 1}, TypeError, "True or False"),
        (MemoryOptions, {"shared_memory_limit_bytes": -1}, ValueError, "at least 1"),
        (LimitOptions, {"send_backlog_limit_bytes": 0}, ValueError, "at least 1"),
        (LimitOptions, {"max_queued_calls": 0}, ValueError, "at least 1"),
        (LimitOptions, {"max_queued_calls": 1e5}, TypeError, "must be an int"),
        (LimitOptions, {"when_overloaded": "raise"}, ValueError, '"wait" or "fail", not \'raise\''),
        (LimitOptions, {"when_overloaded": None}, ValueError, '"wait" or "fail"'),
        (RpcBackendOptions, {"advertise": "host:80"}, ValueError, "without a port"),
        (RpcBackendOptions, {"advertise": "10.0.0.1:80"}, ValueError, "no port"),
        (RpcBackendOptions, {"advertise": "two words"}, ValueError, "host name"),
        (RpcBackendOptions, {"advertise": 3}, TypeError, "must be a str"),
        (RpcBackendOptions, {"secret": 12345678}, TypeError, "str or bytes"),
        (RpcBackendOptions, {"transports": []}, ValueError, "unix, tcp"),
        (RpcBackendOptions, {"transports": ["uv"]}, ValueError, "unix, tcp"),
        (RpcBackendOptions, {"transports": 3}, TypeError, "sequence"),
        (RpcBackendOptions, {"devices": 0}, TypeError, r"for one write \[0\]"),
        (RpcBackendOptions, {"devices": "cuda:0"}, TypeError, r"for one write \['cuda:0'\]"),
    ],
)
def test_nonsense_is_refused(kind: type[Any], arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        kind(**arguments)


def value(options: RpcBackendOptions) -> bytes:
    secret = options.given_secret()
    assert secret is not None
    return secret.given()[0]


def test_a_short_secret_is_refused_without_being_told() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes") as caught:
        RpcBackendOptions(secret="fifteen bytes.")
    assert "fifteen" not in str(caught.value)


def test_the_secret_is_not_shown_but_travels_with_pickle() -> None:
    options = RpcBackendOptions(secret="correct horse battery")
    assert "horse" not in repr(options)
    assert pickle.loads(pickle.dumps(options)).given_secret().given() == (b"correct horse battery",)


def test_environment_stands_behind_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_ADVERTISE", "[fe80::1]")
    monkeypatch.setenv("FARCALL_SECRET", "from the environment")
    monkeypatch.setenv("FARCALL_TRANSPORTS", "tcp")
    options = RpcBackendOptions()
    assert options.advertise == "fe80::1"
    assert value(options) == b"from the environment"
    assert options.allowed_transports == ("tcp",)
    given = RpcBackendOptions(advertise="h1", secret=b"from an argument", transports=["tcp", "unix"])
    assert given.advertise == "h1"
    assert value(given) == b"from an argument"
    assert given.allowed_transports == ("unix", "tcp")


def test_the_secret_may_be_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    monkeypatch.setenv("FARCALL_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match=r"FARCALL_SECRET_FILE\).*cannot read the secret file"):
        RpcBackendOptions()
    path.write_text("from a file of our own\n")
    path.chmod(0o620)
    with pytest.raises(ValueError, match="others may write"):
        RpcBackendOptions()
    path.chmod(0o600)
    assert value(RpcBackendOptions()) == b"from a file of our own"
    assert value(RpcBackendOptions(secret="from an argument")) == b"from an argument"
    assert value(RpcBackendOptions().replace(secret="from an argument")) == b"from an argument"
    with pytest.raises(ValueError, match="both given"):
        RpcBackendOptions(secret="from an argument", secret_file=str(tmp_path / "secret.2"))
    monkeypatch.setenv("FARCALL_SECRET", "from the environment")
    with pytest.raises(ValueError, match="both set"):
        RpcBackendOptions()


def test_nonsense_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_TRANSPORTS", "tcp, pigeon")
    with pytest.raises(ValueError, match="FARCALL_TRANSPORTS"):
        RpcBackendOptions()


def test_empty_variables_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_SECRET", "")
    assert RpcBackendOptions().secret is None


def test_options_do_without_torch() -> None:
    code = "import sys; sys.path.append(sys.argv[1]); import farcall.options; sys.exit('torch' in sys.modules)"
    source = str(Path(farcall.options.__file__).parents[1])
    done = subprocess.run([sys.executable, "-S", "-c", code, source], timeout=250, check=False)
    assert done.returncode == 0


def test_devices() -> None:
    torch = pytest.importorskip("torch")
    options = RpcBackendOptions(device_maps={"b": {0: "cuda:1", torch.device("cpu"): "cuda"}}, devices=[1])
    assert options.device_maps == {"b": {"cuda:0": "cuda:1", "cpu": "cuda:0"}}
    assert options.devices == ("cuda:1",)
    assert options.names_devices
    assert not RpcBackendOptions().names_devices
    assert RpcBackendOptions(automatic_device_maps=True).names_devices
    assert options.replace(rpc_timeout=1).device_maps == options.device_maps


@pytest.mark.parametrize("maps", [{"b": {-1: 0}}, {"b": {"gpu": 0}}, {"b": {"cuda:x": 0}}])
def test_what_is_no_device(maps: dict[str, dict[object, object]]) -> None:
    with pytest.raises(ValueError, match="is not a device"):
        RpcBackendOptions(device_maps=maps)


@pytest.mark.parametrize("maps", [[], {"b": 3}, {3: {}}, {"b": {None: 0}}, {"b": {True: 0}}])
def test_what_is_no_device_map(maps: object) -> None:
    with pytest.raises(TypeError):
        RpcBackendOptions(device_maps=maps)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [10**400, -(10**400), float("inf"), float("nan")])
def test_a_time_that_no_clock_can_tell_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite number of seconds"):
        RpcBackendOptions(rpc_timeout=seconds)


def test_tls_by_option_and_by_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert RpcBackendOptions().tls is None
    paths = [tmp_path / name for name in ("ca.pem", "host.pem", "host.key")]
    for path in paths:
        path.touch()
    given = TlsOptions(ca=str(paths[0]), certificate=str(paths[1]), key=str(paths[2]))
    assert RpcBackendOptions(tls=given).tls is given
    for variable, path in zip(farcall.options.ENV_TLS_FILES, paths, strict=True):
        monkeypatch.setenv(variable, str(path))
    assert RpcBackendOptions().tls == given
    monkeypatch.delenv("FARCALL_TLS_KEY")
    with pytest.raises(ValueError, match="FARCALL_TLS_KEY"):
        RpcBackendOptions()
    for variable in farcall.options.ENV_TLS_FILES:
        monkeypatch.delenv(variable, raising=False)


def test_encryption_is_on_unless_it_is_said_to_be_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert RpcBackendOptions().encrypts
    assert not RpcBackendOptions(encryption="off").encrypts
    monkeypatch.setenv("FARCALL_ENCRYPTION", "off")
    assert not RpcBackendOptions().encrypts
    assert RpcBackendOptions(encryption="on").encrypts
    monkeypatch.setenv("FARCALL_ENCRYPTION", "no")
    with pytest.raises(ValueError, match="FARCALL_ENCRYPTION must be 'on' or 'off'"):
        RpcBackendOptions()
    file = tmp_path / "any.pem"
    file.touch()
    with pytest.raises(ValueError, match="leave one of them out"):
        RpcBackendOptions(encryption="off", tls=TlsOptions(ca=str(file), certificate=str(file), key=str(file)))


@pytest.mark.parametrize(
    ("choices", "kind", "why"),
    [
        ({}, ValueError, "needs ca"),
        ({"ca": "/nowhere", "certificate": "/nowhere", "key": "/nowhere"}, ValueError, "does not exist"),
        ({"ca": 1}, TypeError, "a path"),
        ({"check_hosts": 1}, TypeError, "check_hosts"),
    ],
)
def test_tls_options_that_cannot_be(choices: dict[str, object], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        TlsOptions(**choices)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TlsOptions"):
        RpcBackendOptions(tls="yes")  # type: ignore[arg-type]
