"""What other programs say when something fails, heard from the programs themselves."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket

import pytest
import torch
import torch.distributed as dist

from farcall.foreign_errors import is_changed_in_place, is_not_found, is_port_taken
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
