"""The device's own runtime, with a library that only keeps a record of what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from farcall.channel import device_runtime
from farcall.channel.device_runtime import DeviceRuntime


class Function:
    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *args: Any) -> Any:
        return self.answer(*args)


class Library:
    """Answers each call with the next of ``codes``."""

    def __init__(self, codes: list[int]) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.codes = codes

    def __getitem__(self, name: str) -> Function:
        def answer(*args: Any) -> Any:
            self.log.append((name, *args))
            if name.endswith("GetErrorString"):
                return b"out of luck"
            return 0 if name.endswith("GetLastError") else self.codes.pop(0)

        return Function(answer)


def test_a_copy_and_a_look() -> None:
    library = Library([0, 600, 0])
    own = DeviceRuntime(library, "hip", Library([]))  # type: ignore[arg-type]
    own.copy(10, 20, 30, 40)
    assert not own.is_done(40)
    assert own.is_done(40)
    assert library.log == [
        ("hipMemcpyAsync", 10, 20, 30, 4, 40),
        ("hipStreamQuery", 40),
        ("hipGetLastError",),  # "not ready" is nobody's error
        ("hipStreamQuery", 40),
    ]


def test_what_comes_behind_work_of_the_users_lets_go_of_the_interpreter() -> None:
    keeping, letting_go = Library([0, 0, 0, 0, 600, 600]), Library([0, 0, 0, 0, 700])
    own = DeviceRuntime(keeping, "cuda", letting_go)  # type: ignore[arg-type]
    submitted = [
        ("cudaStreamWaitEvent", 40, 50, 0),
        ("cudaMemcpyAsync", 10, 20, 30, 4, 40),
        ("cudaEventRecord", 50, 40),
    ]
    own.copy_behind(50, 10, 20, 30, 40)
    assert keeping.log == [("cudaStreamQuery", 40), *submitted]
    own.copy_behind(50, 10, 20, 30, 40)
    assert letting_go.log == submitted
    with pytest.raises(RuntimeError, match="could not copy: out of luck"):
        own.copy_behind(50, 10, 20, 30, 40)
    assert letting_go.log[3:] == submitted[:2]


@pytest.mark.parametrize("what", ["copy", "look"])
def test_errors_are_raised_and_do_not_stay(what: str) -> None:
    library = Library([700])
    own = DeviceRuntime(library, "cuda", Library([]))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="out of luck"):
        own.copy(1, 2, 3, 4) if what == "copy" else own.is_done(4)
    assert ("cudaGetLastError",) in library.log


def test_without_the_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.0")
    monkeypatch.setattr(torch.version, "hip", None)
    assert device_runtime.loaded_runtime.__wrapped__() is None


def test_it_is_used_only_on_the_streams_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        device_index = 1

    class Inner:
        device = 1

        def _cuda_getDevice(self) -> int:
            return self.device

    inner = Inner()
    own = object()
    monkeypatch.setattr(device_runtime, "_C", inner)
    monkeypatch.setattr(device_runtime, "loaded_runtime", lambda: own)
    assert device_runtime.runtime_for(Stream()) is own  # type: ignore[arg-type]
    inner.device = 0
    assert device_runtime.runtime_for(Stream()) is None  # type: ignore[arg-type]


def test_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    def enter(device: int) -> Any:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", enter)
    library, letting_go = Library([]), Library([0, 1, 0, 1])
    own = DeviceRuntime(library, "cuda", letting_go)  # type: ignore[arg-type]
    assert own.pin(10, 20, 3, writable=True)
    assert not own.pin(30, 40, 4, writable=False)
    own.unpin(10, 3)
    own.unpin(30, 4)
    assert entered == [3, 4, 3, 4]
    assert letting_go.log == [
        ("cudaHostRegister", 10, 20, 1),
        ("cudaHostRegister", 30, 40, 9),
        ("cudaHostUnregister", 10),
        ("cudaHostUnregister", 30),
    ]
    assert library.log == [("cudaGetLastError",)] * 2, "or torch would take it for an error of its own"
