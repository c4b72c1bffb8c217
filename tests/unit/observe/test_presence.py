"""The files by which commands find nodes: private, and gone when their node is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from farcall.observe.observer import NothingToObserve, Observer
from farcall.observe.presence import Presence, PresenceFile, find_nodes, process_start
from farcall.options import ObservingOptions, RpcBackendOptions
from farcall.private_files import pid_namespace, runtime_directory


def presence(process_id: int | None = None, start: str | None = None, name: str = "w0", **changes: str) -> Presence:
    process_id = os.getpid() if process_id is None else process_id
    fields = {"cluster_id": "c", "key": "00", "namespace": pid_namespace(), **changes}
    start = process_start(process_id) if start is None else start
    return Presence(name, 0, fields["cluster_id"], (), fields["key"], process_id, start, fields["namespace"], 1.0)


def test_of_several_clusters_each_is_told_with_its_program_process_and_age(tmp_path: Path) -> None:
    directory = tmp_path / "farcall"
    now = time.time()
    one = msgspec.structs.replace(presence(cluster_id="1a"), started_at=now - 7210, program="train.py")
    two = msgspec.structs.replace(presence(cluster_id="2b"), started_at=now - 45, cluster_name="sweep")
    # Workers of `farcall.launch` have no program of their own; their driver is the last member.
    driver = msgspec.structs.replace(two, rank=6, name="driver", program="notes.ipynb")
    workers = [msgspec.structs.replace(two, rank=rank, name=f"worker{rank}") for rank in range(6)]
    for node in (one, *workers, driver):
        PresenceFile(directory, node)
    with pytest.raises(NothingToObserve) as raised:
        Observer.find(options=RpcBackendOptions(observing=ObservingOptions(runtime_directory=str(directory))))
    process = os.getpid()
    assert str(raised.value).splitlines() == [
        "several clusters run here: choose one with --cluster and the beginning of its id, or of a worker's name",
        f"  2b  sweep, notes.ipynb, process {process}, for 45 s: worker0, worker1, worker2, worker3 and 3 more",
        f"  1a  train.py, process {process}, for 2 h: w0",
    ]


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "farcall"
    PresenceFile(directory, presence())
    (path,) = directory.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700


def test_it_is_found_until_it_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / "farcall"
    one, other = PresenceFile(directory, presence(name="w0")), PresenceFile(directory, presence(name="w1"))
    assert {found.name for found in find_nodes(directory)} == {"w0", "w1"}
    one.remove()
    assert [found.name for found in find_nodes(directory)] == ["w1"]
    other.remove()
    other.remove()
    assert list(directory.iterdir()) == []


def test_the_file_of_a_dead_process_is_stale(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    directory = tmp_path / "farcall"
    PresenceFile(directory, presence(child.pid, start="1"))
    PresenceFile(directory, presence(child.pid, start=""))
    assert find_nodes(directory) == []
    assert list(directory.iterdir()) == []


def test_a_node_that_starts_removes_the_files_of_killed_ones(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    directory = tmp_path / "farcall"
    PresenceFile(directory, presence(name="lives"))
    (living,) = directory.iterdir()
    PresenceFile(directory, presence(child.pid, start="1", name="elsewhere", namespace=1))
    (elsewhere,) = {*directory.iterdir()} - {living}
    PresenceFile(directory, presence(child.pid, start="1", name="killed"))
    (killed,) = {*directory.iterdir()} - {living, elsewhere}
    (directory / "notes.node").write_text("no presence")
    PresenceFile(directory, presence(name="new"))
    assert not killed.exists()
    assert living.exists()
    assert elsewhere.exists()
    assert len([*directory.iterdir()]) == 4


def test_so_is_that_of_a_process_whose_number_another_has_now(tmp_path: Path) -> None:
    directory = tmp_path / "farcall"
    PresenceFile(directory, presence(start="1"))
    assert find_nodes(directory) == []


def test_of_another_container_nothing_is_known(tmp_path: Path) -> None:
    directory = tmp_path / "farcall"
    PresenceFile(directory, presence(start="1", namespace=1))
    assert len(find_nodes(directory)) == 1


def test_a_directory_that_others_may_enter_is_not_used(tmp_path: Path) -> None:
    directory = tmp_path / "farcall"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(PermissionError, match="closed to others"):
        PresenceFile(directory, presence())
    with pytest.raises(NothingToObserve, match=r"cannot look for workers.*closed to others \(chmod 700\)"):
        Observer.find(options=RpcBackendOptions(observing=ObservingOptions(runtime_directory=str(directory))))
    link = tmp_path / "link"
    link.symlink_to(directory)
    directory.chmod(0o700)
    with pytest.raises(PermissionError, match="closed to others"):
        PresenceFile(link, presence())


def test_what_is_no_presence_is_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "farcall"
    directory.mkdir(mode=0o700)
    (directory / "x.node").write_text("nonsense")
    assert find_nodes(directory) == []
    assert (directory / "x.node").exists()


def test_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert runtime_directory(str(tmp_path)) == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory() == tmp_path / "farcall"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime_directory().name == f"farcall-{os.getuid()}"
