"""The search for the part of a value that cannot be pickled.

Runs after an encoding failed, so that the error can name a place and a type, which pickle's own message lacks. It
pickles each part again and discards the bytes. Tensors and registered classes are left out, since their reducers may
have side effects. It decides nothing and never raises.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch

from farcall.made import made
from farcall.serialize.policy import REDUCERS

_DEEPEST = 12
_MOST_PARTS = 10_000


def find_culprit(value: Any, is_request: bool = False) -> tuple[str, type]:
    """Return where in ``value`` the innermost unpicklable part is, as text, and its type.

    ``is_request``: ``value`` is a call's function and arguments; its parts get the names that the caller knows.
    """
    path = ""
    try:
        names = _names_in_request(value) if is_request else {}
        for _ in range(_DEEPEST):
            for label, part in _parts(value):
                if not _is_fine(part):
                    path += label
                    value = part
                    break
            else:
                break
        for prefix, name in names.items():
            if path.startswith(prefix):
                return name + path.removeprefix(prefix), type(value)
        return f"the value at {path}" if path else "the value", type(value)
    except Exception:
        # The user's own code runs in here (reductions, reprs of keys). If it fails, report less; never a second error.
        return "the value", type(value)


def _names_in_request(value: Any) -> dict[str, str]:
    """The caller's names for the parts of a request (`rpc/call.py`, `rpc/method_calls.py`)."""
    if not isinstance(value, tuple) or not isinstance(value[-2], tuple):
        return {}  # the output of a pickler that the user installed
    if len(value) == 3:
        return {"[0]": "func", "[1]": "args", "[2]": "kwargs"}
    first = value[0]
    of_method = len(first) == 4 and isinstance(first[0], int) and isinstance(first[2], tuple) and value[1] is None
    return {"[0][2]": "args", "[0][3]": "kwargs"} if of_method else {"[0]": "args", "[1]": "kwargs"}


def find_in_code(code: Any, is_fine: Callable[[Any], bool]) -> tuple[str, type] | None:
    """Where in a function or class by value the part is that cannot be pickled, as text, and its type; None: unknown.

    ``is_fine(part)`` tries one. Looks at what the code names first, then at the functions and classes among that.
    """
    from farcall.serialize.units import globals_of, is_by_value

    def program_s(part: Any) -> Any:
        """The program's function, of which farcall made ``part``; else ``part``."""
        how = made(part) if isinstance(part, FunctionType) else None
        return part if how is None else how.arguments[0]

    def parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(owner, type):
            for name, value in list(vars(owner).items()):
                if name not in ("__dict__", "__weakref__"):
                    yield f"attribute {name}", getattr(value, "__func__", getattr(value, "fget", None)) or value
            yield from ((f"base {base.__qualname__}", base) for base in owner.__bases__)
            return
        for name in globals_of(owner.__code__)[0]:
            if name in owner.__globals__:
                yield f"global {name}", owner.__globals__[name]
        for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty one
                yield f"closure's variable {name}", cell.cell_contents
        yield from (("default", value) for value in owner.__defaults__ or ())
        for what, values in (("default", owner.__kwdefaults__ or {}), ("attribute", owner.__dict__)):
            yield from ((f"{what} {name}", value) for name, value in list(values.items()))

    try:
        code = program_s(code)
        seen, owners = {id(code)}, [code]
        for owner in owners:
            for label, part in parts_of(owner):
                part = program_s(part)
                if isinstance(part, FunctionType | type) and is_by_value(part):
                    if id(part) not in seen:
                        seen.add(id(part))
                        owners.append(part)
                elif not is_fine(part):
                    call = "" if isinstance(owner, type) else "()"
                    whose = f"its {label}" if owner is code else f"the {label} of {owner.__qualname__}{call}"
                    return whose, type(part)
    except Exception:
        pass  # as above
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple | set | frozenset):
        for index, part in enumerate(value):
            if index == _MOST_PARTS:
                return
            yield f"[{index}]", part
    elif isinstance(value, dict):
        for key, part in list(value.items())[:_MOST_PARTS]:
            yield f"[{key!r:.40}]", part
            yield f".keys()[{key!r:.40}]", key
    elif type(value) not in REDUCERS and not isinstance(value, type | torch.futures.Future):
        for name, part in list(getattr(value, "__dict__", {}).items())[:_MOST_PARTS]:
            yield f".{name}", part


class _Nowhere:
    def write(self, data: Any) -> None:
        """Forget ``data``."""


class _Trial(pickle.Pickler):
    def __init__(self) -> None:
        super().__init__(_Nowhere(), 5, buffer_callback=lambda buffer: None)

    def reducer_override(self, value: Any) -> Any:
        if type(value) in REDUCERS:
            if getattr(value, "is_cpu", True) or getattr(value, "is_meta", False):
                return int, ()
            raise pickle.PicklingError("not on the CPU")
        return NotImplemented


def _is_fine(value: Any) -> bool:
    try:
        _Trial().dump(value)
    except Exception:
        return False
    return True
