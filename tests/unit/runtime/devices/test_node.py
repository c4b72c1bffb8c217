"""What a node says about its devices."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from farcall.options import RpcBackendOptions
from farcall.runtime.devices.node import NodeDevices


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NodeDevices:
    """It uses cuda:0 of two."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return NodeDevices("w1", RpcBackendOptions(device_maps={"w0": {"cuda:0": "cuda:0"}}), SimpleNamespace())  # type: ignore[arg-type]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[socket.socket]:
    """MPS, as far as it is looked at."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen()
        yield listening


def test_two_workers_on_one_gpu_are_told_of_mps_once(node: NodeDevices, caplog: pytest.LogCaptureFixture) -> None:
    node.on_shared(1, "w0")  # not one of its own
    assert caplog.records == []
    node.on_shared(0, "w0")
    node.on_shared(0, "w2")
    [told] = caplog.records
    assert told.levelno == logging.WARNING
    assert "w1 and w0" in told.message
    assert "nvidia-cuda-mps-control -d" in told.message


def test_with_mps_nothing_is_said(node: NodeDevices, daemon: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    node.on_shared(0, "w0")
    assert caplog.records == []


def test_a_daemon_that_ended_left_its_file(
    node: NodeDevices, daemon: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.close()
    node.on_shared(0, "w0")
    assert len(caplog.records) == 1
