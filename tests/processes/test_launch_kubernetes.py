"""Workers by the API of Kubernetes, which a small server in this process plays: no cluster was used."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from tests.kit.launched import check_launch
from tests.kit.launching import driver, wait_gone
from tests.kit.rigs.kubernetes import KubernetesRig, kubernetes_api
from tests.kit.waiting import wait_until

from farcall.launcher.engine import EngineError
from farcall.launcher.engines import kubernetes
from farcall.launcher.engines.kubernetes import KubernetesEngine

pytestmark = pytest.mark.timeout(600)


def engine_for(rig: KubernetesRig, **options: object) -> KubernetesEngine:
    return KubernetesEngine(image="farcall:test", namespace="team", python=sys.executable, args=rig.args, **options)


def test_launch() -> None:
    with kubernetes_api() as rig:
        check_launch("kubernetes", image="farcall:test", namespace="team", python=sys.executable, args=rig.args)
        assert not rig.pods


@pytest.mark.parametrize("has_job_sets", [False, True], ids=["Job", "JobSet"])
def test_workers_are_killed_and_started_again(tmp_path: Path, has_job_sets: bool) -> None:
    with kubernetes_api(has_job_sets=has_job_sets) as rig, driver(tmp_path) as launched:
        engine = engine_for(rig, resources={"cpu": "1"})
        try:
            specs = launched.start(engine, 2)
            assert [job["kind"] for job in rig.jobs.values()] == ["JobSet" if has_job_sets else "Job"]
            assert launched.secret not in str([pod.manifest for pod in rig.pods.values()])
            launched.node["worker0"].call(os.write, 1, b"written by worker0\n")
            wait_until(lambda: b"written by worker0" in launched.watching.output[specs[0]], "the log was followed")
            first, second = launched.process_ids(specs)
            os.kill(second, signal.SIGKILL)
            assert launched.wait_ended(specs[1]).exit_code == -signal.SIGKILL
            again = launched.spec(1, life=1)
            engine.start([again], launched.watching)
            launched.wait_joined([again])
            (third,) = launched.process_ids([again])
            engine.end([again])
            assert "its pod was deleted" in str(launched.wait_ended(again))
            wait_gone([third])
        finally:
            engine.close()
        wait_gone([first])
        assert not rig.jobs
        assert not rig.secrets
        assert not rig.pods


def test_pods_come_before_their_workers_are_known(tmp_path: Path) -> None:
    """A look at the cluster while workers are being started leaves their pods alone."""
    with kubernetes_api() as rig, driver(tmp_path) as launched:
        engine = engine_for(rig)
        try:
            launched.start(engine, 1)  # the engine looks from now on
            looks = rig.looks
            rig.before_secrets = lambda: wait_until(lambda: rig.looks > looks + 2, "the engine has looked")
            spec = launched.spec(1)
            engine.start([spec], launched.watching)
            launched.wait_joined([spec])
        finally:
            engine.close()


def test_a_worker_that_was_ended_before_it_had_a_pod_gets_none(tmp_path: Path) -> None:
    with kubernetes_api(starts_pods=False) as rig, driver(tmp_path) as launched:
        engine = engine_for(rig)
        rig.hidden.add(1)
        try:
            first, second = launched.spec(0), launched.spec(1)
            engine.start([first, second], launched.watching)
            engine.end([second])
            assert launched.wait_ended(second).detail == "it had no pod yet"
            rig.hidden.clear()
            wait_until(lambda: len(rig.pods) == 1, "its pod was deleted")
            [left] = rig.pods.values()
            assert left.index == 0
        finally:
            engine.close()


def test_workers_end_when_their_driver_has_left(tmp_path: Path) -> None:
    """Nothing of the engine's ends them: they see it themselves."""
    with kubernetes_api() as rig:
        with driver(tmp_path) as launched:
            engine = engine_for(rig)
            processes = launched.process_ids(launched.start(engine, 2))
        wait_gone(processes)
        engine.close()


def test_what_the_cluster_says_of_a_pod_is_told(tmp_path: Path) -> None:
    with kubernetes_api(starts_pods=False) as rig, driver(tmp_path) as launched:
        engine = engine_for(rig)
        try:
            spec = launched.spec(0)
            engine.start([spec], launched.watching)
            [pod] = rig.pods.values()
            waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
            pod.status = {"phase": "Pending", "containerStatuses": [{"name": "worker", "state": waiting}]}
            states = launched.watching.states[spec]
            wait_until(lambda: states[-1].detail == "ErrImagePull: no such image", "the image's trouble is told")
        finally:
            engine.close()
        assert launched.watching.is_over(spec)


def test_answers_that_make_no_sense_are_told_and_the_engine_looks_again(tmp_path: Path) -> None:
    with kubernetes_api(starts_pods=False) as rig, driver(tmp_path) as launched:
        engine = engine_for(rig)
        try:
            spec = launched.spec(0)
            engine.start([spec], launched.watching)
            states = launched.watching.states[spec]
            for odd in (b"<html>502 Bad Gateway</html>", b"[]", b'{"kind": "Status"}', b'{"items": [{"metadata": 1}]}'):
                told = len(states)
                rig.odd_answers.append(odd)
                wait_until(lambda told=told: len(states) > told and "cluster's" in states[-1].detail, str(odd))
            [pod] = rig.pods.values()
            terminated = {"terminated": {"exitCode": 3}}
            pod.status = {"phase": "Failed", "containerStatuses": [{"name": "worker", "state": terminated}]}
            assert launched.wait_ended(spec).exit_code == 3
        finally:
            engine.close()


def test_logs_that_never_end_delay_the_ends_of_all_workers_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(kubernetes, "LOG_S", 1.0)
    join = threading.Thread.join

    def noted(self: threading.Thread, timeout: float | None = None) -> None:
        if self.name == "farcall-pod-log":
            waited.append(timeout or 0.0)
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", noted)
    with kubernetes_api() as rig, driver(tmp_path) as launched:
        rig.follows_for_ever = True
        engine = engine_for(rig)
        try:
            specs = launched.start(engine, 3)
            with rig.lock:  # all end between two looks
                for process in launched.process_ids(specs):
                    os.kill(process, signal.SIGKILL)
                for pod in rig.pods.values():
                    assert pod.process is not None
                    pod.process.wait()
            for spec in specs:
                assert launched.wait_ended(spec).exit_code == -signal.SIGKILL
        finally:
            rig.follows_for_ever = False
            engine.close()
    assert len(waited) == 3
    assert sum(waited) < 2.0


def test_what_the_cluster_refuses_is_raised(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes_validate", reason="needs the schemas: pip install kubernetes-validate")
    with kubernetes_api() as rig, driver(tmp_path) as launched:
        engine = engine_for(rig, pod={"nodeSelector": "not a mapping"})
        with pytest.raises(EngineError, match="Invalid"):
            engine.start([launched.spec(0)], launched.watching)
        engine.close()
