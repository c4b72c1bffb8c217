"""The allow-list of this process: which functions and classes peers may call, create and unpickle here.

Owns the table that `farcall.allow` fills, and the restricted unpickler that reads messages from then on. What is
outside the table is refused, and the refusal names it. Without a table (``INSTALLED`` is empty) members trust each
other with code, and plain pickle reads every message.

    a caller sends                              read here
    the name of a function, script or class     if it is in the table, letter by letter: nothing is imported before
    a method of a value that is owned here      if the value's class is in the table, and the name has no underscore
    a callable by value: a bound method, a partial, a lambda, code      never
    plain values and tensors without pickle (`flat.py`)                 always
    a pickle                                    plain values, containers, tensors, references, the classes of the table

With ``trust="data"`` only named functions and `flat.py` are left: a pickle is refused before a byte of it is read, and
peers cannot hold references to values of this process.

The unpickler extends the pure-Python one of the standard library, where every opcode that calls something can be
overridden: it calls only classes of the table and functions of the list below, and sets state only on instances of
these classes. That keeps honest mistakes out, not enemies: a pickle still runs the code of the table's classes, with
arguments and in an order that their authors did not think of. Only ``trust="data"`` is a boundary.
"""

from __future__ import annotations

import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import io
import pickle
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NoReturn, TypeAlias

import torch

from farcall.errors import InitError, NotAllowed
from farcall.serialize.bounds import check_array

_OWNERS = b"pfarcall.rpc.owned_values\0"
_SHARED = b"pfarcall.rpc.shared_tensor\0"
_METHOD = _OWNERS + b"methods.of_"
_ALWAYS: Final = frozenset(
    {
        *(_OWNERS + name for name in (b"fetch", b"type_of", b"backward")),
        *(_SHARED + name for name in (b"lend", b"lend_memory", b"settle", b"read", b"write")),
    }
)
"""Functions that farcall itself calls, for referenced values and shared tensors."""
_OF_PLAIN_DATA: Final = frozenset(
    {
        b"pfarcall.rpc.gather\0_contribute",
        *(b"pfarcall.weights.questions\0" + name for name in (b"find_route", b"read_chunk", b"borrow")),
        *(b"pfarcall.launcher.worker\0" + name for name in (b"is_ready", b"end_worker", b"describe")),
    }
)
"""Functions that farcall itself calls with plain data: barriers, published weights, and launched workers."""

_REFERENCE: Final = ("a reference to a value", "named functions with plain data and tensors")
_SCRIPTS: Final = "__torch__."
_PLAIN: Final = (
    *(complex, bytearray, set, frozenset, slice, range, object),
    *(collections.OrderedDict, collections.deque, collections.Counter),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(torch.Size, torch.device, torch.dtype, torch.Tensor, torch.nn.Parameter),
)
_ERRORS: Final = ("builtins", "farcall.errors")
_CONSTANTS: Final = (torch.dtype, torch.layout, torch.memory_format)
_SAFE_FUNCTIONS: Final = {
    "farcall.serialize.rebuild": (
        *("rebuild_inline", "rebuild_view", "rebuild_alias", "rebuild_as", "rebuild_special"),
        *("rebuild_storage", "rebuild_typed_storage"),
    ),
    "farcall.serialize.devices": ("rebuild_on_device",),
    "farcall.serialize.pickler": ("tensor_at",),
    "farcall.rpc.rref": ("_arrived",),
    "farcall.rpc.remote_tensor": ("_arrived",),
    "farcall.errors": ("Delivery",),
    "farcall.ids": ("WorkerInfo",),
    "torch._utils": ("_rebuild_sparse_tensor",),
    "torch.serialization": ("_get_layout",),
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "numpy.core.numeric": ("_frombuffer",),
}


_OF_PARTS: Final = re.compile(r" \[[0-9]+ of [0-9]+\]\Z")
Table: TypeAlias = dict[str, str | list[str] | dict[str, list[str]]]


class Allowance:
    """A table of functions and classes, kept as names: to refuse a name never imports its module."""

    def __init__(
        self,
        functions: Iterable[Any],
        classes: Iterable[Any],
        trust: Literal["calls", "data"] = "calls",
        publishers: Mapping[str, str | Iterable[str]] = MappingProxyType({}),
    ) -> None:
        """As `farcall.allow`: each function or class, or its name as ``"module:name"``."""
        if trust not in ("calls", "data"):
            raise ValueError(f"trust must be 'calls' or 'data', not {trust!r}")
        self.trust: Literal["calls", "data"] = trust
        self.classes: frozenset[tuple[str, str]] = frozenset(map(_name_of, classes))
        if self.classes and trust == "data":
            raise ValueError("trust='data' accepts plain data and tensors only: leave classes out")
        named = {_name_of(function) for function in functions} | self.classes
        self._named = named
        self._publishers: dict[str, list[str]] = {
            name: [workers] if isinstance(workers, str) else sorted(workers) for name, workers in publishers.items()
        }
        self._functions = frozenset(f"p{module}\0{name}".encode() for module, name in named) | {
            f"s{_SCRIPTS}{name if module == '__main__' else f'{module}.{name}'}".encode() for module, name in named
        }
        # A caller resolves torch's operators to an overload by the arguments, and sends the name of the overload.
        self._operators = frozenset(
            name for module, name in named if module in ("torch", "torch._C._VariableFunctions")
        )

    def table(self) -> Table:
        """The arguments of `farcall.allow` that make the same table in another process."""
        functions, classes = (
            sorted(f"{module}:{name}" for module, name in each) for each in (self._named, self.classes)
        )
        return {"functions": functions, "classes": classes, "trust": self.trust, "publishers": self._publishers}

    def publishers(self, name: str) -> list[str]:
        """The workers that may publish weights under ``name``, or a part of weights of that name."""
        return self._publishers.get(name) or self._publishers.get(_OF_PARTS.sub("", name), [])

    def check_function(self, data: bytes) -> None:
        """Raise ``NotAllowed`` unless the function that ``data`` names, as in `functions.py`, may be called here."""
        if data in self._functions or data in _OF_PLAIN_DATA:
            return
        if data in _ALWAYS or data.startswith(_METHOD):
            if self.trust == "data":
                raise _refused(*_REFERENCE)
            if data in _ALWAYS:
                return
            name = data[len(_METHOD) :].decode(errors="replace")
            if name.isidentifier() and not name.startswith("_"):
                return  # `check_method` looks at the class of the value, once that is known
        if data[:1] in (b"b", b"o"):
            parts = data[1:].decode(errors="replace").split(".")
            if len(parts) > 1 and parts[0] == "aten" and parts[1] in self._operators:
                return
        raise _refused(f"the function {_readable(data)}")

    def check_method(self, value: Any, name: str) -> None:
        """Raise ``NotAllowed`` unless peers may call methods of ``value``."""
        kind = type(value)
        if (kind.__module__, kind.__qualname__) not in self.classes:
            raise _refused(f"the method {name!r} of a {kind.__module__}.{kind.__qualname__}")

    def find(self, module: str, name: str) -> Any:
        """Return the class or function of that name if a pickle may name it; raise ``NotAllowed`` otherwise."""
        safe = _known().get((module, name))
        if safe is not None:
            return safe
        if (module, name) in self.classes:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            if isinstance(found, type):
                return found
        if module == "torch" and isinstance(vars(torch).get(name), _CONSTANTS):  # not getattr, which may import
            return vars(torch)[name]
        if module in _ERRORS:
            error = getattr(sys.modules[module], name, None)
            if isinstance(error, type) and issubclass(error, Exception):
                return error
        raise _refused(f"{module}.{name}")

    def may_be_made(self, value: Any) -> bool:
        """May a pickle call ``value``, or give state to its instances?"""
        if any(value is known for known in _known().values()):
            return True
        if not isinstance(value, type):
            return False
        is_error = issubclass(value, Exception) and value.__module__ in _ERRORS
        return is_error or (value.__module__, value.__qualname__) in self.classes


def read_table(path: str) -> Allowance:
    """Import the table at ``"module:table"``: a dict with arguments of `farcall.allow`."""
    module, _, name = path.partition(":")
    try:
        table = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InitError(f"cannot find the table of allowed functions at {path!r}: {error}") from error
    if not isinstance(table, Mapping) or not set(table) <= {"functions", "classes", "trust", "publishers"}:
        raise InitError(f"the table at {path!r} must be a dict with 'functions', 'classes', 'trust' and 'publishers'")
    return Allowance(**{"functions": (), "classes": (), **table})


class _Installed:
    """The table of this process. Mutable: `install` replaces it. None: members may send code."""

    allowance: Allowance | None = None
    takes_pickles: bool = True


INSTALLED = _Installed()


def install(allowance: Allowance | None) -> None:
    """Enforce ``allowance`` from now on; None: trust everybody."""
    INSTALLED.allowance = allowance
    INSTALLED.takes_pickles = allowance is None or allowance.trust != "data"


def loads(data: bytes | memoryview, buffers: Iterable[Any] | None = None) -> Any:
    """``pickle.loads``, restricted to the table of this process."""
    allowance = INSTALLED.allowance
    if allowance is None:
        return pickle.loads(data, buffers=buffers)
    refuse_pickles()
    return _Reader(data, allowance, buffers).load()


def refuse_pickles() -> None:
    """Raise ``NotAllowed`` if this process accepts no pickles at all."""
    if not INSTALLED.takes_pickles:
        raise _refused("a pickle", "plain data and tensors")


def refuse_references() -> NoReturn:
    """Raise ``NotAllowed``: nobody may refer to values of this process, which takes no pickles (`INSTALLED`)."""
    raise _refused(*_REFERENCE)


_Unpickler: Any = pickle._Unpickler  # pure Python: its opcodes can be overridden, those of the C unpickler cannot


class _Reader(_Unpickler):  # type: ignore[misc]
    """An unpickler that obeys an `Allowance`; see the module's docstring. Mutable: what is left to be copied."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def __init__(self, data: bytes | memoryview, allowance: Allowance, buffers: Iterable[Any] | None) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._allowance = allowance
        self._left = len(data)

    def _copies(self, *values: Any) -> None:
        """Parts of the message are about to be copied: again and again they may not be, or memory would run out."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if isinstance(value, (*_CONTENTS, bytearray)):
                self._left -= len(value)
            elif type(value) is int:
                self._left -= value.bit_length() // 8
            if self._left < 0:
                raise _refused("a message that copies one part many times")
            if isinstance(value, tuple):  # such as a shape, among the arguments of another function
                waiting += value

    def find_class(self, module: str, name: str) -> Any:
        return self._allowance.find(module, name)

    def get_extension(self, code: int) -> None:
        # Bypass copyreg's cache: it returns an object without a call of `find_class`.
        key = copyreg._inverted_registry.get(code)  # type: ignore[attr-defined]
        if key is None:
            raise _refused(f"the extension {code} of pickle")
        self.append(self.find_class(*key))

    def _checked(self, function: Any) -> None:
        if not self._allowance.may_be_made(function):
            raise _refused(f"calling {function!r} while a message is read")

    def _checked_call(self, function: Any, arguments: Any, named: Any = ()) -> None:
        self._checked(function)
        if type(arguments) is not tuple or not _is_harmless(function, (*arguments, *named)):
            raise _refused(f"calling {function!r} with these arguments while a message is read")
        if function in _COPYING or function.__module__ in _OF_TENSORS or function.__name__ == "scalar":
            self._copies(*arguments, *named)

    def load_reduce(self) -> None:
        self._checked_call(*self.stack[-2:])
        super().load_reduce()

    def load_newobj(self) -> None:
        self._checked_call(*self.stack[-2:])
        super().load_newobj()

    def load_newobj_ex(self) -> None:
        function, arguments, named = self.stack[-3:]
        self._checked_call(function, arguments, dict.values(named))
        super().load_newobj_ex()

    def load_bytearray8(self) -> None:
        # pickle's own takes the memory first, and then looks how many bytes there are.
        size = int.from_bytes(self.read(8), "little")
        content = self.read(size)
        if len(content) < size:
            raise pickle.UnpicklingError("the message is malformed: bytes are cut off")
        self.append(bytearray(content))

    def _checked_filling(self, filled: Any, kinds: type[Any] | tuple[type[Any], ...]) -> None:
        if not isinstance(filled, kinds):
            raise _refused(f"filling a {type(filled).__qualname__} while a message is read")

    def load_append(self) -> None:
        self._checked_filling(self.stack[-2], _LISTS)
        super().load_append()

    def load_appends(self) -> None:
        self._checked_filling(self.metastack[-1][-1], _LISTS)
        super().load_appends()

    def load_setitem(self) -> None:
        self._checked_filling(self.stack[-3], dict)
        super().load_setitem()

    def load_setitems(self) -> None:
        self._checked_filling(self.metastack[-1][-1], dict)
        super().load_setitems()

    def load_additems(self) -> None:
        self._checked_filling(self.metastack[-1][-1], set)
        super().load_additems()

    def load_build(self) -> None:
        value, state = self.stack[-2:]
        kind = type(value)
        if isinstance(value, enum.Enum):
            raise _refused(f"the state of a {kind.__qualname__}, which is everybody's")
        if issubclass(kind, torch.Tensor):
            raise _refused(f"the state of a {kind.__qualname__}")  # farcall's own descriptors set none
        numpy = sys.modules.get("numpy")
        if numpy is None or not issubclass(kind, numpy.dtype):  # numpy has one dtype class per kind of number
            self._checked(kind)
            if numpy is not None and issubclass(kind, numpy.ndarray):
                self._check_array(numpy, value, state)
            elif getattr(kind, "__setstate__", BaseException.__setstate__) == BaseException.__setstate__:
                for attributes in state if type(state) is tuple and len(state) == 2 else (state,):
                    self._check_attributes(attributes)
        elif not _is_as_it_was(value, state):
            raise _refused("the state of a dtype of numpy's that is not plain")  # numpy does not validate it
        super().load_build()

    def _check_attributes(self, attributes: Any) -> None:
        """Let pickle set ``attributes``, but none that makes an object another one, such as ``__class__``."""
        if type(attributes) is not dict:
            return  # None: there are no others; pickle refuses everything else
        self._copies(attributes)
        for name in attributes:
            if type(name) is not str or name in _OF_EVERY_OBJECT:
                raise _refused(f"setting {name!r} while a message is read")

    def _check_array(self, numpy: Any, array: Any, state: Any) -> None:
        """Let an array take its memory once: taking it again frees memory that other arrays may still view."""
        if type(state) is not tuple or len(state) < 5 or array.nbytes:
            raise _refused("the state of an array that has one")
        _, shape, dtype, _, content = state[:5]
        if not isinstance(dtype, numpy.dtype) or type(content) is not (list if dtype.hasobject else bytes):
            raise _refused("an array of such elements")
        self._copies(content)
        check_array(shape, 1 if dtype.hasobject else dtype.itemsize, len(content))

    def _never(self) -> None:
        raise _refused("a pickle of an old form")

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
    dispatch[pickle.APPEND[0]] = load_append
    dispatch[pickle.APPENDS[0]] = load_appends
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.OBJ[0]] = _never
    dispatch[pickle.INST[0]] = _never
    dispatch[pickle.PERSID[0]] = _never
    dispatch[pickle.BINPERSID[0]] = _never


_CONTAINERS: Final = (
    bytearray,
    set,
    frozenset,
    collections.OrderedDict,
    collections.deque,
    collections.Counter,
    torch.Size,
)
_COPYING: Final = (*_CONTAINERS, range, decimal.Decimal, fractions.Fraction, ExceptionGroup, UnicodeDecodeError)
_OF_TENSORS: Final = ("farcall.serialize.rebuild", "farcall.serialize.devices")  # each tensor has a copy of its shape
_CONTENTS: Final = (list, tuple, dict, bytes, str)
_FRACTION: Final = re.compile(r"-?[0-9]+(/[0-9]+)?")
_OF_EVERY_OBJECT: Final = {*vars(object), "__setstate__", "__dict__"} - {"__doc__"}
_LISTS: Final = (list, collections.deque, bytearray)
_DTYPE: Final = re.compile(r"[A-Za-z?][0-9]{0,9}")
_REBUILDING: Final = ("rebuild_special", "rebuild_as", "rebuild_storage")
_REBUILT_BY: Final = (
    *(("farcall.serialize.rebuild", name) for name in ("rebuild_inline", "rebuild_view", "rebuild_alias")),
    ("farcall.serialize.devices", "rebuild_on_device"),
    ("torch._utils", "_rebuild_sparse_tensor"),
)
"""The functions that the ones above may call."""


def _is_harmless(function: Any, arguments: tuple[Any, ...]) -> bool:
    """Is the cost of this call bounded by the size of its message, and does it expose no other memory?

    ``function`` is one that `Allowance.may_be_made` accepts.
    """
    if function is torch._utils._rebuild_sparse_tensor:
        return False  # only to be named: called, it checks nothing
    if isinstance(function, type) and issubclass(function, _memory_classes()):
        return False  # only to be named: called, they expose uninitialised memory
    if function in _CONTAINERS:
        return all(
            a is None or type(a) in _CONTENTS or (function is collections.deque and type(a) is int) for a in arguments
        )
    if function is fractions.Fraction:  # "1e999999999" would take gigabytes
        return all(type(a) is int or (type(a) is str and _FRACTION.fullmatch(a)) for a in arguments)
    home, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    if home == "farcall.serialize.rebuild" and name in _REBUILDING:  # they call their argument
        inner = arguments[1 if name == "rebuild_as" else 0] if len(arguments) > 1 else None
        return any(inner is _known().get(known, _known) for known in _REBUILT_BY)
    numpy = sys.modules.get("numpy")
    if numpy is not None and function is numpy.dtype:
        # numpy makes no others for a pickle; "O" with a shape or fields, or over another dtype, could be anything
        text, *rest = arguments or (None,)
        return type(text) is str and bool(_DTYPE.fullmatch(text)) and all(type(one) is bool for one in rest)
    if name == "_reconstruct":
        return len(arguments) == 3 and arguments[1] == (0,)
    if name == "scalar" and home.startswith("numpy"):  # without content, numpy takes as much memory as the dtype says
        dtype, content = arguments if len(arguments) == 2 else (None, None)
        return type(content) is bytes and getattr(dtype, "itemsize", -1) == len(content)
    return True


def _memory_classes() -> tuple[type[Any], ...]:
    numpy = sys.modules.get("numpy")
    arrays = () if numpy is None else (numpy.ndarray, numpy.void)
    return (torch.Tensor, torch.UntypedStorage, torch.TypedStorage, *arrays)


def _is_as_it_was(dtype: Any, state: Any) -> bool:
    """Does ``state`` leave a numpy ``dtype`` as it is, except for the byte order and the unit of a date?"""
    return (
        type(state) is tuple
        and (len(state) == 8 or (len(state) == 9 and dtype.kind in "mM"))
        and all(type(number) is int for number in (state[0], *state[5:8]))
        and state[0] in (3, 4)
        and state[2:5] == (None, None, None)
        and state[5:7] in ((-1, -1), (dtype.itemsize, dtype.alignment))
        and state[7] == dtype.flags
    )


def _refused(what: str, served: str = "what its program names with farcall.allow") -> NotAllowed:
    return NotAllowed(f"{what} is not allowed here: this worker serves {served} only")


def _readable(data: bytes) -> str:
    if data[:1] == b"p":
        return repr(data[1:].decode(errors="replace").replace("\0", "."))
    return repr(data[1:].decode(errors="replace")) if data[:1] in (b"o", b"b", b"s") else "of a pickle"


def _name_of(value: Any) -> tuple[str, str]:
    if isinstance(value, str):
        module, colon, name = value.partition(":")
        if not colon or not module or not name:
            raise ValueError(f"{value!r} names no function or class: write 'module:name'")
        return module, name
    if isinstance(value, torch.jit.ScriptFunction):
        module, _, name = str(value.qualified_name).removeprefix(_SCRIPTS).rpartition(".")
        return module or "__main__", name
    home: Any = getattr(value, "__module__", None)
    own: Any = getattr(value, "__qualname__", None)
    short = str(getattr(value, "__name__", ""))
    if getattr(torch, short, None) is value:
        home, own = "torch", short
    if not isinstance(home, str) or not isinstance(own, str):
        raise TypeError(f"{value!r} is neither a function or class of a module, nor the name of one, 'module:name'")
    if "<" in own:
        raise ValueError(f"{value!r} was defined inside a function: define it at the top level of a module")
    return ("__main__" if home == "__mp_main__" else home), own


def _known() -> dict[tuple[str, str], Any]:
    """Everything that any pickle may name, from modules that are already loaded."""
    loaded = sum(module in sys.modules for module in _SAFE_FUNCTIONS)
    return _known_of(loaded)


@functools.lru_cache(1)
def _known_of(loaded: int) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {(kind.__module__, kind.__qualname__): kind for kind in _PLAIN}
    for module, names in _SAFE_FUNCTIONS.items():
        home = sys.modules.get(module)
        found.update({(module, name): getattr(home, name) for name in names if hasattr(home, name)})
    return found
