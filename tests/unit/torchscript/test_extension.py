"""Where the extension is kept, and what is said where it cannot be built."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farcall.errors import RpcError
from farcall.torchscript import extension


@pytest.fixture(autouse=True)
def afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_CACHE", str(tmp_path))
    monkeypatch.setattr(extension, "_loaded", None)
    monkeypatch.setattr(extension, "_failure", None)


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for attempt in (extension.load, extension.load, extension.build):
        with pytest.raises(RpcError, match=r"needs a C\+\+ compiler.*'no-such-compiler'.*farcall torchscript build"):
            attempt()


def test_what_failed_in_this_process_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def fail(directory: Path) -> None:
        attempts.append(directory)
        raise RpcError("it failed")

    monkeypatch.setattr(extension, "why_not", lambda: None)
    monkeypatch.setattr(extension, "_compile", fail)
    for _ in range(3):
        with pytest.raises(RpcError, match="it failed"):
            extension.load()
    assert len(attempts) == 1
    assert extension.failure() == "it failed"


def pretend_to_build(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Have builds take no time; where each was made."""
    built: list[Path] = []

    def pretend(directory: Path) -> Path:
        built.append(directory)
        library = directory / f"farcall_torchscript_v{len(built)}.so"
        library.write_text("complete")
        return library

    monkeypatch.setattr(extension, "why_not", lambda: None)
    monkeypatch.setattr(extension, "_compile", pretend)
    return built


def test_it_is_built_once_and_nothing_else_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = pretend_to_build(monkeypatch)
    for _ in range(2):
        library = extension.build()
        assert library.is_relative_to(tmp_path / "torchscript")
        assert library.read_text() == "complete"
    assert len(built) == 1
    assert sorted(file.name for file in library.parent.iterdir()) == ["building", "farcall_torchscript.so"]


def test_what_a_killed_build_left_is_neither_used_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    built = pretend_to_build(monkeypatch)
    left = extension._directory() / "build-abc"
    left.mkdir(parents=True)
    for name in ("farcall_torchscript.so", "lock"):
        (left / name).write_text("half")
    assert extension.build().read_text() == "complete"
    assert len(built) == 1
    assert built[0] != left
    assert not left.exists()


def test_who_finds_it_needs_no_compiler_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_build(monkeypatch)
    library = extension.build()
    monkeypatch.undo()
    monkeypatch.setenv("FARCALL_CACHE", str(library.parents[2]))
    monkeypatch.setenv("CXX", "no-such-compiler")
    (library.parent / "building").unlink()
    assert extension.build() == library
    assert [file.name for file in library.parent.iterdir()] == ["farcall_torchscript.so"]


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_build(monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FARCALL_CACHE", str(tmp_path / "file"))
    with pytest.raises(RpcError, match=r"cannot be stored in .*file.*Set FARCALL_CACHE"):
        extension.load()


def test_a_library_that_cannot_be_loaded_is_to_be_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_build(monkeypatch)
    with pytest.raises(RpcError, match=r"cannot be loaded: .*Remove .*torch-.* and run `farcall torchscript build`"):
        extension.load()


def test_one_builds_and_the_others_wait(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    built = pretend_to_build(monkeypatch)
    compile_at_once, begun, go_on = extension._compile, threading.Event(), threading.Event()

    def compile_slowly(directory: Path) -> Path:
        begun.set()
        assert go_on.wait(60)
        return compile_at_once(directory)

    def look_again(_seconds: float) -> None:
        go_on.set()  # the second one has seen that it must wait

    monkeypatch.setattr(extension, "_compile", compile_slowly)
    monkeypatch.setattr(extension, "sleep", look_again)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(extension.build)
        assert begun.wait(60)
        second = pool.submit(extension.build)
        assert first.result(60) == second.result(60)
    assert len(built) == 1
    assert f"waiting for process {os.getpid()} on " in caplog.text


def test_nobody_waits_for_a_build_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_to_build(monkeypatch)
    monkeypatch.setattr(extension, "_LONGEST_WAIT_S", 0.0)
    directory = extension._directory()
    directory.mkdir(parents=True)
    with (directory / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 7 on other")
        lock.flush()
        with pytest.raises(RpcError, match="process 7 on other has been building"):
            extension.build()


def test_a_compiler_may_be_a_command_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env no-such-compiler")
    assert "C++ compiler" not in (extension.why_not() or "")


def test_another_torch_has_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    here = extension._directory()
    monkeypatch.setattr("torch.version.git_version", "another")
    other = extension._directory()
    monkeypatch.setattr("torch.__version__", "99.0")
    assert len({here, other, extension._directory()}) == 3
    assert "99.0" in extension._directory().name


def test_it_does_not_matter_where_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    here = extension._directory()
    monkeypatch.setattr("torch.__file__", "/elsewhere/torch/__init__.py")
    assert extension._directory() == here


def test_a_ninja_that_pip_installed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = tmp_path / "bin"
    beside.mkdir()
    ninja = beside / "ninja"
    ninja.write_text("#!/bin/sh\n")
    ninja.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    extension._find_ninja()
    assert shutil.which("ninja") == str(ninja)


def test_a_build_that_kills_who_loads_it_is_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the compiler links libstdc++ statically: the first process that loaded it died of signal 11."""
    tried: list[list[str]] = []

    def run(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        if "farcall.torchscript.trial" not in command:
            return subprocess.CompletedProcess(command, 0, "", "")  # torch looks for ninja
        tried.append(command)
        return subprocess.CompletedProcess(command, -signal.SIGSEGV, "", "")

    monkeypatch.setattr(extension.subprocess, "run", run)
    monkeypatch.setenv("CXX", sys.executable)  # anything that can be found
    for _ in range(3):
        with pytest.raises(RpcError, match=r"built with '.*python.*', and .* killed by SIGSEGV. Set CXX to another"):
            extension.build()
    assert len(tried) == 1
    assert not list(extension._directory().glob("*.so"))


@pytest.mark.parametrize("which", ["library", "directory", "cache", "above", "above the link"])
def test_what_others_could_have_put_there_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: str
) -> None:
    pretend_to_build(monkeypatch)
    cache = tmp_path / "site" / "cache"
    cache.mkdir(parents=True)
    if which == "above the link":
        (tmp_path / "link").symlink_to(cache)
        cache = tmp_path / "link"
    monkeypatch.setenv("FARCALL_CACHE", str(cache))
    library = extension.build()
    above = tmp_path / "site"
    planted = {"library": library, "directory": library.parent, "cache": library.parents[2]}.get(which, above)
    before = planted.stat().st_mode
    planted.chmod(0o777)
    with pytest.raises(RpcError, match="others than you and root"):
        extension.build()
    planted.chmod(before)
    assert extension.build() == library
    if os.getuid() == 0:
        os.chown(planted, 65534, -1)
        with pytest.raises(RpcError, match="belongs to user 65534"):
            extension.build()


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_nothing_is_written_or_built_where_others_could_put_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    """In a cache that all may write to, another user made the directory first."""
    built: list[Path] = []
    monkeypatch.setattr(extension, "why_not", lambda: None)
    monkeypatch.setattr(extension, "_build_into", built.append)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    directory = extension._directory()
    directory.mkdir(parents=True)
    (directory / "building").symlink_to(precious)
    directory.chmod(mode)
    with pytest.raises(RpcError, match="others than you and root"):
        extension.build()
    assert not built
    assert precious.read_text() == "precious"
