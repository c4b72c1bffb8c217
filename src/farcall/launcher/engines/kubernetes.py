"""Workers by Kubernetes: pods of an indexed Job, or of a JobSet where the cluster has it. `pods.py` has the manifests.

Talks to the cluster by the system's ``kubectl``, as a plain client of its API (``--raw``): its configuration has the
site's way in already (contexts, plug-ins of a cloud, the account of a pod), and no Python package is needed.

    the secret          a Secret object, then a file of the pod, which the worker reads
    output              the log of each pod, followed by a ``kubectl`` of its own
    the driver dies     its workers end: members, when it is no longer one; others, after their start timeout. The
                        cluster then removes Job and Secret by itself
    a pod is deleted,   its worker's end, with the reason that Kubernetes gives; no pod takes its place by itself
    evicted, its node
    is gone

Thread rules
- One thread at a time calls ``start`` and ``end``; another one ``close``, if ``start`` hangs.
- One thread looks at all pods once a second and tells; one for each running worker reads its log. The lock guards the
  table of lives.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from farcall.foreign_errors import is_not_found
from farcall.launcher.engine import EngineError, ProcessState, Watcher, WorkerSpec
from farcall.launcher.engines import pods

logger: logging.Logger = logging.getLogger("farcall")

LOOK_S = 1.0
ANSWER_S = 30.0
"""How long the cluster may take to answer."""
LOG_S = 5.0
"""How long the end of a log may come after the end of its pod."""
CLOSE_S = 60.0
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_READ_BYTES = 1 << 16


class Kubectl:
    """The cluster's API, through ``kubectl``."""

    def __init__(self, args: Sequence[str] = ()) -> None:
        if shutil.which("kubectl") is None:
            raise EngineError(
                'on="kubernetes" needs kubectl, which is not installed here: https://kubernetes.io/docs/tasks/tools'
            )
        self._arguments = tuple(args)

    def command(self, *words: str) -> list[str]:
        return ["kubectl", *self._arguments, *words]

    def ask(self, *words: str, given: object = None) -> str:
        """The output of ``kubectl`` with these words; raises `EngineError` with its complaint."""
        try:
            answer = subprocess.run(
                self.command(*words),
                input="" if given is None else json.dumps(given),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=ANSWER_S,
                start_new_session=True,  # Ctrl-C in the terminal is the driver's
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"the Kubernetes cluster did not answer within {ANSWER_S:.0f} s") from None
        except OSError as error:  # no memory or descriptors for a process, for a moment
            raise EngineError(f"kubectl cannot be run: {error}") from error
        if answer.returncode:
            raise EngineError(f"kubectl: {answer.stderr.strip()}")
        return answer.stdout

    def get(self, path: str) -> dict[str, Any]:
        return _object(self.ask("get", "--raw", path))

    def create(self, path: str, what: Mapping[str, Any]) -> dict[str, Any]:
        return _object(self.ask("create", "--raw", path, "-f", "-", given=what))

    def delete(self, path: str) -> None:
        """Delete an object, which may be gone already."""
        try:
            self.ask("delete", "--raw", path)
        except EngineError as error:
            if not is_not_found(str(error)):
                raise

    def namespace(self) -> str:
        """The namespace of this pod, or of kubectl's context."""
        if _OWN_NAMESPACE.exists():
            return _OWN_NAMESPACE.read_text().strip()
        try:
            return self.ask("config", "view", "--minify", "--output=jsonpath={..namespace}").strip() or "default"
        except EngineError:
            return "default"  # no context: a server by its address

    def has_job_sets(self) -> bool:
        try:
            self.get(f"/apis/{pods.JOB_SET_VERSION}")
        except EngineError:
            return False
        return True


def _object(answer: str) -> dict[str, Any]:
    """An answer of the cluster's; raises `EngineError` for something else, such as the page of a proxy."""
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EngineError(f"kubectl: the cluster's answer is no JSON object: {answer[:100]!r}")
    return found


@dataclass(eq=False)
class _Life:
    """One life of a worker. ``pod`` is its pod's name, once there is one."""

    spec: WorkerSpec
    watcher: Watcher
    place: tuple[str, int]
    state: ProcessState
    pod: str = ""
    log: threading.Thread | None = None
    ended: bool = False


class KubernetesEngine:
    """A pod for each worker, in the cluster of ``kubectl``.

    Args:
        image: has Python with torch and this version of farcall, and a shell.
        namespace: None: that of this pod, or of kubectl's context.
        resources: those of each worker: ``{"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 1}``.
        pod: more of the pod's specification, as Kubernetes names it: ``{"nodeSelector": {...}, "tolerations": [...]}``.
        python: the interpreter in the image.
        args: further options of kubectl, such as ``["--context=name"]``.
    """

    driver_host: str | None = None

    def __init__(
        self,
        *,
        image: str = "",
        namespace: str | None = None,
        resources: Mapping[str, object] | None = None,
        pod: Mapping[str, Any] | None = None,
        python: str = "python",
        args: Sequence[str] = (),
    ) -> None:
        if not image:
            raise EngineError('on="kubernetes" needs image="...": one with Python, torch and farcall')
        self._cluster = Kubectl(args)
        self._namespace = namespace or self._cluster.namespace()
        self._python = python
        self._container: dict[str, Any] = {"image": image}
        if resources:
            self._container["resources"] = {"requests": dict(resources), "limits": dict(resources)}
        self._pod = dict(pod or {})
        self._uses_job_sets = self._cluster.has_job_sets()
        self._launch = secrets.token_hex(4)
        self._batches: list[str] = []
        self._lock = threading.Lock()
        self._lives: dict[WorkerSpec, _Life] = {}
        self._unwanted: set[tuple[str, int]] = set()
        """Batch and index of workers that were ended before they had a pod. Used by the thread alone."""
        self._closing = False
        self._give_up_at = math.inf
        self._thread: threading.Thread | None = None

    def start(self, specs: Sequence[WorkerSpec], watcher: Watcher) -> None:
        if self._closing:
            raise EngineError("this engine was closed; make a new one")
        batch = f"farcall-{self._launch}-{len(self._batches)}"
        container = {**self._container, "command": [self._python, *specs[0].command[1:]]}
        labels = {pods.LAUNCH_LABEL: self._launch}
        what = pods.job(batch, len(specs), labels, container=container, pod=self._pod)
        self._batches.append(batch)
        owner = self._cluster.create(self._jobs(), pods.job_set(what) if self._uses_job_sets else what)
        # Pods wait for the Secret, and the Secret needs its owner's number.
        try:
            self._cluster.create(f"/api/v1/namespaces/{self._namespace}/secrets", pods.secret(batch, specs, owner))
            if self._closing:  # `close` may have deleted this batch before there was one
                raise EngineError("this engine was closed meanwhile")
        except EngineError:
            self._delete(batch)
            raise
        first = ProcessState("queued", "Kubernetes has made no pod for it yet")
        for index, spec in enumerate(specs):
            watcher.on_state(spec, first)
            with self._lock:
                self._lives[spec] = _Life(spec, watcher, (batch, index), first, ended=self._closing)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="farcall-kubernetes", daemon=True)
            self._thread.start()

    def end(self, specs: Sequence[WorkerSpec]) -> None:
        with self._lock:
            for spec in specs:
                if spec in self._lives:
                    self._lives[spec].ended = True  # the thread deletes its pod

    def close(self) -> None:
        with self._lock:
            self._closing = True
            left = list(self._lives)
        self.end(left)
        self._give_up_at = monotonic() + CLOSE_S + ANSWER_S
        for batch in self._batches:
            try:
                self._delete(batch)
            except EngineError as error:
                logger.warning("the Job %s stays until its workers have ended: %s", batch, error)
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                what = f"kubectl --namespace {self._namespace} get pods --selector {pods.LAUNCH_LABEL}={self._launch}"
                raise EngineError(f"pods still exist after {CLOSE_S:.0f} s: {what}")
            self._thread = None

    def _delete(self, batch: str) -> None:
        self._cluster.delete(f"{self._jobs()}/{batch}?propagationPolicy=Background")

    def _jobs(self) -> str:
        group, kind = (pods.JOB_SET_VERSION, "jobsets") if self._uses_job_sets else ("batch/v1", "jobs")
        return f"/apis/{group}/namespaces/{self._namespace}/{kind}"

    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods"

    def _watch(self) -> None:
        """The thread: look at the pods, and tell their changes."""
        while True:
            with self._lock:
                lives = list(self._lives.values())
            try:
                found = self._find_pods()
            except EngineError as error:
                for life in lives:
                    life.watcher.on_state(life.spec, ProcessState(life.state.phase, str(error)))
            else:
                ends = [(life, end) for life in lives if (end := self._look(life, found.pop(life.place, None)))]
                self._tell_ends(ends)
                # The other pods may belong to workers that are being started at this moment.
                for place in self._unwanted.intersection(found):
                    self._delete_pod(found[place][0])
                if self._closing and not self._lives:
                    return
            if monotonic() > self._give_up_at:
                return  # `close` has reported it
            sleep(LOOK_S)

    def _find_pods(self) -> dict[tuple[str, int], tuple[str, ProcessState]]:
        """The name of each pod, and the state of its worker, by batch and index; raises `EngineError`."""
        answer = self._cluster.get(f"{self._pods()}?labelSelector={pods.LAUNCH_LABEL}%3D{self._launch}")
        try:
            return {pods.index_of(pod): (pod["metadata"]["name"], pods.state_of(pod)) for pod in answer["items"]}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"the cluster's list of pods cannot be read: {error!r}") from error

    def _look(self, life: _Life, found: tuple[str, ProcessState] | None) -> ProcessState | None:
        """Look at a worker's pod, if there is one; return how the worker has ended, if it has."""
        if found is None:
            if not life.pod and life.ended:
                self._unwanted.add(life.place)
            if life.pod or life.ended:
                return ProcessState("ended", "its pod was deleted" if life.pod else "it had no pod yet")
            return None
        life.pod, state = found
        if state.phase in ("running", "ended") and life.log is None:
            life.log = threading.Thread(target=self._follow, args=(life,), name="farcall-pod-log", daemon=True)
            life.log.start()
        if state.phase == "ended":
            return state
        if life.ended:
            self._delete_pod(life.pod)
        elif state != life.state:
            life.state = state
            life.watcher.on_state(life.spec, state)
        return None

    def _tell_ends(self, ends: Sequence[tuple[_Life, ProcessState]]) -> None:
        """Tell each end behind the worker's output; all logs together have LOG_S to end."""
        until = monotonic() + LOG_S
        for life, state in ends:
            if life.log is not None:
                life.log.join(max(0.0, until - monotonic()))
            with self._lock:
                del self._lives[life.spec]
            life.watcher.on_state(life.spec, state)

    def _delete_pod(self, name: str) -> None:
        try:
            self._cluster.delete(f"{self._pods()}/{name}")
        except EngineError:
            pass  # the next look tries again

    def _follow(self, life: _Life) -> None:
        path = f"{self._pods()}/{life.pod}/log?container={pods.CONTAINER}&follow=true"
        with subprocess.Popen(
            self._cluster.command("get", "--raw", path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        ) as reading:
            assert reading.stdout is not None
            while data := reading.stdout.read(_READ_BYTES):
                life.watcher.on_output(life.spec, data)
