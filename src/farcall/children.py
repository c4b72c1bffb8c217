"""Code that came by value, in the children that `multiprocessing` starts here: loaders of data, pools, executors.

Such a child imports what its parent names, and nothing leads to functions and classes of another process' script. So
the pickler of `multiprocessing` writes by value, with cloudpickle, what it cannot write by name: on the way to a child,
and, since reading does the same to the pickler there, on the way back.

    a class        is sent whole; whoever has it already, the parent above all, keeps its own, with its attributes
    a function     has the globals there that it shares here with others: what one stores, an initializer say, another
                   finds. A global keeps the value that it has first in the child, as those of modules do

Owns that pickler's hook: from the first code by value to the end of the last node, and in a child to its end. It knows
nothing of farcall's messages, and imports nothing that a child may not need.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import sys
import uuid
from functools import cache
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary

from farcall.made import made

_HOOK: Final = "reducer_override"
_SPACE: Final = "__farcall_globals__"
_missing: Final = object()


class _Space:
    """The globals of functions that came by value: the same ones in several processes, by their token."""

    __slots__ = ("__weakref__", "names", "token")

    def __init__(self, token: str, names: dict[str, Any]) -> None:
        self.token = token
        self.names = names
        names[_SPACE] = _spaces[token] = self  # as long as its functions, since a dictionary has no weak references


class _Globals(dict[str, Any]):
    """What a pickle begins the globals of a function with."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def __reduce__(self) -> Any:
        return _globals_of, (self._token, dict(self))


_spaces: WeakValueDictionary[str, _Space] = WeakValueDictionary()
_whole: WeakSet[type] = WeakSet()
"""Classes that another process has as well: they are not written to again."""
_hooked: int | None = None
"""The process that set the hook; a forked child has it as well."""


def begin() -> None:
    """Code by value is here: children can have it from now on."""
    global _hooked
    if _HOOK not in ForkingPickler.__dict__:
        setattr(ForkingPickler, _HOOK, _reduce)
        _hooked = os.getpid()


def end() -> None:
    """The opposite; not in a forked child, which is about to use such code."""
    global _hooked
    if _hooked == os.getpid():
        delattr(ForkingPickler, _HOOK)
        _hooked = None


def load(data: bytes) -> Any:
    """Load a function or class that the pickler of `multiprocessing` wrote."""
    begin()
    return pickle.loads(data)


def _reduce(pickler: ForkingPickler, value: Any) -> Any:
    kind = type(value)
    if (kind is FunctionType or issubclass(kind, type)) and not _has_name(value):
        file = io.BytesIO()
        _code_pickler()(file, 5).dump(value)
        return load, (file.getvalue(),)
    return NotImplemented


def _has_name(code: Any) -> bool:
    """Can pickle write ``code`` by name?"""
    module_name = code.__module__
    if not isinstance(module_name, str):
        return True  # pickle looks for it in all modules
    found: Any = sys.modules.get(module_name, _missing)
    if found is _missing:
        return _can_be_imported(module_name)
    for name in code.__qualname__.split("."):
        found = getattr(found, name, _missing)
    return found is code


def _can_be_imported(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):
        return False


@cache
def _code_pickler() -> Any:
    cloudpickle: Any = importlib.import_module("cloudpickle")  # it wrote that code in the first place

    class ChildPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        """cloudpickle, for one function or class and what it uses; tensors, locks and the like as in the rest."""

        def __init__(self, file: io.BytesIO, protocol: int) -> None:
            own: Any = ForkingPickler(file)
            self.dispatch_table = {**cloudpickle.CloudPickler.dispatch_table, **own.dispatch_table}
            super().__init__(file, protocol)

        def reducer_override(self, value: Any) -> Any:
            is_function = type(value) is FunctionType
            if is_function and (how := made(value)) is not None:
                return how.maker, how.arguments
            space = _space_of(value.__globals__) if is_function else None
            if space is not None:
                self.globals_ref.setdefault(id(space.names), _Globals(space.token))
            reduced = super().reducer_override(value)
            if reduced is NotImplemented or len(reduced) != 6:
                return reduced
            make, arguments, state, _, _, fill = reduced
            if not is_function:
                _whole.add(value)
            return make, arguments, (fill, state), None, None, _fill

    return ChildPickler


def _space_of(names: dict[str, Any]) -> _Space | None:
    """The space of these globals; None: they are a module's."""
    module = sys.modules.get(names.get("__name__", ""))
    if module is not None and module.__dict__ is names:
        return None
    space: _Space | None = names.get(_SPACE)
    if space is None or space.names is not names:  # of the dictionary that this one is a copy of
        space = _Space(uuid.uuid4().hex, names)
    return space


def _before_fork() -> None:
    """The child has the globals of the functions that fork it, and must know them when they are named later on."""
    frame = sys._getframe() if _hooked is not None else None
    while frame is not None:
        _space_of(frame.f_globals)
        frame = frame.f_back


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def _globals_of(token: str, begun: dict[str, Any]) -> dict[str, Any]:
    space = _spaces.get(token) or _Space(token, begun)
    return space.names


def _fill(code: Any, state: Any) -> None:
    """Give ``code`` what cloudpickle found in it, apart from what it has here."""
    fill, own = state
    if isinstance(code, FunctionType):
        names = own[1]["__globals__"]
        for name in names.keys() & code.__globals__.keys():
            del names[name]
    elif code in _whole:
        return
    fill(code, own)
    if isinstance(code, type):
        _whole.add(code)
