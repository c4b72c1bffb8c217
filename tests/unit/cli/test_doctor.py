"""What the doctor concludes from what it sees; each thing that can be wrong, made so."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest
from tests.kit.ports import tcp_url

from farcall.cli.doctor import machine, store
from farcall.cli.doctor.finding import Finding, as_json, exit_status, note, ok, wrong
from farcall.options import RpcBackendOptions

GIBIBYTE = 1 << 30


def test_the_exit_status_is_that_of_the_worst() -> None:
    assert exit_status([ok("a", "b"), note("c", "d", "e")]) == 0
    assert exit_status([ok("a", "b"), wrong("c", "d", "e")]) == 1


def test_json_holds_everything() -> None:
    document = json.loads(as_json([wrong("store", "gone", "start it")]))
    assert document == {
        "ok": False,
        "findings": [{"subject": "store", "state": "wrong", "found": "gone", "advice": "start it"}],
    }


@pytest.mark.parametrize(
    ("soft", "hard", "state", "says"),
    [
        (64, 4096, "wrong", "ulimit -n 4096"),
        (512, resource.RLIM_INFINITY, "note", "ulimit -n 65536"),
        (4096, 4096, "ok", "4096"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, "ok", "no limit"),
    ],
)
def test_descriptors(soft: int, hard: int, state: str, says: str) -> None:
    found = machine.descriptors(soft, hard)
    assert found.state == state
    assert says in found.found + found.advice


def test_memory() -> None:
    assert machine.memory(4 * GIBIBYTE, 8 * GIBIBYTE).state == "ok"
    assert "shared_memory_limit_bytes" in machine.memory(4 * GIBIBYTE, GIBIBYTE).advice
    assert machine.memory(4 * GIBIBYTE, None).state == "note"
    left = machine.memory_left()
    assert left is not None
    assert left > 0


def test_processes_on_one_gpu_take_turns_without_mps() -> None:
    [turns], [together] = machine.gpus(2, is_served=False), machine.gpus(2, is_served=True)
    assert (turns.state, together.state, machine.gpus(0, is_served=False)) == ("note", "ok", [])
    assert "nvidia-cuda-mps-control -d" in turns.advice


def test_secret() -> None:
    found = machine.secret(RpcBackendOptions(secret="this is long enough"))
    assert (found.state, "19 bytes" in found.found, "long enough" in found.found) == ("ok", True, False)
    assert machine.secret(RpcBackendOptions()).state == "note"


def test_variables_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_TRANSPORTS", "pigeon")
    options, findings = machine.look_at_options()
    assert options is None
    assert [finding.state for finding in findings] == ["wrong"]
    assert "FARCALL_TRANSPORTS" in findings[0].found


def test_host_names() -> None:
    assert "so other machines cannot use it" in machine.host_name("localhost").found
    assert "does not resolve" in machine.host_name("no-such-host.invalid").found


def test_an_advertised_address_that_is_wrong() -> None:
    options = RpcBackendOptions(advertise="no-such-host.invalid")
    found = machine.address(options, "no-such-host.invalid", "as told")
    assert found.state == "wrong"
    assert "FARCALL_ADVERTISE" in found.advice


def test_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda name: "2.5.1+cpu")
    assert "torch>=2.6" in machine.versions().advice


def look(url: str, **environ: str) -> list[Finding]:
    place, findings = store.meeting_place(url, environ)
    return findings if place is None else store.look_at_store(place)


def test_no_store_named() -> None:
    assert [finding.state for finding in look("env://")] == ["note"]


def test_half_a_store_named() -> None:
    [found] = look("env://", MASTER_ADDR="127.0.0.1")
    assert found.state == "wrong"
    assert "MASTER_PORT" in found.found


def test_a_store_that_nobody_serves_here_yet() -> None:
    *_, found = look(tcp_url())
    assert found.state == "ok"
    assert "rank 0, started on this machine, can" in found.found


def test_a_port_of_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        *_, found = look(f"tcp://127.0.0.1:{other.getsockname()[1]}")
    assert found.state == "wrong"
    assert "no torch store answers" in found.found


def test_a_store_whose_host_has_no_address() -> None:
    [found] = look("tcp://no-such-host.invalid:29500")
    assert found.state == "wrong"
    assert "does not resolve" in found.found


def test_files(tmp_path: Path) -> None:
    assert [found.state for found in look(f"file://{tmp_path}/new")] == ["ok"]
    (tmp_path / "old").touch()
    assert [found.state for found in look(f"file://{tmp_path}/old")] == ["note"]
    [missing] = look(f"file://{tmp_path}/none/new")
    assert missing.state == "wrong"
    assert "does not exist" in missing.found
