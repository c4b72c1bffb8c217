"""What a program is told, once, about its functions that travel by value (`units.py`): values that cost, changes lost.

Owns the look at a function's code for that. It is advice: it may overlook a change, and never raises.
"""

from __future__ import annotations

import dis
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import islice
from types import CodeType, FunctionType
from typing import Any, Final

import torch

from farcall.serialize.units import globals_of, is_by_value

logger: logging.Logger = logging.getLogger("farcall")

LARGE_BYTES: Final = 1 << 20
_CONTAINERS: Final = (list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict)
_CHANGES: Final = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"),
    *("reverse", "setdefault", "sort", "update"),
}
_STORES: Final = {"STORE_SUBSCR": 2, "DELETE_SUBSCR": 2, "STORE_SLICE": 3}
"""How far below the top of the stack the container is."""
_MOST_ITEMS: Final = 1000
_MOST_TOLD: Final = 1000
_told: set[tuple[str, str]] = set()


def advise(root: FunctionType) -> None:
    """Look at ``root`` and the functions by value that it names, and tell what their author should know."""
    try:
        seen, functions = {id(root)}, [root]
        for function in functions:
            loads, stores = globals_of(function.__code__)
            changed = stores | _changed_by(function.__code__)
            for name in loads:
                value = function.__globals__.get(name)
                if name in stores or (name in changed and type(value) in _CONTAINERS):
                    _tell(
                        function,
                        f"changes the global {name}, and each call has globals of its own, so the next one will not "
                        "see it: put the function into a module, or keep the state in an object, made by create()",
                    )
                if (size_bytes := _size_of(value)) >= LARGE_BYTES:
                    _tell(
                        function,
                        f"uses the global {name}, and its {size_bytes / (1 << 20):.1f} MiB travel with each call: "
                        "put it into a module, pass it where it is needed, or keep it in an object, made by create()",
                    )
                if isinstance(value, FunctionType | type) and id(value) not in seen and is_by_value(value):
                    seen.add(id(value))
                    methods = vars(value).values() if isinstance(value, type) else [value]
                    functions.extend(one for one in methods if isinstance(one, FunctionType))
    except Exception:
        logger.debug("cannot look at %r", root, exc_info=True)


def _tell(function: FunctionType, text: str) -> None:
    key = (function.__qualname__, text.partition(",")[0])
    if key not in _told and len(_told) < _MOST_TOLD:
        _told.add(key)
        logger.warning("%s(), which travels by value, %s", function.__qualname__, text)


def _changed_by(code: CodeType) -> set[str]:
    """The globals whose items ``code`` stores, or that have a method called that changes a container."""
    found: set[str] = set()
    loaded: list[tuple[int, str]] = []  # globals on the stack: at which depth
    depth = 0
    before = name = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _STORES:
            at = depth - _STORES[instruction.opname] - (before == "SWAP")  # ``x[k] += y`` stores what it has on top
            found |= {one for position, one in loaded if position == at}
        if name and instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and instruction.argval in _CHANGES:
            found.add(name)
        depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        loaded = [one for one in loaded if one[0] < depth]
        before = instruction.opname
        name = instruction.argval if instruction.opname == "LOAD_GLOBAL" else ""
        if name:
            loaded.append((depth - 1, name))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _changed_by(constant)
    return found


def _size_of(value: Any, depth: int = 0) -> int:
    """About how many bytes ``value`` takes in a message; of a long container, by its first items."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, torch.nn.Module):
        return sum(_size_of(tensor) for tensor in (*value.parameters(), *value.buffers()))
    if isinstance(nbytes := getattr(value, "nbytes", None), int):  # a tensor, an array
        return nbytes
    if type(value) in _CONTAINERS or isinstance(value, tuple | frozenset):
        items = list(islice(value.values() if isinstance(value, dict) else value, _MOST_ITEMS))
        return sum(_size_of(one, depth + 1) for one in items) * len(value) // len(items) if items and depth < 8 else 1
    return 4
