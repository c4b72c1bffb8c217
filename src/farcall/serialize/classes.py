"""Classes by value, for the units of `units.py`: what of a class is code, and what is a value.

    attributes                                                         travel
    methods, properties, classes inside, what Python itself put there  in the unit
    all others                                                         with each call, and are set anew

A peer keeps one class for all units that name it, as cloudpickle has it, and does not load a unit twice: it would miss
that a class is again what it was before its last change. So each state of a class that was ever sent has a number of
its own, which is part of the unit.

Owns that distinction, and the numbers. It does not know functions, nor units.
"""

from __future__ import annotations

import itertools
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum
from functools import cached_property
from operator import is_, itemgetter
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, NoneType, SimpleNamespace
from typing import Any, Final

import torch

from farcall.serialize import policy

ABSENT: Final = object()
_CONSTANTS: Final = (NoneType, bool, int, float, complex, str, bytes, re.Pattern, timedelta, type(Path()))
SCALARS: Final = frozenset({*_CONSTANTS, bytearray, range, torch.Size})
_CONTAINERS: Final = (tuple, list, set, frozenset)
_NAMESPACES: Final = (SimpleNamespace, Namespace)
_LIBRARIES: Final = ("dataclasses", "reprlib")
"""They make methods, with cells of their own."""
_OF_PYTHON: Final = (GetSetDescriptorType, MemberDescriptorType)
_MOST_CONSTANT_BYTES: Final = 4096
_MOST_CLASSES: Final = 1024
_MOST_DEPTH: Final = 32


class Anatomy:
    """A class at one time, without the values of its attributes."""

    __slots__ = ("_count", "_fixed", "_of_names", "number", "values")

    def __init__(self, of: type) -> None:
        names = vars(of)
        self._count: int = len(names)
        self.values: list[str] = [name for name, value in names.items() if _is_value(of, name, value)]
        """The names of the attributes that travel with each call."""
        self._fixed: dict[str, Any] = {name: value for name, value in names.items() if name not in self.values}
        # Of two names at least, so it returns tuples: Python itself puts more into every class.
        self._of_names: Callable[[Any], tuple[Any, ...]] = itemgetter(*self._fixed)
        self.number: int = next(_numbers)

    def is_of(self, one: type) -> bool:
        """Has ``one`` still the same code?"""
        names = vars(one)
        try:
            # No function of Python's in here: this is done for each call.
            return len(names) == self._count and all(map(is_, self._of_names(names), self._fixed.values()))
        except KeyError:
            return False

    def code(self, of: type) -> Iterator[Any]:
        """The classes and functions that ``of`` consists of. Raises ValueError where it cannot be taken apart."""
        yield from (type(of), *of.__bases__)
        for name, value in self._fixed.items():
            if name == "__annotations__":
                yield from (one for one in value.values() if isinstance(one, type))
            elif name == "__dataclass_fields__":
                yield from (part for field in value.values() for part in (field.type, field.default_factory))
            elif isinstance(value, FunctionType | type):
                yield value
            elif isinstance(value, staticmethod | classmethod):
                yield value.__func__
            elif isinstance(value, property):
                yield from (value.fget, value.fset, value.fdel)
            elif isinstance(value, cached_property):
                yield value.func
            elif isinstance(value, of) and isinstance(value, Enum):
                if not is_plain(value.value):
                    raise ValueError(name)
            elif not (_is_of_python(name) or isinstance(value, _OF_PYTHON) or issubclass(of, Enum)):
                raise ValueError(name)


_numbers = itertools.count()
_latest: dict[int, tuple[type, Anatomy]] = {}


def anatomy_of(one: type) -> Anatomy:
    """That of ``one`` as it is now."""
    known = _latest.get(id(one))
    if known is not None and known[1].is_of(one):
        return known[1]
    if len(_latest) >= _MOST_CLASSES:
        _latest.clear()
    anatomy = Anatomy(one)
    _latest[id(one)] = (one, anatomy)
    return anatomy


def is_current(one: type, anatomy: Anatomy) -> bool:
    """Is ``one`` as it was, and was it never sent in another state since?"""
    known = _latest.get(id(one))
    return known is not None and known[1] is anatomy and anatomy.is_of(one)


def on_sent_whole(one: type) -> None:
    """``one`` is sent as it is now, not in a unit."""
    if id(one) in _latest:
        anatomy_of(one)


def set_value(one: type, name: str, value: Any) -> None:
    """Give ``one`` the attribute that came with a call; to set it costs Python what it knew of the class."""
    before = vars(one).get(name, ABSENT)
    if value.__class__ not in _CONSTANTS or before.__class__ is not value.__class__ or before != value:
        setattr(one, name, value)


def _is_of_python(name: str) -> bool:
    return (name.startswith("__") and name.endswith("__")) or name == "_abc_impl"


def _is_value(of: type, name: str, value: Any) -> bool:
    return not _is_of_python(name) and not issubclass(of, Enum) and is_plain(value)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Is ``value`` sure to hold no code by value?"""
    kind = value.__class__
    if kind in SCALARS:
        return True
    if kind in _NAMESPACES:
        value, kind = vars(value), dict
    if kind in _CONTAINERS or kind is dict:
        if depth == _MOST_DEPTH:
            return False
        parts = (*value, *value.values()) if kind is dict else value
        # First without a function of Python's for each part: this is done for each call.
        return SCALARS.issuperset(map(type, parts)) or all(is_plain(one, depth + 1) for one in parts)
    return kind in policy.REDUCERS and not getattr(getattr(value, "dtype", None), "hasobject", False)


def is_constant(value: Any, function: FunctionType) -> bool:
    """May ``value``, which a method uses, be part of a unit: is it small, and never changed in place?"""
    kind = value.__class__
    if kind is tuple:
        return all(is_constant(one, function) for one in value)
    if kind in (str, bytes):
        return len(value) <= _MOST_CONSTANT_BYTES
    return kind in _CONSTANTS or kind.__module__ in _LIBRARIES or function.__globals__.get("__name__") in _LIBRARIES
