"""Copies and events by the device's own runtime library: a few of its functions, called directly.

In a thread that has just woken up, a copy by torch's operators takes 60 to 100 us (slices, views, a dispatcher, an
iterator: cold code, on one H200); the runtime's function takes 10 to 20.

**They keep the interpreter lock.** If another thread waits for the lock, releasing it costs more than a copy: with one
sending and one reading thread, 200 to 400 us for each copy. These functions return within microseconds, with one
exception: when a stream has as many outstanding launches as the driver takes, some 1,000, the driver accepts a copy
only after the device has finished some of them. Until then no thread of the process runs Python, not even the I/O
thread. `copy_behind` may come behind a program's work that runs far ahead; so it queries the stream first, and releases
the lock unless the stream is done. `copy`, for small tensors, does not.

We accept that for `copy`, because
- the pause lasts as long as the launches at the front of the stream, not as all of them; a member that is silent for
  less than ``suspicion_s`` is not declared dead;
- a program so far ahead of its device blocks at its next launch anyway (though its other threads do not);
- it cannot be predicted: a query says whether a stream is done, not how far behind it is. If all streams that are not
  done took torch's way, most answers would take the slow one.
The pause would last for ever only if the front of the stream itself waits for this interpreter: for a Python function
that was put onto it, or a collective whose other end first needs an answer from here. None of this was measured.

The library is the very one that torch has loaded, CUDA's or HIP's (untested). If it is not found, or the calling
thread is on another device than the stream, callers use torch's functions.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_C: Any = torch._C
_NOT_READY = 600
_ANY_TO_ANY = 4
_PORTABLE, _READ_ONLY = 1, 8


class DeviceRuntime:
    """The runtime library, with the functions that farcall uses."""

    def __init__(self, library: ctypes.PyDLL, prefix: str, letting_go: ctypes.CDLL) -> None:
        """``letting_go`` is the same library, loaded so that calls release the interpreter lock."""
        self._keeping = _submissions(library, prefix)
        self._letting_go = _submissions(letting_go, prefix)
        self._copy = self._keeping[1]
        self._query = library[f"{prefix}StreamQuery"]
        self._query.argtypes = (ctypes.c_void_p,)
        self._pin, self._unpin = letting_go[f"{prefix}HostRegister"], letting_go[f"{prefix}HostUnregister"]
        self._pin.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unpin.argtypes = (ctypes.c_void_p,)
        self._forget_error = library[f"{prefix}GetLastError"]
        self._describe = library[f"{prefix}GetErrorString"]
        self._describe.restype = ctypes.c_char_p

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Put a copy between addresses of pinned or device memory onto a stream."""
        code = self._copy(target, source, size, _ANY_TO_ANY, stream)
        if code:
            self._fail("copy", code)

    def copy_behind(self, event: int, target: int, source: int, size: int, stream: int) -> None:
        """Put a copy of any size onto a stream, behind ``event``, and record ``event`` behind the copy."""
        wait, copy, record = self._keeping if self.is_done(stream) else self._letting_go
        code = wait(stream, event, 0) or copy(target, source, size, _ANY_TO_ANY, stream) or record(event, stream)
        if code:
            self._fail("copy", code)

    def is_done(self, stream: int) -> bool:
        """Has the stream finished all its work?"""
        code = self._query(stream)
        if code == _NOT_READY:
            self._forget_error()  # otherwise torch would report it as the error of its next kernel
            return False
        if code:
            self._fail("look at a stream", code)
        return True

    def pin(self, address: int, size: int, device: int, *, writable: bool) -> bool:
        """Pin host memory, so that devices copy from and to it directly; False: the driver refuses.

        The pin holds for all devices. It is made on ``device``, because the driver creates a context on the thread's
        current device, which is mostly cuda:0, even if the program does not use that.
        """
        with torch.cuda.device(device):
            code = self._pin(address, size, _PORTABLE if writable else _PORTABLE | _READ_ONLY)
            if code:
                self._forget_error()
        return not code

    def unpin(self, address: int, device: int) -> None:
        """Undo ``pin``. Call it before the memory is unmapped."""
        with torch.cuda.device(device):
            if self._unpin(address):
                self._forget_error()

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
    """The runtime, if this thread may use it with ``stream``; else None."""
    # The library takes the default stream for that of the thread's current device.
    return loaded_runtime() if _C._cuda_getDevice() == stream.device_index else None


@cache
def loaded_runtime() -> DeviceRuntime | None:
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
