"""The doctor's look at a site for `farcall.launch(on=...)`: its programs, its answers, and the place of its workers.

Where no allocation is needed for it, a process runs in the place of a worker, and shows that Python, torch and farcall
are there in the same versions. Every question has a bound.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from farcall import __version__
from farcall.cli.doctor.finding import Finding, note, ok, wrong
from farcall.launcher.engine import EngineError
from farcall.launcher.engines.kubernetes import Kubectl
from farcall.launcher.engines.pods import JOB_SET_VERSION
from farcall.launcher.engines.ssh import ssh_command

ANSWER_S = 60.0
OLDEST_KUBERNETES = (1, 29)
"""The first in which an index of a Job may fail alone (``backoffLimitPerIndex``) without being asked for."""
_VERSIONS = "import platform, torch, farcall; print(platform.python_version(), torch.__version__, farcall.__version__)"
_FAIL_AT_START = "workers there would fail at their start"


def look_at_site(on: str, hosts: Sequence[str] = ()) -> list[Finding]:
    """All findings about an engine; ``hosts`` are those of SSH."""
    return look_at_ssh(hosts) if on == "ssh" else SITES[on]()


def look_at_ssh(hosts: Sequence[str], args: Sequence[str] = ()) -> list[Finding]:
    """Does ``ssh`` get in without a password, and is the same farcall there?"""
    if shutil.which("ssh") is None:
        return [wrong("ssh", "ssh is not installed here", "apt install openssh-client")]
    findings = [ok("ssh", _said(["ssh", "-V"]).strip())]
    if not hosts:
        return [*findings, note("hosts", "none were named", "farcall doctor --on ssh HOST...")]
    for host in hosts:
        command = ssh_command(host, [sys.executable, "-c", _VERSIONS], args=args, timeout_s=ANSWER_S / 2)
        findings.append(_same_versions(host, command, f"does `ssh {host} true` work, and is {sys.executable} there?"))
    return findings


def look_at_slurm() -> list[Finding]:
    """Are Slurm's programs here, does the controller answer, and are we inside an allocation?"""
    missing = [program for program in ("srun", "salloc", "squeue", "scontrol") if shutil.which(program) is None]
    if missing:
        advice = "run this on a node of the Slurm cluster (perhaps after: module load slurm)"
        return [wrong("slurm", f"not here: {', '.join(missing)}", advice)]
    findings = [ok("slurm", _said(["srun", "--version"]).strip())]
    try:
        lines = _asked(["sinfo", "--noheader", "--format=%P|%T|%D"]).splitlines()
    except EngineError as error:
        advice = "ask the site's administrator: slurmctld does not answer"
        return [*findings, wrong("controller", str(error).splitlines()[-1], advice)]
    findings += [_partition(name, lines) for name in sorted({line.split("|")[0] for line in lines})]
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        look_inside = "to look at the nodes as well: salloc --nodes=1 farcall doctor --on slurm"
        return [*findings, note("allocation", "none: farcall.launch asks for one by salloc", look_inside)]
    findings.append(ok("allocation", f"job {job}, {os.environ.get('SLURM_JOB_NUM_NODES', '?')} nodes"))
    command = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--quiet", sys.executable, "-c", _VERSIONS]
    return [*findings, _same_versions("a node", command, f"is {sys.executable} on a file system that nodes share?")]


def _partition(name: str, lines: Sequence[str]) -> Finding:
    nodes: Counter[str] = Counter()
    for line in lines:
        partition, state, count = line.split("|")
        if partition == name:
            nodes[state] += int(count)
    words = ", ".join(f"{count} {state}" for state, count in nodes.items())
    if any(state.startswith(("idle", "mixed", "alloc", "completing")) for state in nodes):
        return ok(f"partition {name}", words)
    return note(f"partition {name}", words, "none of its nodes takes work now")


def look_at_ray() -> list[Finding]:
    """Is Ray here, does a cluster answer, and is the same farcall on each of its nodes?"""
    try:
        import ray
    except ModuleNotFoundError:
        return [wrong("ray", "not in this environment", "pip install 'farcall[ray]'")]
    findings = [ok("ray", ray.__version__)]
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        return [*findings, wrong("cluster", first_line, "ray start --head begins one; RAY_ADDRESS names another")]
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        has = ", ".join(f"{amount:g} {name}" for name, amount in _plain(ray.cluster_resources()).items())
        findings.append(ok("cluster", f"{len(nodes)} nodes: {has}"))
        return findings + [_ray_node(ray, node) for node in nodes]
    finally:
        ray.shutdown()


def _plain(resources: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if name in ("CPU", "GPU")}


def _ray_node(ray: Any, node: dict[str, Any]) -> Finding:
    subject = f"node {node['NodeID'][:8]}"

    def run_there(code: str) -> str:  # a local function travels by value: farcall may not be there
        import subprocess
        import sys

        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        return ended.stdout or ended.stderr

    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    task = ray.remote(run_there).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    try:
        return _compared(subject, ray.get(task.remote(_VERSIONS), timeout=ANSWER_S), "install farcall there")
    except ray.exceptions.RayError as error:
        return wrong(subject, str(error).strip().splitlines()[-1], "does this node of Ray's take work?")


def look_at_kubernetes() -> list[Finding]:
    """Is kubectl here, does a cluster answer, and may we do what is needed?"""
    try:
        cluster = Kubectl()
    except EngineError as error:
        return [wrong("kubectl", "not here", str(error))]
    try:
        told = cluster.get("/version")
        namespace = cluster.namespace()
    except EngineError as error:
        return [wrong("cluster", str(error), "kubectl config get-contexts shows what is configured")]
    number = (int(told["major"]), int(re.sub(r"\D", "", told["minor"])))
    findings = [ok("cluster", f"{told['gitVersion']}, namespace {namespace}")]
    if number < OLDEST_KUBERNETES:
        findings = [wrong("cluster", told["gitVersion"], "farcall.launch needs Kubernetes 1.29 or later")]
    job_sets = cluster.has_job_sets()
    if job_sets:
        findings.append(ok("JobSet", JOB_SET_VERSION))
    else:
        findings.append(note("JobSet", "not in this cluster: indexed Jobs are used", "https://jobset.sigs.k8s.io"))
    jobs = "jobsets.jobset.x-k8s.io" if job_sets else "jobs.batch"
    rights = [("create", jobs), ("delete", jobs), ("create", "secrets"), ("list", "pods"), ("delete", "pods")]
    for verb, what in (*rights, ("get", "pods/log")):
        try:
            may = cluster.ask("auth", "can-i", verb, what, f"--namespace={namespace}").strip() == "yes"
        except EngineError:
            may = False  # kubectl says no by its exit status, too
        if not may:
            findings.append(wrong("rights", f"not allowed: {verb} {what}", "docs/launching/kubernetes.md has the Role"))
    return findings


SITES: dict[str, Callable[[], list[Finding]]] = {
    "ssh": lambda: look_at_ssh(()),
    "slurm": look_at_slurm,
    "ray": look_at_ray,
    "kubernetes": look_at_kubernetes,
}


def _said(command: Sequence[str]) -> str:
    """The output of ``command``, even of one that fails."""
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=ANSWER_S
    )
    return ended.stdout


def _asked(command: Sequence[str]) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, stdin=subprocess.DEVNULL, check=True
        ).stdout
    except subprocess.TimeoutExpired:
        raise EngineError(f"{command[0]} did not answer within {ANSWER_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise EngineError(error.stderr.strip() or f"{command[0]} ended with {error.returncode}") from None


def _same_versions(subject: str, command: Sequence[str], advice: str) -> Finding:
    try:
        return _compared(subject, _asked(command), advice)
    except EngineError as error:
        return wrong(subject, str(error).splitlines()[-1], advice)


def _compared(subject: str, said: str, advice: str) -> Finding:
    """Are the versions there those of here?"""
    here = f"{platform.python_version()} {version('torch')} {__version__}"
    there = said.strip().splitlines()[-1] if said.strip() else "nothing"
    words = "Python {}, torch {}, farcall {}"
    if there == here:
        return ok(subject, words.format(*there.split()))
    if len(there.split()) != 3:
        return wrong(subject, there, f"{advice}; {_FAIL_AT_START}")
    return wrong(subject, words.format(*there.split()), f"here it is {words.format(*here.split())}: install the same")
