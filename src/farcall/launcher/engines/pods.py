"""Manifests of workers for Kubernetes, and the states of their pods. Plain values; `kubernetes.py` sends them.

Workers that are started together are one *batch*: an indexed Job (in a JobSet where the cluster has those) and a Secret
of the same name, with the spec of each worker under its index. The Secret belongs to the Job, and goes with it.

    a worker that ends        ends its index alone (``backoffLimitPerIndex: 0``): the engine's user decides whether to
                              start another one, in a batch of its own
    a batch whose workers     is removed by the cluster after `KEPT_S`, if its driver died and did not do so
    have all ended
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from farcall.launcher.engine import ENV_SPEC_FILE, EngineError, ProcessState, WorkerSpec

JOB_SET_VERSION = "jobset.x-k8s.io/v1alpha2"
LAUNCH_LABEL = "farcall-launch"
"""The same for all objects of an engine."""
BATCH_LABEL = "farcall-batch"
CONTAINER = "worker"
KEPT_S = 600
MAX_SECRET_BYTES = 1_000_000
"""A little less than Kubernetes allows."""
_INDEX = "batch.kubernetes.io/job-completion-index"
_FOLDER = "/run/farcall"
_ENDING_S = 2
_BY_SIGNAL = 128
# The path alone: an environment is inherited, printed and collected by many tools.
_SCRIPT = f'export {ENV_SPEC_FILE}="{_FOLDER}/$JOB_COMPLETION_INDEX"; exec "$@"'


def secret(batch: str, specs: Sequence[WorkerSpec], owner: Mapping[str, Any]) -> dict[str, Any]:
    """The Secret with the specs of a batch; it ends with ``owner``, the Job or JobSet as the cluster made it."""
    data = {str(index): base64.b64encode(spec.encode()).decode() for index, spec in enumerate(specs)}
    if sum(map(len, data.values())) > MAX_SECRET_BYTES:
        raise EngineError(f"one Secret cannot hold {len(specs)} workers: launch fewer, then call grow")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": batch,
            "ownerReferences": [
                {
                    "apiVersion": owner["apiVersion"],
                    "kind": owner["kind"],
                    "name": owner["metadata"]["name"],
                    "uid": owner["metadata"]["uid"],
                }
            ],
        },
        "type": "Opaque",
        "data": data,
    }


def job(
    batch: str, size: int, labels: Mapping[str, str], *, container: Mapping[str, Any], pod: Mapping[str, Any]
) -> dict[str, Any]:
    """An indexed Job; ``container`` and ``pod``, the user's, win over the defaults here."""
    labels = {**labels, BATCH_LABEL: batch}
    worker = {
        "name": CONTAINER,
        # The others dial a worker at its pod's address, however the worker reaches the driver.
        "env": [{"name": "FARCALL_ADVERTISE", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "volumeMounts": [{"name": "specs", "mountPath": _FOLDER, "readOnly": True}],
        **container,
        "command": ["sh", "-c", _SCRIPT, "sh", *container["command"]],
    }
    inside = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # The worker is its container's first process, which SIGTERM does not end.
        "terminationGracePeriodSeconds": _ENDING_S,
        **pod,
        "containers": [worker, *pod.get("containers", ())],
        "volumes": [{"name": "specs", "secret": {"secretName": batch, "defaultMode": 0o440}}, *pod.get("volumes", ())],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": batch, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": size,
            "parallelism": size,
            "backoffLimitPerIndex": 0,
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {"metadata": {"labels": labels}, "spec": inside},
        },
    }


def job_set(of: Mapping[str, Any]) -> dict[str, Any]:
    """A JobSet of this one Job."""
    spec = {name: value for name, value in of["spec"].items() if name != "ttlSecondsAfterFinished"}
    return {
        "apiVersion": JOB_SET_VERSION,
        "kind": "JobSet",
        "metadata": of["metadata"],
        "spec": {
            "ttlSecondsAfterFinished": KEPT_S,
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": spec}}],
        },
    }


def index_of(pod: Mapping[str, Any]) -> tuple[str, int]:
    """Batch and index of the worker in a pod."""
    metadata = pod["metadata"]
    return metadata["labels"][BATCH_LABEL], int(metadata["annotations"][_INDEX])


def state_of(pod: Mapping[str, Any]) -> ProcessState:
    """The state of the worker in a pod, from the pod's status."""
    status = pod.get("status", {})
    statuses = {each["name"]: each.get("state", {}) for each in status.get("containerStatuses", ())}
    state = statuses.get(CONTAINER, {})
    if "terminated" in state:
        code = int(state["terminated"]["exitCode"])
        reason = state["terminated"].get("reason", "")
        usual = ("", "Completed", "Error")
        detail = "" if reason in usual else _sentence(reason, state["terminated"].get("message"))
        return ProcessState("ended", detail, _BY_SIGNAL - code if code > _BY_SIGNAL else code)
    if status.get("phase") in ("Failed", "Succeeded"):  # without a container: evicted, or its node is gone
        return ProcessState("ended", _sentence(status.get("reason", "its pod failed"), status.get("message")))
    if "running" in state:
        return ProcessState("running", f"pod {pod['metadata']['name']} on {pod['spec'].get('nodeName', '?')}")
    waiting = state.get("waiting", {})
    if waiting:
        words = {"ContainerCreating": "its container is made, or its image pulled"}
        reason = waiting.get("reason", "waiting")
        return ProcessState("starting", words.get(reason) or _sentence(reason, waiting.get("message")))
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            reason = _sentence(condition.get("reason", "not scheduled"), condition.get("message"))
            return ProcessState("queued", f"no node for its pod: {reason}")
    return ProcessState("queued", "its pod waits for a node")


def _sentence(reason: str, message: str | None) -> str:
    return f"{reason}: {message}" if message else reason
