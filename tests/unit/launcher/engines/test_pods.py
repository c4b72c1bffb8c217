"""Manifests against the published schemas, and what the status of a pod means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.kit.times import LONG_S

from farcall.launcher.engine import EngineError, ProcessState, WorkerSpec
from farcall.launcher.engines import pods

CONTAINER: dict[str, Any] = {
    "image": "farcall:1",
    "command": ["python", "-m", "farcall.launcher.worker"],
    "resources": {"requests": {"cpu": "4", "nvidia.com/gpu": 1}, "limits": {"cpu": "4", "nvidia.com/gpu": 1}},
}
POD: dict[str, Any] = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "volumes": [{"name": "data", "emptyDir": {}}],
}


def a_job() -> dict[str, Any]:
    return pods.job("farcall-1-0", 3, {pods.LAUNCH_LABEL: "1"}, container=CONTAINER, pod=POD)


def spec(rank: int) -> WorkerSpec:
    return WorkerSpec(name=f"worker{rank}", rank=rank, secret="deep", meet="farcall://driver:1")


@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
def test_manifests_are_valid(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    job = a_job()
    owner = {**job, "metadata": {**job["metadata"], "uid": "0"}}
    kubernetes_validate.validate(job, version, strict=True)
    kubernetes_validate.validate(pods.secret("farcall-1-0", [spec(0)], owner), version, strict=True)
    # The schemas have no JobSet, but it holds a Job.
    [replicated] = pods.job_set(job)["spec"]["replicatedJobs"]
    kubernetes_validate.validate({**job, "spec": replicated["template"]["spec"]}, version, strict=True)


def test_what_the_user_says_is_there_too() -> None:
    inside = a_job()["spec"]["template"]["spec"]
    assert inside["nodeSelector"] == {"pool": "gpu"}
    assert [volume["name"] for volume in inside["volumes"]] == ["specs", "data"]


def test_the_secret_is_in_no_environment_and_no_argument(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(spec(1).encode())
    container = {**CONTAINER, "command": [sys.executable, "-c", "import os, sys; print(os.environ, sys.argv)", "last"]}
    job = pods.job("farcall-1-0", 3, {}, container=container, pod={})
    [worker] = job["spec"]["template"]["spec"]["containers"]
    [mount] = worker["volumeMounts"]
    command = [word.replace(mount["mountPath"], str(tmp_path)) for word in worker["command"]]
    said = subprocess.check_output(command, env={"JOB_COMPLETION_INDEX": "1"}, text=True, timeout=LONG_S)
    assert f"'{tmp_path}/1'" in said
    assert "['-c', 'last']" in said
    assert "deep" not in said


def test_too_many_workers_for_a_secret() -> None:
    large = WorkerSpec(name="w", rank=0, secret="", meet="", options=b"x" * 500_000)
    with pytest.raises(EngineError, match="launch fewer"):
        pods.secret("b", [large, large], {})


def a_pod(status: dict[str, Any], **state: Any) -> dict[str, Any]:
    if state:
        status = {**status, "containerStatuses": [{"name": "sidecar"}, {"name": "worker", "state": state}]}
    return {"metadata": {"name": "p"}, "spec": {"nodeName": "n"}, "status": status}


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (a_pod({}), ProcessState("queued", "its pod waits for a node")),
        (
            a_pod({"phase": "Pending", "conditions": [UNSCHEDULABLE]}),
            ProcessState("queued", "no node for its pod: Unschedulable: 0/3 nodes"),
        ),
        (
            a_pod({"phase": "Pending"}, waiting={"reason": "ContainerCreating"}),
            ProcessState("starting", "its container is made, or its image pulled"),
        ),
        (
            a_pod({"phase": "Pending"}, waiting={"reason": "ImagePullBackOff", "message": "Back-off"}),
            ProcessState("starting", "ImagePullBackOff: Back-off"),
        ),
        (a_pod({"phase": "Running"}, running={}), ProcessState("running", "pod p on n")),
        (
            a_pod({"phase": "Succeeded"}, terminated={"exitCode": 0, "reason": "Completed"}),
            ProcessState("ended", "", 0),
        ),
        (a_pod({"phase": "Failed"}, terminated={"exitCode": 82, "reason": "Error"}), ProcessState("ended", "", 82)),
        (
            a_pod({"phase": "Failed"}, terminated={"exitCode": 137, "reason": "OOMKilled"}),
            ProcessState("ended", "OOMKilled", -9),
        ),
        (
            a_pod({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}),
            ProcessState("ended", "Evicted: low on memory"),
        ),
    ],
)
def test_states(pod: dict[str, Any], expected: ProcessState) -> None:
    assert pods.state_of(pod) == expected
