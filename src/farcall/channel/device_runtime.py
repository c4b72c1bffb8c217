"""Copies and events by the device's own runtime: a few of its functions, called directly.

One copy by torch's operators takes 60 to 100 us of a thread that has just waited (slices, views, a dispatcher, an
iterator: cold code, on one H200), and by the runtime's function 10 to 20.

**They keep the interpreter.** Letting go of it costs more than a copy takes wherever another thread waits for it:
with one thread that sends and one that reads, 200 to 400 us for each copy. These functions return within
microseconds, but for one case: a stream that has as much outstanding as the driver takes, some 1,000 launches, takes a
copy only when the device has done some of them. Until then no thread of the process runs Python, not even the I/O one.
`copy_behind`, which may come behind work of a program that runs far ahead, therefore looks first, and lets go of
the interpreter unless the stream is done. `copy`, of small tensors, does not.

That is put up with, because
- it lasts as long as the launches at the front take, not as all of them; a member that is silent for
  less than ``suspicion_s`` is not declared dead;
- a program that is so far ahead of its device is held up at its next launch anyway (though not its other threads);
- it is not seen in time: a look says whether a stream is done, not how far behind it is, and if torch's way were taken
  for all that are not done, most answers would take the slow one.
It would last for good only where the front of the stream itself waits for this interpreter: for a Python function that
was put onto it, or a collective whose other end first wants an answer from here. None of this was measured.

Loaded is the very library that torch has loaded, CUDA's or HIP's (untested). Where it is not found, or the calling
thread is on another device than the stream, torch's own ways are to be used.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_C: Any = torch._C
_NOT_READY = 600
_ANY_TO_ANY = 4


class DeviceRuntime:
    """The library, with those functions that are used of it."""

    def __init__(self, library: ctypes.PyDLL, prefix: str, letting_go: ctypes.CDLL) -> None:
        """``letting_go`` is the same library, whose functions run without the interpreter."""
        self._keeping = _submissions(library, prefix)
        self._letting_go = _submissions(letting_go, prefix)
        self._copy = self._keeping[1]
        self._query = library[f"{prefix}StreamQuery"]
        self._query.argtypes = (ctypes.c_void_p,)
        self._forget_error = library[f"{prefix}GetLastError"]
        self._describe = library[f"{prefix}GetErrorString"]
        self._describe.restype = ctypes.c_char_p

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Put a copy of pinned or device memory, given by addresses, onto a stream."""
        code = self._copy(target, source, size, _ANY_TO_ANY, stream)
        if code:
            self._fail("copy", code)

    def copy_behind(self, event: int, target: int, source: int, size: int, stream: int) -> None:
        """The same, of any size, behind ``event``, which stands for the copy afterwards."""
        wait, copy, record = self._keeping if self.is_done(stream) else self._letting_go
        code = wait(stream, event, 0) or copy(target, source, size, _ANY_TO_ANY, stream) or record(event, stream)
        if code:
            self._fail("copy", code)

    def is_done(self, stream: int) -> bool:
        """Is all done that was put onto the stream?"""
        code = self._query(stream)
        if code == _NOT_READY:
            self._forget_error()  # or torch would take it for the error of its next kernel
            return False
        if code:
            self._fail("look at a stream", code)
        return True

    def _fail(self, what: str, code: int) -> None:
        self._forget_error()
        raise RuntimeError(f"the device could not {what}: {self._describe(code).decode()}")


def _submissions(library: ctypes.CDLL, prefix: str) -> tuple[Any, Any, Any]:
    """The functions that wait for an event, copy, and record an event."""
    wait, copy, record = (library[prefix + name] for name in ("StreamWaitEvent", "MemcpyAsync", "EventRecord"))
    wait.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    record.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return wait, copy, record


def runtime_for(stream: torch.cuda.Stream) -> DeviceRuntime | None:
    """What may be used with ``stream`` on this thread; None: nothing."""
    # To the library the default stream is that of whichever device the thread is on.
    return _loaded() if _C._cuda_getDevice() == stream.device_index else None


@cache
def _loaded() -> DeviceRuntime | None:
    if torch.version.hip is not None:
        name, prefix = "libamdhip64.so", "hip"
    elif torch.version.cuda is not None:
        name, prefix = f"libcudart.so.{torch.version.cuda.split('.')[0]}", "cuda"
    else:
        return None
    try:
        return DeviceRuntime(ctypes.PyDLL(name), prefix, ctypes.CDLL(name))
    except (OSError, AttributeError):
        return None
