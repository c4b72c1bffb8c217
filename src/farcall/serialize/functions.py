"""The function segment of a call: from a function to the bytes that name it, and back.

Owns the set of callables that have names: module-level functions, classes, static and class methods, builtins,
torch operators and TorchScript functions. For every other callable (bound methods, ``functools.partial``, objects,
code sent by value, see ``code.py``) `encode_function` returns None, and it travels with the arguments. It does not
know how arguments are written.

    "p" module NUL dotted.name    a path to be walked
    "o" namespace.operator[.overload]
    "b" the same, of a function of torch's that was matched to its arguments (rpc/schemas.py)
    "s" qualified name of a TorchScript function
    "k" pickle                    builtins whose path pickle knows and we do not
    "v" digest module NUL dotted.name    a function by value: its unit (units.py), and the name that it has at home

Invariant: the caller sends a name only if it leads to that very function here, and the callee looks it up anew for
every call, so both sides see re-binding at once.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
import threading
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from farcall.errors import FunctionNotFound, SerializationError
from farcall.imports import current_frames
from farcall.protocol.frames import MAX_FUNCTION_BYTES
from farcall.serialize import code, policy
from farcall.serialize.allowance import INSTALLED, loads
from farcall.serialize.rebuild import find_operator, find_script_function

BY_VALUE = b"v"
DIGEST_BYTES = 32
_MOST_CACHED = 4096
_missing = object()

# id -> (function, module name, first attribute, further attributes, bytes).
# The entry keeps the function alive, so that no other object can get its id.
_written: dict[int, tuple[Any, str, str, tuple[str, ...], bytes]] = {}
_read: dict[bytes, tuple[str, str, tuple[str, ...]]] = {}
_final: dict[bytes, Any] = {}  # operators and TorchScript functions: they cannot be re-bound


def encode_function(function: Any) -> bytes | None:
    """Return the bytes that name ``function``, or None if it must be pickled with the arguments."""
    known = _written.get(id(function))
    if known is not None and known[0] is function and policy.INSTALLED.pickler is None:
        module = sys.modules.get(known[1])
        found: Any = getattr(module, known[2], _missing)
        for name in known[3]:
            found = getattr(found, name, _missing)
        if found is function:
            return known[4]
        del _written[id(function)]
    elif function.__class__ is FunctionType and code.is_available():
        # What `_encode_function` finds out too, of most functions by value: they pass here with each call.
        if function.__module__ == "__main__":
            if code.MAIN.is_alone:
                return None
        # No path leads to such a name, but perhaps the bare one does.
        elif "<" in function.__qualname__ and (
            getattr(sys.modules.get(function.__module__), function.__name__, _missing) is not function
        ):
            return None
    written = _encode_function(function)
    return None if written is None or len(written) > MAX_FUNCTION_BYTES else written


def decode_function(data: bytes | memoryview) -> Any:
    """Return the function that ``data`` names, as bound in this process right now."""
    if data.__class__ is not bytes:
        data = bytes(data)
    path = _read.get(data)
    if path is not None:
        found: Any = getattr(sys.modules.get(path[0]), path[1], _missing)
        for name in path[2]:
            found = getattr(found, name, _missing)
        if found is not _missing:
            return found
    found = _final.get(data)
    return _decode_function(data) if found is None else found


def path_of(function: bytes) -> str:
    """The part of a function segment that names it for people: a dotted path, with NUL behind the module."""
    return function[1 + (DIGEST_BYTES if function[:1] == BY_VALUE else 0) :].decode(errors="replace")


def forget_names() -> None:
    """Clear the caches: the allow-list, or the way in which functions are sent, has changed."""
    _written.clear()
    _read.clear()
    _final.clear()


def _encode_function(function: Any) -> bytes | None:
    if policy.installed_pickler() is not None or isinstance(function, functools.partial):
        return None
    if function.__class__ is not FunctionType:  # a function of a prompt passes here with each call
        if isinstance(function, torch.jit.ScriptFunction):
            return b"s" + str(function.qualified_name).encode()
        if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return b"o" + str(function).encode()
        if isinstance(function, MethodType):
            return _encode_class_method(function)
        if isinstance(function, BuiltinFunctionType) and not isinstance(function.__self__, ModuleType | type | None):
            return None
    module_name = getattr(function, "__module__", None)
    qualified_name = getattr(function, "__qualname__", None)
    if not isinstance(qualified_name, str):
        return None
    if code.is_of_session(module_name, qualified_name):
        return None
    for name in (qualified_name, getattr(function, "__name__", qualified_name)):
        if isinstance(module_name, str) and _walk(module_name, name) is function:
            return _remember(function, module_name, name)
    if isinstance(function, FunctionType | type):
        if code.is_available():
            return None
        raise _not_importable(function, str(module_name), qualified_name)
    try:
        written = pickle.dumps(function, 5)
        if pickle.loads(written) == function:
            return b"k" + written
    except Exception:
        # It has no name. Pickled with the arguments it may still travel, or fail with a better message.
        return None
    return None


def _encode_class_method(method: MethodType) -> bytes | None:
    owner = method.__self__
    if not isinstance(owner, type) or code.goes_by_value(owner):
        return None
    name = f"{owner.__qualname__}.{method.__name__}"
    # Each access makes a new bound method, equal but never identical: no caching by identity.
    if _walk(owner.__module__, name) != method:
        raise _not_importable(method, owner.__module__, name)
    return _path(owner.__module__, name)


def _remember(function: Any, module_name: str, name: str) -> bytes:
    written = _path(module_name, name)
    if len(written) > MAX_FUNCTION_BYTES:
        return written
    if len(_written) >= _MOST_CACHED:
        _written.clear()
    first, *further = name.split(".")
    _written[id(function)] = (function, module_name, first, tuple(further), written)
    return written


def _path(module_name: str, name: str) -> bytes:
    # multiprocessing gives the main script another name in the processes that it spawns.
    if module_name == "__mp_main__":
        module_name = "__main__"
    return b"p" + module_name.encode() + b"\0" + name.encode()


def _walk(module_name: str, qualified_name: str) -> Any:
    """Return the object at the path, or ``_missing``."""
    found: Any = sys.modules.get(module_name, _missing)
    for name in qualified_name.split("."):
        found = getattr(found, name, _missing)
    return found


def _not_importable(function: Any, module_name: str, name: str) -> SerializationError:
    if "<" in name:
        why = "it is a lambda or was defined inside a function"
    else:
        why = f"{module_name}.{name} is not this object (missing, re-bound or wrapped)"
    return SerializationError(f"cannot send the function {function!r} by name: {why}; {code.HINT}")


def _decode_function(data: bytes) -> Any:
    kind, name = data[:1], data[1:]
    if INSTALLED.allowance is not None:
        INSTALLED.allowance.check_function(data)
    try:
        if kind == b"p":
            return _find_path(data, name.decode())
        if kind in (b"o", b"b"):
            found = _final.get(data)
            if found is None:
                operator = find_operator(name.decode())
                found = _final[data] = _in_python(operator) if kind == b"b" else operator
            return found
        if kind == b"s":
            found = _final.get(data)
            if found is None:
                found = _final[data] = find_script_function(name.decode())
            return found
        if kind == b"k":
            return loads(name)
    except FunctionNotFound:
        raise
    except Exception as error:
        raise FunctionNotFound(
            f"the function {name.decode(errors='replace')!r} does not exist on this worker: "
            f"{type(error).__name__}: {error}"
        ) from error
    raise SerializationError(f"a function segment of unknown kind {kind!r}: do both sides run the same farcall?")


def _in_python(operator: Any) -> Any:
    """Return torch's own function for ``operator``: it finds the same overload, in half the time."""
    if not isinstance(operator, torch._ops.OpOverload):
        return operator
    name = operator._schema.name
    function = getattr(torch, name.removeprefix("aten::"), None)
    is_same: bool = torch.jit._builtins._find_builtin(function) == name  # type: ignore[no-untyped-call]
    return function if is_same and isinstance(function, BuiltinFunctionType) else operator


def _find_path(data: bytes, path: str) -> Any:
    module_name, _, qualified_name = path.partition("\0")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise FunctionNotFound(
            f"the module {module_name!r} of function {qualified_name!r} cannot be imported on this worker: "
            f"{type(error).__name__}: {error} "
            "(the RPC pickler does not serialize code: every worker must be able to import it)"
        ) from error
    found: Any = module
    for name in qualified_name.split("."):
        found = getattr(found, name, _missing)
    if found is _missing:
        raise FunctionNotFound(_why_missing(module, qualified_name))
    first, *further = qualified_name.split(".")
    if len(_read) >= _MOST_CACHED:
        _read.clear()
    _read[data] = (module_name, first, tuple(further))
    return found


def _why_missing(module: ModuleType, qualified_name: str) -> str:
    file = getattr(module, "__file__", None) or "no file"
    told = f"this worker's module {module.__name__!r} ({file}) has no {qualified_name!r}"
    line = _line_being_run(module, qualified_name.partition(".")[0])
    if line is not None:
        return f"{told} yet: it is still at line {line}. Define functions and classes before init_rpc"
    told += "; the RPC pickler does not serialize code: every worker must define or import the same functions"
    if module.__name__ != "__main__" or code.is_available():
        return told
    return (
        f"{told}. (To call functions of a notebook or a Python prompt: pip install 'farcall[notebook]' on all workers)"
    )


def _line_being_run(module: ModuleType, name: str) -> int | None:
    """Return the line that the main thread has reached in ``module``, if ``name`` may be defined below; else None."""
    frame = current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals is module.__dict__ and frame.f_code.co_name == "<module>":
            return frame.f_lineno if name in frame.f_code.co_names else None
        frame = frame.f_back
    return None
