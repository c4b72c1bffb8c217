"""What other programs say when something fails, heard from the programs themselves."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket

import pytest
import torch
import torch.distributed as dist
from tests.kit.rigs.ssh import ssh_server

from farcall.foreign_errors import (
    is_attribute_missing,
    is_changed_in_place,
    is_not_found,
    is_of_local_code,
    is_port_taken,
    refused_forward,
)
from farcall.launcher.engine import EngineError
from farcall.launcher.engines.kubernetes import Kubectl

# ---------------------------------------------------------------------- torch


def listening() -> tuple[object, int]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def bound() -> tuple[object, int]:
    holder = socket()
    holder.bind(("", 0))
    return holder, holder.getsockname()[1]


@pytest.mark.parametrize("taken", [listening, bound])
@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_whose_port_is_taken(taken: Callable[[], tuple[object, int]], use_libuv: bool) -> None:
    held, port = taken()
    with pytest.raises(RuntimeError) as raised:
        dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    assert is_port_taken(raised.value)
    if isinstance(held, socket):
        held.close()


def test_a_store_that_cannot_listen_for_another_reason() -> None:
    unusable = socket()  # not bound
    with pytest.raises(RuntimeError) as raised:
        dist.TCPStore(
            "127.0.0.1",
            1,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=unusable.detach(),  # torch closes it
            use_libuv=False,
        )
    assert not is_port_taken(raised.value)


def test_a_backward_pass_after_a_change_in_place() -> None:
    weights = torch.ones(3, requires_grad=True)
    value = weights.exp()
    value.add_(1)
    with pytest.raises(RuntimeError) as raised:
        value.sum().backward()
    assert is_changed_in_place(raised.value)


# ---------------------------------------------------------------------- Python's pickle


def test_code_that_no_module_has() -> None:
    def inside() -> None:
        pass

    for value in (inside, lambda: None):
        with pytest.raises((AttributeError, pickle.PicklingError)) as raised:
            pickle.dumps(value)
        assert is_of_local_code(raised.value)
    with pytest.raises(TypeError) as refused:
        pickle.dumps(threading.Lock())
    assert not is_of_local_code(refused.value)


def test_a_name_that_a_module_does_not_have() -> None:
    with pytest.raises(AttributeError) as raised:
        pickle.loads(b"cthreading\nno_such_name\n.")
    assert is_attribute_missing(raised.value)
    assert not is_attribute_missing(AttributeError("not for sale"))


# ---------------------------------------------------------------------- ssh


def test_a_server_that_forwards_no_port(tmp_path: Path) -> None:
    with ssh_server(tmp_path) as rig, socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]  # the server cannot listen there, too
        forward = f"127.0.0.1:{port}:127.0.0.1:{port}"
        command = ["ssh", "-F", str(rig.configuration), "-o", "LogLevel=INFO", "-R", forward, "alpha", "true"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr
    assert any(line.endswith(refused_forward(port)) for line in said.splitlines())


# ---------------------------------------------------------------------- kubectl


class Answering(BaseHTTPRequestHandler):
    """A cluster that has nothing, and lets nobody delete one kind of object."""

    def do_DELETE(self) -> None:
        code, reason, text = 404, "NotFound", 'pods "worker0" not found'
        if "secrets" in self.path:
            code, reason, text = 403, "Forbidden", 'secrets "not found" is forbidden'
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": text, "reason": reason}
        body = json.dumps({**status, "code": code}).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_an_object_that_is_gone_is_told_from_one_that_may_not_be_deleted(cluster: str) -> None:
    kubectl = Kubectl(["--server", cluster])
    kubectl.delete("/api/v1/namespaces/default/pods/worker0")
    with pytest.raises(EngineError, match="Forbidden") as raised:
        kubectl.delete("/api/v1/namespaces/default/secrets/worker0")
    assert not is_not_found(str(raised.value))
