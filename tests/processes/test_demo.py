"""`farcall demo`, run as a user would run it: what it did, what it wrote, and what it says where it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from tests.kit.launching import wait_gone
from tests.kit.waiting import wait_until
from tests.processes.trace_reader import Trace

from farcall.observe.presence import Presence, find_nodes

WORKERS = {"demo", "server0", "server1", "trainer0", "trainer1"}
SVG = "{http://www.w3.org/2000/svg}"


def start_demo(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "farcall", "demo", *arguments],
        cwd=folder,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def nodes_of(folder: Path) -> dict[str, Presence]:
    return {node.name: node for node in find_nodes(folder / "farcall")}


def test_the_demo_trains_survives_a_death_and_writes_what_it_promises(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--steps", "600")
    said, complaints = demo.communicate(timeout=280)
    assert demo.returncode == 0, said + complaints
    assert complaints == ""
    assert "\x1b" not in said  # readable in a pipe
    folder = tmp_path / "farcall-demo"
    assert f"Files, in {folder}:" in said
    for name in ("demo.svg", "trace.json", "figures.json"):
        assert name in said

    figures = json.loads((folder / "figures.json").read_text())
    steps = sorted(figures["steps"], key=lambda step: step["begun_s"])
    assert len(steps) == 600
    assert {step["trainer"] for step in steps} == {"trainer0", "trainer1"}
    losses = [step["loss"] for step in steps]
    assert sum(losses[-40:]) < 0.7 * sum(losses[:40])
    assert all(duration_s > 0 for step in steps for duration_s in step["took_s"])

    death = figures["death"]
    assert steps[0]["begun_s"] < death["killed_s"] < death["noticed_s"] < death["back_s"] < steps[-1]["begun_s"]
    assert death["saved_steps"] <= death["after_steps"]
    assert f"known to be dead after {(death['noticed_s'] - death['killed_s']) * 1e3:.0f} ms" in said
    assert figures["outages"], "somebody must have noticed"
    for outage in figures["outages"]:
        assert outage["ended_s"] > death["killed_s"]
        assert "server1" in outage["error"]

    picture = ElementTree.parse(folder / "demo.svg").getroot()
    texts = " ".join(text.text or "" for text in picture.iter(f"{SVG}text"))
    assert "server1 killed" in texts
    assert f"{figures['accuracy']:.1%} right on new points" in texts

    trace = Trace(folder / "trace.json")
    assert set(trace.processes.values()) == WORKERS
    for trainer in ("trainer0", "trainer1"):
        assert trace.only(f"rpc_async#train(demo -> {trainer})", "demo")
        assert any(each.name.startswith(f"backward({trainer} -> ") for each in trace.slices)
    assert trace.named("AddmmBackward0", "server1")  # the one that came back works


def test_a_worker_that_dies_of_something_else_ends_the_demo_and_is_named(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--steps", "1000000")
    try:
        wait_until(lambda: nodes_of(tmp_path).keys() == WORKERS, "all have started")
        processes = [node.process_id for node in nodes_of(tmp_path).values()]
        os.kill(nodes_of(tmp_path)["server0"].process_id, signal.SIGKILL)
        said, complaints = demo.communicate(timeout=250)
    finally:
        demo.kill()
    assert demo.returncode == 1, said + complaints
    assert "the demo failed: server0 died, and the demo did not kill it" in complaints
    assert "SIGKILL" in complaints
    assert not (tmp_path / "farcall-demo").exists()
    assert "Traceback" not in complaints
    wait_gone(processes)


def test_workers_that_do_not_start_are_said_in_one_line(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, FARCALL_TRANSPORTS="no such thing")
    _, complaints = demo.communicate(timeout=250)
    assert demo.returncode == 1, complaints
    assert "farcall: the demo failed: cannot start the workers: " in complaints
    assert "Traceback" not in complaints
    assert not (tmp_path / "farcall-demo").exists()


def test_ctrl_c_ends_the_demo_and_all_its_workers(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--steps", "1000000")
    try:
        wait_until(lambda: nodes_of(tmp_path).keys() == WORKERS, "all have started")
        processes = [node.process_id for node in nodes_of(tmp_path).values()]
        demo.send_signal(signal.SIGINT)
        said, complaints = demo.communicate(timeout=250)
    finally:
        demo.kill()
    assert demo.returncode == 130, said + complaints
    assert "interrupted; all workers have ended" in said
    assert not (tmp_path / "farcall-demo").exists()
    assert "Traceback" not in complaints
    wait_gone(processes)


@pytest.mark.parametrize("occupied", ["", "inside"])
def test_a_folder_that_cannot_be_made_is_said_before_anything_starts(tmp_path: Path, occupied: str) -> None:
    (tmp_path / "file").write_text("here already")
    demo = start_demo(tmp_path, "--output", str(tmp_path / "file" / occupied))
    _, complaints = demo.communicate(timeout=250)
    assert demo.returncode == 2
    assert "cannot make a folder for the files" in complaints
    assert "--output" in complaints
