"""Code by value that travels once: a function, apart from the values that it uses.

A *unit* is the code of a function that no other worker can import (`code.py`), and of all such functions and classes
that it names: in globals, closures and attributes, as methods and bases, cycles once. Or it is that of such a class. A
call names the unit by the SHA-256 of its bytes. The callee asks for a unit that it does not have
(`runtime/calls/arriving_code.py`), checks the digest itself, and keeps what it has loaded.

    what those functions have                                       travels
    code, names, annotations; modules, functions and classes by     in the unit
        name, and the few immutable objects of `_is_fixed`
    the values of all other globals, cells, defaults, attributes    with each call, in front of its arguments

So no value is ever stale. `Unit.gather` walks the functions anew for each call; where a name leads elsewhere than it
did, the function is taken apart again, which makes another unit if its code has changed. A unit without
values is one function, the same at each call. Of any other, `LoadedUnit.make` makes new functions for each call, whose
globals nobody else has, as if they had been unpickled; so does a function that stores to a global.

Owns that split, of functions (of classes: `classes.py`), at both ends, and the units that this process has sent. It
does not know peers.
"""

from __future__ import annotations

import dis
import hashlib
import importlib
import importlib.util
import io
import logging
import platform
import sys
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import starmap
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import msgspec
import torch

from farcall.made import Made, made
from farcall.protocol.frames import MAX_FUNCTION_BYTES
from farcall.serialize import policy
from farcall.serialize.allowance import INSTALLED
from farcall.serialize.classes import (
    ABSENT,
    SCALARS,
    Anatomy,
    anatomy_of,
    is_constant,
    is_current,
    is_plain,
    set_value,
)
from farcall.serialize.code import goes_by_value, load_code
from farcall.serialize.functions import BY_VALUE, DIGEST_BYTES

_GLOBAL, _CELL, _ATTRIBUTE, _DEFAULTS, _KEYWORD_DEFAULTS, _OF_CLASS = range(6)
Place = tuple[int, int, Any]
"""Where a value belongs: the number of the function, or of the class, one of the above, and the global's or attribute's
name, or the number of the cell."""

_OF_MODULES: Final = ("__name__", "__package__", "__path__", "__file__")
_NAMES_A_GLOBAL: Final = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
_HIDES_GLOBALS: Final = {"globals", "exec", "eval"}
_IMMUTABLE: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_GRADIENT_MODES: Final = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode)
"""Functions that they decorate have a method of theirs in a cell, which makes such a mode for each call."""
_LOGGERS: Final = (logging.Logger, logging.RootLogger)
_MOST_UNITS: Final = 1024
_MOST_TIMES: Final = 64
"""How often a function is taken apart again before it travels whole: its names lead elsewhere at every call."""


_Code = FunctionType | type


class _Whole(Exception):
    """A function that cannot be taken apart, and travels whole with each call (`code.py`).

    Such a function names a value that could hold code by value, or a class whose methods use values that change: only
    one pickle keeps the identities of such parts.
    """


class _UnitFunction(msgspec.Struct):
    """One function of a unit, as a call must find it."""

    code: CodeType
    qualified_name: str
    annotations: dict[str, Any]
    like: int  # the number of the first function that has the same globals
    attributes: int  # how many
    has_defaults: bool
    has_keyword_defaults: bool
    fixed: list[tuple[str, Any]] = []  # globals of the unit
    callees: list[tuple[str, int]] = []  # globals that are functions of the unit
    values: list[str] = []  # globals that travel with the call
    constants: tuple[Any, Any] | None = None  # the defaults of a kept function
    parts: list[tuple[int, Any, int, Any]] = []  # cells and attributes: the place, the role, what is there


_FIXED, _CALLEE, _VALUE = range(3)


class Unit:
    """A function taken apart, at its sender. It holds no value that travels, and no function: only their code."""

    __slots__ = ("__weakref__", "_classes", "_found", "_nodes", "calls", "content", "has_values", "segment", "times")

    def __init__(self, nodes: list[_UnitFunction], content: bytes, root: _Code, walk: _Walk, times: int) -> None:
        self._nodes = nodes
        self._found: list[Any] = [None] * len(nodes)
        for number, method in walk.methods:  # their classes keep them
            self._found[number] = method
        self._classes = walk.classes
        self.content: bytes = content
        self.has_values: bool = walk.stores or bool(walk.slots)
        """Are functions made for each call? Else the unit is one function."""
        self.times: int = times
        self.calls: int = 1
        name = f"{root.__module__}\0{root.__qualname__}".encode()
        self.segment: bytes = (BY_VALUE + hashlib.sha256(content).digest() + name)[:MAX_FUNCTION_BYTES]
        """The function segment of a call."""

    def gather(self, root: _Code) -> list[Any] | None:
        """The values that ``root`` and its functions use now; None: it is not what was taken apart."""
        found = self._found.copy()
        if root.__class__ is FunctionType:
            found[0] = root
        values: list[Any] = []
        for number, node in enumerate(self._nodes):
            function = found[number]
            names = function.__globals__
            if (
                function.__code__ is not node.code
                or function.__qualname__ != node.qualified_name
                or names is not found[node.like].__globals__
                or (not function.__defaults__) is node.has_defaults
                or (not function.__kwdefaults__) is node.has_keyword_defaults
                or len(function.__dict__) != node.attributes
                or (node.annotations and function.__annotations__ != node.annotations)
            ):
                return None
            for name, fixed in node.fixed:
                if names.get(name, ABSENT) is not fixed:
                    return None
            for name, what in node.callees:
                value = names.get(name, ABSENT)
                if found[what] is None and value.__class__ is FunctionType:
                    found[what] = value  # the first function met under a number is the one
                elif found[what] is not value:
                    return None
            for name in node.values:
                values.append(names.get(name, ABSENT))
            for kind, key, role, what in node.parts:
                try:
                    value = function.__closure__[key].cell_contents if kind == _CELL else function.__dict__[key]
                except (KeyError, ValueError):
                    value = ABSENT
                if role == _VALUE:
                    values.append(value)
                elif role == _CALLEE and found[what] is None and value.__class__ is FunctionType:
                    found[what] = value
                elif value is not (what if role == _FIXED else found[what]):
                    return None
            if node.constants is not None:
                if node.constants != (function.__defaults__, function.__kwdefaults__):
                    return None
                continue
            if node.has_defaults:
                values.append(function.__defaults__)
            if node.has_keyword_defaults:
                values.append(function.__kwdefaults__)
        for one, anatomy in self._classes:
            if not is_current(one, anatomy):
                return None
            for name in anatomy.values:
                values.append(vars(one).get(name, ABSENT))
        for value in values:
            if value.__class__ not in SCALARS and not is_plain(value):
                return None
        return values


def _contents(function: FunctionType, number: int) -> Any:
    assert function.__closure__ is not None
    try:
        return function.__closure__[number].cell_contents
    except ValueError:
        return ABSENT


# ---------------------------------------------------------------------- at the sender

_Key = tuple[int, str, bool]
"""The id of a function's code, its name, and is it what the program calls? Else farcall made that of it."""
_units: dict[_Key, Unit | CodeType | type] = {}  # no Unit: they travel whole
_sent: WeakValueDictionary[bytes, Unit] = WeakValueDictionary()
_dropped: deque[Unit] = deque(maxlen=_MOST_UNITS)  # the latest: a callee may still ask for them


def split(function: _Code) -> tuple[bytes, list[Any] | None] | None:
    """The function segment that names the unit of ``function``, and the values to send; None: it travels whole.

    No list: the unit is one function, and the call has arguments only.
    """
    how = None
    own: Any = function
    if function.__class__ is FunctionType:
        how = made(function) if function.__dict__ else None
        own = function if how is None else how.arguments[0]
        if own.__class__ is not FunctionType:
            return None
        key = (id(own.__code__), own.__qualname__, how is None)
    else:
        key = (id(own), own.__qualname__, True)
    unit = _units.get(key)
    if unit.__class__ is Unit:
        values = unit.gather(own)
        if values is not None and INSTALLED.takes_pickles and policy.INSTALLED.pickler is None:
            unit.calls = calls = unit.calls + 1
            if not calls & (calls - 1):
                _advise(own)  # at the 2nd, 4th, 8th ... call: what it uses may have grown
            return unit.segment, values if unit.has_values else None
    elif unit is not None:
        return None
    if not INSTALLED.takes_pickles or policy.INSTALLED.pickler is not None:
        return None
    return _split_anew(own, how, key, unit if isinstance(unit, Unit) else None)


def _split_anew(
    function: _Code, how: Made | None, key: _Key, before: Unit | None
) -> tuple[bytes, list[Any] | None] | None:
    if isinstance(function, type) and not is_by_value(function):
        return None
    _advise(function)
    for oldest in list(_units)[: 1 - _MOST_UNITS]:  # a list: an iterator fails when another thread adds one
        unit = _units.pop(oldest, None)
        if isinstance(unit, Unit):
            _dropped.append(unit)
    times = 0 if before is None else before.times + 1
    try:
        if times > _MOST_TIMES:
            raise _Whole
        unit = _take_apart(function, how, times)
    except _Whole:
        _units[key] = function if isinstance(function, type) else function.__code__  # the id in the key stays its own
        return None
    if before is not None:
        _dropped.append(before)
    _units[key] = _sent[unit.segment[1 : 1 + DIGEST_BYTES]] = unit
    values = unit.gather(function)
    return None if values is None else (unit.segment, values if unit.has_values else None)


def _advise(function: _Code) -> None:
    from farcall.serialize.advice import advise

    if not isinstance(function, type):
        advise(function)


def content_of(digest: bytes) -> bytes:
    """The bytes of a unit that this process has sent; empty if it has none of that digest any more."""
    unit = _sent.get(digest)
    return b"" if unit is None else unit.content


class _Walk:
    """A function or class being taken apart. Mutable: everything grows as names are followed.

    ``kept``: the ids of functions that an earlier walk found to be methods, or used by methods. As a class is one at
    its receiver, so are these, whatever calls are under way: they use no values but constants, parts of the unit.
    """

    def __init__(self, root: _Code, kept: frozenset[int]) -> None:
        self.functions: list[FunctionType] = []
        self.numbers: dict[int, int] = {}
        self.kept: set[int] = set(kept)
        self.methods: list[tuple[int, FunctionType]] = []
        self.classes: list[tuple[type, Anatomy]] = []
        self.spaces: dict[int, int] = {}
        self.edges: list[tuple[Place, int]] = []
        self.slots: list[Place] = []
        self.fixed: list[tuple[Place, Any]] = []
        self.stores: bool = False  # globals of its own, even if it uses no value
        self._placed: set[tuple[int, str]] = set()  # globals of a space that travel with the call already
        if isinstance(root, type):
            self._follow(root)
        else:
            self._number(root)

    def is_kept(self, number: int) -> bool:
        return id(self.functions[number]) in self.kept

    def _number(self, function: FunctionType) -> int:
        number = self.numbers.setdefault(id(function), len(self.functions))
        if number == len(self.functions):
            self.functions.append(function)
        return number

    def _follow(self, one: type) -> None:
        if any(one is known for known, _ in self.classes):
            return
        anatomy = anatomy_of(one)
        self.classes.append((one, anatomy))
        try:
            for part in anatomy.code(one):
                if isinstance(part, FunctionType | type) and is_by_value(part):
                    if isinstance(part, type):
                        self._follow(part)
                    else:
                        self.kept.add(id(part))
                        self.methods.append((self._number(part), part))
        except ValueError:
            raise _Whole from None

    def role(self, place: Place, value: Any) -> tuple[int, Any]:
        """How the value at ``place`` travels, and what is to be found there."""
        kept = self.is_kept(place[0])
        by_value = isinstance(value, type) and is_by_value(value)
        if by_value:
            self._follow(value)
        constant = kept and not isinstance(value, FunctionType) and is_constant(value, self.functions[place[0]])
        if by_value or constant or value is ABSENT or _is_fixed(place, value):
            if value is not ABSENT:
                self.fixed.append((place, value))
            return _FIXED, value
        if value.__class__ is FunctionType:
            if made(value) is not None:
                raise _Whole  # only the function that is called
            number = self._number(value)
            if kept:
                self.kept.add(id(value))
            self.edges.append((place, number))
            return _CALLEE, number
        if kept or not is_plain(value):
            raise _Whole
        return _VALUE, None

    def nodes(self) -> Iterator[_UnitFunction]:
        for number, function in enumerate(self.functions):  # which grows
            like = self.spaces.setdefault(id(function.__globals__), number)
            node = _UnitFunction(
                function.__code__,
                function.__qualname__,
                function.__annotations__,
                like,
                len(function.__dict__),
                bool(function.__defaults__),
                bool(function.__kwdefaults__),
            )
            loads, stores = globals_of(function.__code__)
            self.stores = self.stores or bool(stores) or not _HIDES_GLOBALS.isdisjoint(loads)
            for name in loads:
                role, what = self.role((number, _GLOBAL, name), function.__globals__.get(name, ABSENT))
                if role == _FIXED:
                    node.fixed.append((name, what))
                elif role == _CALLEE:
                    node.callees.append((name, what))
                elif (like, name) not in self._placed:
                    self._placed.add((like, name))
                    node.values.append(name)
                    self.slots.append((number, _GLOBAL, name))
            contents = [(_CELL, key, _contents(function, key)) for key in range(len(function.__closure__ or ()))]
            for kind, key, value in [*contents, *((_ATTRIBUTE, *item) for item in function.__dict__.items())]:
                role, what = self.role((number, kind, key), value)
                node.parts.append((kind, key, role, what))
                if role == _VALUE:
                    self.slots.append((number, kind, key))
            if self.is_kept(number):
                defaults = (function.__defaults__ or (), *(function.__kwdefaults__ or {}).values())
                if not is_constant(defaults, function):
                    raise _Whole
                node.constants = function.__defaults__, function.__kwdefaults__ and function.__kwdefaults__.copy()
                yield node
                continue
            if not is_plain([function.__defaults__, function.__kwdefaults__]):
                raise _Whole
            if node.has_defaults:
                self.slots.append((number, _DEFAULTS, None))
            if node.has_keyword_defaults:
                self.slots.append((number, _KEYWORD_DEFAULTS, None))
            yield node
        if self.classes and self.stores:
            raise _Whole  # methods have globals of their own
        for number, (_, anatomy) in enumerate(self.classes):
            self.slots.extend((number, _OF_CLASS, name) for name in anatomy.values)


def _take_apart(root: _Code, how: Made | None, times: int) -> Unit:
    cloudpickle: Any = importlib.import_module("cloudpickle")
    if cloudpickle.list_registry_pickle_by_value():
        raise _Whole  # the program chose other modules that travel by value, too
    kept: frozenset[int] | None = None
    try:
        while True:
            walk = _Walk(root, kept or frozenset())
            nodes = list(walk.nodes())
            if walk.kept == (kept or set()):
                break
            kept = frozenset(walk.kept)  # some may have been met before it was known
        twins = dict(zip(map(id, walk.functions), _twins(walk), strict=True))
        values = {id(one): anatomy.values for one, anatomy in walk.classes}
        spaces = [walk.spaces[id(function.__globals__)] for function in walk.functions]
        file = io.BytesIO()

        class UnitPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
            """cloudpickle for the functions and classes of the unit, and for nothing else by value."""

            def reducer_override(self, value: Any) -> Any:
                reduced = super().reducer_override(twins.get(id(value), value))
                # Two items only: a name for a class that is nowhere, as that of code objects.
                if reduced is NotImplemented or len(reduced) <= 2 or id(value) in twins:
                    return reduced
                if id(value) not in values:
                    raise _Whole
                make, arguments, (attributes, slots), *rest = reduced
                for name in values[id(value)]:
                    attributes.pop(name, None)
                return make, arguments, (attributes, slots), *rest

        wrapping = None if how is None else (how.maker, how.arguments[1:])
        classes = [(one, anatomy.number) for one, anatomy in walk.classes]
        kept_numbers = {number for number in range(len(nodes)) if walk.is_kept(number)}
        parts = (walk.functions, spaces, walk.edges, walk.slots, walk.stores, wrapping, classes, kept_numbers)
        UnitPickler(file, 5).dump((isinstance(root, type), *parts))
    except Exception as error:  # of annotations, for one: `code.py` says what cannot be sent
        raise _Whole from error
    head = importlib.util.MAGIC_NUMBER + platform.python_version().encode() + b"\0"
    return Unit(nodes, head + file.getvalue(), root, walk, times)


def _twins(walk: _Walk) -> list[FunctionType]:
    """Copies of the functions without the values that travel with each call. They name each other's originals."""
    spaces: dict[int, dict[str, Any]] = {}
    twins = []
    for number, function in enumerate(walk.functions):
        names = function.__globals__
        space = spaces.setdefault(id(names), {name: names[name] for name in _OF_MODULES if name in names})
        closure = None if function.__closure__ is None else tuple(CellType() for _ in function.__closure__)
        twin = FunctionType(function.__code__, space, function.__name__, None, closure)
        twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
        twin.__doc__, twin.__annotations__ = function.__doc__, function.__annotations__
        if walk.is_kept(number):
            twin.__defaults__, twin.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        twins.append(twin)
    for place, value in walk.fixed:
        _put(twins, place, value)
    for place, number in walk.edges:
        _put(twins, place, walk.functions[number])
    return twins


def _put(functions: list[FunctionType], place: Place, value: Any) -> None:
    number, kind, key = place
    function = functions[number]
    if kind == _GLOBAL:
        function.__globals__[key] = value
    elif kind == _CELL:
        function.__closure__[key].cell_contents = value  # type: ignore[index]  # it has that cell
    elif kind == _ATTRIBUTE:
        function.__dict__[key] = value
    elif kind == _DEFAULTS:
        function.__defaults__ = value
    else:
        function.__kwdefaults__ = value


@lru_cache(_MOST_UNITS)
def globals_of(code: CodeType) -> tuple[list[str], frozenset[str]]:
    """The globals that ``code`` names, functions inside included; and those that it stores to."""
    found: dict[str, None] = {}
    stores = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _NAMES_A_GLOBAL:
            found[instruction.argval] = None
            if instruction.opname != "LOAD_GLOBAL":
                stores.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, inner_stores = globals_of(constant)
            found.update(dict.fromkeys(inner))
            stores |= inner_stores
    return list(found), frozenset(stores)


def is_by_value(code: Any) -> bool:
    """Does cloudpickle write ``code``, a function or class, by value?"""
    return code.__module__ == "__main__" or goes_by_value(code)


def _is_fixed(place: Place, value: Any) -> bool:
    """Is ``value`` part of the unit: known everywhere by a name, or immutable and not worth sending each time?"""
    if isinstance(value, ModuleType):
        if sys.modules.get(value.__name__) is not value:
            raise _Whole
        return True
    if isinstance(value, FunctionType | type):
        return not is_by_value(value)
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, ModuleType | type | None)
    if isinstance(value, MethodType):
        return type(value.__self__) in _GRADIENT_MODES
    kind = type(value)
    return kind in _IMMUTABLE or kind in _LOGGERS or (place[1] == _GLOBAL and place[2] in _OF_MODULES)


# ---------------------------------------------------------------------- at the receiver


class LoadedUnit:
    """A unit at its receiver: the functions of a call are made of it, from the values that came with the call."""

    __slots__ = (
        *("_cells", "_classes", "_edges", "_functions", "_kept", "_likes", "_made", "_root", "_set", "_slots"),
        *("function", "size_bytes"),
    )

    def __init__(self, content: bytes) -> None:
        """Load the unit. It imports modules: on a thread that may wait."""
        version, _, code = content[4:].partition(b"\0")
        parts = load_code(code, content[:4], version.decode())
        is_class, functions, likes, edges, slots, stores, wrapping, classes, kept = parts
        self._functions: list[FunctionType] = functions
        self._likes: list[int] = likes
        self._classes: list[type] = [one for one, _ in classes]
        self._kept: set[int] = kept
        self._edges: list[tuple[Place, int]] = [edge for edge in edges if edge[0][0] not in kept]
        self._slots: list[Place] = slots
        self._set = [_set_by_hand(function) for function in functions]
        self._cells = [None if one.__closure__ is None else [*map(_in_cell, one.__closure__)] for one in functions]
        self.size_bytes: int = len(content)
        # One for all calls, of functions with values, too: it would not batch, say, what several of them sent.
        self._made: Made | None = None if wrapping is None else made(wrapping[0](functions[0], *wrapping[1]))
        self._root: type | None = self._classes[0] if is_class else None
        one = self._root or (functions[0] if self._made is None else self._made.function)
        self.function: _Code | None = None if slots or stores else one
        """The function, if it uses no values."""

    def make(self, values: list[Any]) -> _Code:
        """Make the function of one call, which uses ``values``."""
        functions: list[FunctionType] = []
        spaces: dict[int, dict[str, Any]] = {}
        for number, function in enumerate(self._functions):
            if number in self._kept:
                functions.append(function)
                continue
            like = self._likes[number]
            names = spaces.get(like)
            if names is None:
                names = spaces[like] = function.__globals__.copy()
            cells = self._cells[number]
            closure = None if cells is None else tuple(starmap(CellType, cells))
            one = FunctionType(function.__code__, names, function.__name__, None, closure)
            for name, value in self._set[number]:
                setattr(one, name, value.copy() if value.__class__ is dict else value)
            functions.append(one)
        for place, number in self._edges:
            if place[1] == _GLOBAL:
                functions[place[0]].__globals__[place[2]] = functions[number]
            else:
                _put(functions, place, functions[number])
        if len(values) != len(self._slots):
            raise ValueError(f"{len(values)} values came for the {len(self._slots)} that the code uses")
        for index, place in enumerate(self._slots):  # zip(..., strict=True) costs more than all the rest
            value = values[index]
            if place[1] == _GLOBAL:
                functions[place[0]].__globals__[place[2]] = value  # as `_put` does, which most calls do not need
            elif place[1] == _OF_CLASS:
                set_value(self._classes[place[0]], place[2], value)
            else:
                _put(functions, place, value)
        if self._made is None:
            return self._root or functions[0]
        self._made.keeper.func = functions[0]
        return cast("FunctionType", self._made.function)


def _set_by_hand(function: FunctionType) -> list[tuple[str, Any]]:
    """The attributes that a function made of the code of ``function`` does not have of itself."""
    names = ("__qualname__", "__module__", "__doc__", "__annotations__", "__dict__")
    bare = FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    return [(name, getattr(function, name)) for name in names if getattr(function, name) != getattr(bare, name)]


def _in_cell(cell: CellType) -> tuple[Any, ...]:
    """What another cell like ``cell`` is made with."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
