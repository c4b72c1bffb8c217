"""The doctor at real sites, and at a machine that has nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.rigs.kubernetes import kubernetes_api
from tests.kit.rigs.slurm import slurm_cluster
from tests.kit.rigs.ssh import ssh_server

from farcall.cli.doctor import sites
from farcall.cli.doctor.finding import Finding, exit_status
from farcall.launcher.engines.kubernetes import Kubectl

pytestmark = pytest.mark.timeout(600)


def found(findings: list[Finding], subject: str) -> Finding:
    return next(finding for finding in findings if finding.subject == subject)


@pytest.mark.parametrize("site", ["ssh", "slurm", "kubernetes"])
def test_a_machine_without_the_programs(site: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [finding] = sites.look_at_site(site)
    assert finding.state == "wrong"
    assert finding.advice


def test_ssh(tmp_path: Path) -> None:
    with ssh_server(tmp_path) as rig:
        findings = sites.look_at_ssh(["alpha", "nowhere"], ["-F", str(rig.configuration)])
    assert found(findings, "alpha").state == "ok", found(findings, "alpha")
    assert "refused" in found(findings, "nowhere").found


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    with slurm_cluster() as environment:
        monkeypatch.setenv("SLURM_CONF", environment["SLURM_CONF"])
        findings = sites.look_at_site("slurm")
    assert exit_status(findings) == 0
    assert "2 idle" in found(findings, "partition all*").found


def test_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small server plays the API: no cluster was used."""
    with kubernetes_api(has_job_sets=True) as rig:
        monkeypatch.setattr(sites, "Kubectl", lambda: Kubectl(rig.args))
        findings = sites.look_at_site("kubernetes")
        assert found(findings, "JobSet").state == "ok"
        assert "v1.29.0" in found(findings, "cluster").found
        assert [finding.found for finding in findings if finding.subject == "rights"] == ["not allowed: delete pods"]
