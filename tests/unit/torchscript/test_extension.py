"""Where the extension is kept, and what is said where it cannot be built."""

from __future__ import annotations

import shutil
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

    monkeypatch.setattr(extension, "_compile", fail)
    for _ in range(3):
        with pytest.raises(RpcError, match="it failed"):
            extension.load()
    assert len(attempts) == 1


def test_it_is_built_once_and_only_what_was_completed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def pretend(directory: Path) -> None:
        built.append(directory)
        (directory / "farcall_torchscript.so").touch()
        if len(built) == 1:
            raise KeyboardInterrupt  # killed, and the file is there

    monkeypatch.setattr(extension, "_compile", pretend)
    with pytest.raises(KeyboardInterrupt):
        extension.build()
    for _ in range(2):
        assert extension.build().is_relative_to(tmp_path / "torchscript")
    assert len(built) == 2


def test_another_torch_has_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    here = extension._directory()
    monkeypatch.setattr("torch.__version__", "99.0")
    assert extension._directory() != here
    assert "99.0" in extension._directory().name


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
