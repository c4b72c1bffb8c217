"""As much of a Kubernetes cluster's API as the engine uses, over HTTP, in this process. **It is no cluster.**

It takes Jobs, JobSets and Secrets, checks them against the published schemas where `kubernetes-validate` is installed,
and makes of each index of a Job a pod whose container is a process of this machine. What a real cluster would refuse
beyond its schemas, and how long it would take, this does not tell.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kit.rigs.programs import found_or_skip

from farcall.launcher.engines.pods import BATCH_LABEL

MOUNTED = "/run/farcall"


@dataclass
class Pod:
    """A process in the place of a container. What a test sets in ``status`` is told until the pod runs."""

    manifest: dict[str, Any]
    batch: str
    index: int
    log: Path
    status: dict[str, Any] = field(default_factory=lambda: {"phase": "Pending"})
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        name: str = self.manifest["metadata"]["name"]
        return name

    def as_told(self) -> dict[str, Any]:
        status = self.status
        if self.process is not None:
            code = self.process.poll()
            state = {"running": {}} if code is None else {"terminated": {"exitCode": code if code >= 0 else 128 - code}}
            phase = "Running" if code is None else "Failed" if code else "Succeeded"
            status = {"phase": phase, "containerStatuses": [{"name": "worker", "state": state}]}
        return {**self.manifest, "status": status}

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)


class KubernetesRig:
    """What the cluster has, and its kubelet. The lock guards it: each request has a thread."""

    def __init__(self, folder: Path, *, has_job_sets: bool, starts_pods: bool) -> None:
        self.folder = folder
        self.has_job_sets = has_job_sets
        self.starts_pods = starts_pods
        self.lock = threading.RLock()
        self.jobs: dict[str, dict[str, Any]] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, Pod] = {}
        self.port = 0
        self.hidden: set[int] = set()
        """Indices whose pods are not listed: the cluster has made none for them yet."""
        self.looks = 0
        """How often pods were listed."""
        self.odd_answers: list[bytes] = []
        """What the next looks get, each its own, instead of the list of pods."""
        self.follows_for_ever = False
        """Do logs never end?"""
        self.before_secrets: Callable[[], object] = lambda: None

    @property
    def args(self) -> list[str]:
        return [f"--server=http://127.0.0.1:{self.port}"]

    def create(self, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        if kind == "secrets":
            self.before_secrets()
        name = given["metadata"]["name"]
        made = {**given, "metadata": {**given["metadata"], "uid": str(uuid.uuid4())}}
        with self.lock:
            if kind == "secrets":
                self._check(given)
                assert given["metadata"]["ownerReferences"][0]["uid"] == self.jobs[name]["metadata"]["uid"]
                self.secrets[name] = made
            else:
                assert self.has_job_sets == (kind == "jobsets")
                self.jobs[name] = made
                job = given if kind == "jobs" else given["spec"]["replicatedJobs"][0]["template"]
                self._check({**given, "apiVersion": "batch/v1", "kind": "Job", "spec": job["spec"]})
                self._make_pods(name, job["spec"])
            for pod in self.pods.values():
                self._run(pod)
        return made

    def delete(self, kind: str, name: str) -> bool:
        with self.lock:
            if kind == "pods":
                pod = self.pods.pop(name, None)
                if pod is not None:
                    pod.kill()
                return pod is not None
            for pod in [pod for pod in self.pods.values() if pod.batch == name]:
                self.delete("pods", pod.name)
            self.secrets.pop(name, None)  # it belongs to the job
            return self.jobs.pop(name, None) is not None

    def _check(self, manifest: dict[str, Any]) -> None:
        try:
            import kubernetes_validate
        except ModuleNotFoundError:
            return
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)

    def _make_pods(self, batch: str, spec: dict[str, Any]) -> None:
        for index in range(spec["completions"]):
            name = f"{batch}-{index}-{uuid.uuid4().hex[:5]}"
            metadata = {
                "name": name,
                "labels": spec["template"]["metadata"]["labels"],
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            }
            assert metadata["labels"][BATCH_LABEL] == batch
            manifest = {"metadata": metadata, "spec": {**spec["template"]["spec"], "nodeName": f"node{index}"}}
            self.pods[name] = Pod(manifest, batch, index, self.folder / f"{name}.log")

    def _run(self, pod: Pod) -> None:
        """As the kubelet does, once the Secret is there."""
        if pod.process is not None or pod.batch not in self.secrets or not self.starts_pods:
            return
        mounted = self.folder / pod.batch
        if not mounted.exists():  # once: another pod's process may be reading its file
            mounted.mkdir()
            for name, text in self.secrets[pod.batch]["data"].items():
                (mounted / name).write_bytes(base64.b64decode(text))
        [container] = pod.manifest["spec"]["containers"]
        with pod.log.open("wb") as log:
            pod.process = subprocess.Popen(
                [word.replace(MOUNTED, str(mounted)) for word in container["command"]],
                env={**os.environ, "JOB_COMPLETION_INDEX": str(pod.index), "FARCALL_ADVERTISE": "127.0.0.1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


@contextmanager
def kubernetes_api(*, has_job_sets: bool = False, starts_pods: bool = True) -> Iterator[KubernetesRig]:
    """The server answers once this is entered."""
    found_or_skip("kubernetes-client", "kubectl")
    folder = Path(tempfile.mkdtemp(prefix="kubernetes-"))
    rig = KubernetesRig(folder, has_job_sets=has_job_sets, starts_pods=starts_pods)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"rig": rig}))
    rig.port = server.server_address[1]
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield rig
    finally:
        for pod in list(rig.pods.values()):
            pod.kill()
        server.shutdown()
        serving.join()
        server.server_close()
        shutil.rmtree(folder)


class _Handler(BaseHTTPRequestHandler):
    rig: KubernetesRig

    def do_GET(self) -> None:
        kind, name, rest = self._parts()
        if kind == "pods" and rest == "log":
            self._follow(self.rig.pods[name])
        elif kind == "pods":
            [selector] = parse_qs(urlsplit(self.path).query)["labelSelector"]
            label, _, wanted = selector.partition("=")
            with self.rig.lock:
                self.rig.looks += 1
                odd = self.rig.odd_answers.pop(0) if self.rig.odd_answers else b""
                pods = [pod.as_told() for pod in self.rig.pods.values() if pod.index not in self.rig.hidden]
            self._answer(odd or {"items": [pod for pod in pods if pod["metadata"]["labels"][label] == wanted]})
        elif self.path.startswith("/version"):
            self._answer({"major": "1", "minor": "29", "gitVersion": "v1.29.0"})
        elif self.path.startswith("/apis/jobset") and self.rig.has_job_sets:
            self._answer({"kind": "APIResourceList"})
        else:
            self._refuse()

    def do_POST(self) -> None:
        kind, _, _ = self._parts()
        given = json.loads(self._body())
        if given["kind"] == "SelfSubjectAccessReview":
            asked = given["spec"]["resourceAttributes"]
            may = (asked["verb"], asked["resource"]) != ("delete", "pods")
            self._answer({**given, "status": {"allowed": may}}, 201)
            return
        try:
            self._answer(self.rig.create(kind, given), 201)
        except Exception as error:
            self._refuse(422, f"Invalid: {error}")

    def do_DELETE(self) -> None:
        kind, name, _ = self._parts()
        if self.rig.delete(kind, name):
            self._answer({"kind": "Status", "status": "Success"})
        else:
            self._refuse()

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):  # in chunks, as kubectl does
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def _parts(self) -> tuple[str, str, str]:
        """Kind, name and what follows, of /api/v1/namespaces/NAMESPACE/KIND/NAME/..."""
        parts = urlsplit(self.path).path.partition("/namespaces/")[2].split("/")[1:]
        kind, name, rest = [*parts, "", "", ""][:3]
        return kind, name, rest

    def _follow(self, pod: Pod) -> None:
        self.send_response(200)
        self.end_headers()
        with pod.log.open("rb") as log:
            while True:
                is_over = pod.process is not None and pod.process.poll() is not None
                data = log.read()
                if data:
                    self.wfile.write(data)
                    self.wfile.flush()
                elif is_over and not self.rig.follows_for_ever:
                    return
                else:
                    threading.Event().wait(0.05)

    def _answer(self, what: dict[str, Any] | bytes, status: int = 200) -> None:
        body = what if isinstance(what, bytes) else json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int = 404, why: str = "not found") -> None:
        reason = "NotFound" if status == 404 else "Invalid"
        answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status}
        self._answer({**answer, "message": why}, status)

    def log_message(self, *_: object) -> None:
        pass
