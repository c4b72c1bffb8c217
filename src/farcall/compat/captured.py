"""Names that were taken out of the old modules before: by programs, and by torch itself.

A module that did ``from torch.distributed.rpc import rpc_sync`` has the old function under a name of its own. `rebind`
looks through all loaded modules for such names, by identity, and gives them the new object. `complete` adds the names
that a torch without RPC never had.

Invariant: only functions, classes and modules are exchanged (two equal numbers may be one object), and each exchange
can be undone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

__all__ = ["AFTER_IMPORT", "Undo", "complete", "give_back", "rebind", "setting"]

Undo = Callable[[], None]
_MISSING = object()


def setting(where: Any, name: str, value: object) -> Undo:
    """Set an attribute; what is returned sets it back, unless somebody else has set it since."""
    before = vars(where).get(name, _MISSING)
    setattr(where, name, value)

    def undo() -> None:
        if vars(where).get(name) is not value:
            return
        if before is _MISSING:
            delattr(where, name)
        else:
            setattr(where, name, before)

    return undo


def rebind(replacements: Mapping[str, tuple[ModuleType | None, ModuleType]]) -> list[Undo]:
    """Give every module that holds something of the old modules what took its place."""
    exchanged: dict[int, tuple[object, object]] = {}
    old_modules: set[int] = set()
    for old, new in replacements.values():
        if old is None:
            continue
        old_modules.add(id(old))
        exchanged[id(old)] = (old, new)
        for name, value in list(vars(old).items()):
            if _is_of(value, replacements) and name in vars(new):
                exchanged[id(value)] = (value, vars(new)[name])
    undo: list[Undo] = []
    for module in list(sys.modules.values()):
        # Nothing here asks the module itself: one that loads lazily would do so, and others may answer anything.
        if not issubclass(type(module), ModuleType) or id(module) in old_modules:
            continue
        names: dict[str, Any] = object.__getattribute__(module, "__dict__")
        module_name = str(names.get("__name__", ""))
        if module_name == "farcall" or module_name.startswith("farcall."):
            continue
        for name, value in list(names.items()):
            found = exchanged.get(id(value))
            # The parents' attributes are modules, too; those are set by whoever replaces the module.
            if found is not None and found[0] is value and f"{module_name}.{name}" not in replacements:
                undo.append(setting(module, name, found[1]))
    return undo


def _is_of(value: object, replacements: Mapping[str, object]) -> bool:
    if not isinstance(value, FunctionType | BuiltinFunctionType | type):
        return False
    home = getattr(value, "__module__", None)
    return isinstance(home, str) and home in replacements


def give_back(replaced: Mapping[str, str]) -> None:
    """Give torch's own modules that were loaded meanwhile what they would have had; ours are out of the way by now."""
    homes: dict[int, tuple[str, str]] = {}
    for old_name, new_name in replaced.items():
        new = sys.modules.get(new_name)
        if new is not None:
            homes[id(new)] = (old_name, "")
            homes.update({id(value): (old_name, name) for name, value in vars(new).items() if _is_ours(value)})
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("torch.") or not issubclass(type(module), ModuleType):
            continue
        for name, value in list(object.__getattribute__(module, "__dict__").items()):
            if id(value) in homes:
                _give_back(module, name, *homes[id(value)])


def _give_back(module: ModuleType, name: str, home: str, name_there: str) -> None:
    try:
        found: object = importlib.import_module(home)
        setattr(module, name, getattr(found, name_there) if name_there else found)
    except (ImportError, AttributeError):  # a torch without RPC has no such thing
        delattr(module, name)


def _is_ours(value: object) -> bool:
    home = getattr(value, "__module__", None) if isinstance(value, FunctionType | type) else None
    return isinstance(home, str) and home.startswith("farcall.")


# ---------------------------------------------------------------------- what a torch without RPC never had


def complete() -> list[Undo]:
    """Give the modules of torch that are loaded the names they would have with RPC."""
    undo: list[Undo] = []
    for name, add in AFTER_IMPORT.items():
        module = sys.modules.get(name)
        if module is not None:
            undo.extend(add(module))
    undo.extend(_script_builtins())
    undo.extend(_scripts())
    undo.extend(_futures())
    undo.extend(_references())
    return undo


def _jit_internal(module: ModuleType) -> list[Undo]:
    from farcall.compat.rpc import RRef

    undo = [setting(module, "RRef", RRef), setting(module, "PyRRef", RRef)]
    if not hasattr(module, "is_rref"):

        def is_rref(annotation: Any) -> bool:
            if annotation is RRef:
                raise RuntimeError("RRef as an annotation in TorchScript needs its contained type, as in RRef[int]")
            return bool(module.get_origin(annotation) is RRef)

        undo.append(setting(module, "is_rref", is_rref))
        undo.append(setting(module, "is_rref_instance", lambda value: isinstance(value, RRef)))
    return undo


def _jit_annotations(module: ModuleType) -> list[Undo]:
    from torch import _C, _jit_internal

    internal: Any = _jit_internal
    undo = []
    if not hasattr(module, "is_rref"):
        undo.append(setting(module, "is_rref", internal.is_rref))
    if not hasattr(module, "RRefType"):
        undo.append(setting(module, "RRefType", _C.RRefType))
    return [*undo, setting(module, "RRef", internal.RRef)]


def _data_parallel(module: ModuleType) -> list[Undo]:
    from farcall.compat.rpc import RRef

    return [setting(module, "RRef", RRef), setting(module, "RPC_AVAILABLE", True)]


def _nn(module: ModuleType) -> list[Undo]:
    from farcall.compat.nn import RemoteModule

    return [setting(module, "RemoteModule", RemoteModule)]


def _optim(module: ModuleType) -> list[Undo]:
    from farcall.compat.optim import DistributedOptimizer

    return [setting(module, "DistributedOptimizer", DistributedOptimizer)]


def _futures() -> list[Undo]:
    import torch

    from farcall.compat.futures import replacements

    return [setting(torch.futures, name, function) for name, function in replacements().items()]


def _references() -> list[Undo]:
    from farcall.compat.references import replacements
    from farcall.compat.rpc import RRef

    return [setting(RRef, name, method) for name, method in replacements().items()]


def _script_builtins() -> list[Undo]:
    """Scripts that use distributed autograd know its functions by identity."""
    from torch.jit import _builtins

    from farcall.compat import autograd

    if _builtins._builtin_table is None:  # made at first use, then from the module that is in place by then
        return []
    table = _builtins._builtin_table
    keys = {id(autograd.get_gradients): "aten::get_gradients", id(autograd.backward): "aten::dist_backward"}
    table.update(keys)

    def undo() -> None:
        for key in keys:
            table.pop(key, None)

    return [undo]


def _scripts() -> list[Undo]:
    """Code that TorchScript compiles, and that issues calls itself."""
    from farcall.compat.scripts import serve

    return serve()


AFTER_IMPORT: dict[str, Callable[[ModuleType], list[Undo]]] = {
    "torch._jit_internal": _jit_internal,
    "torch.jit.annotations": _jit_annotations,
    "torch.nn.parallel.distributed": _data_parallel,
    "torch.distributed.nn": _nn,
    "torch.distributed.optim": _optim,
}
"""What is done to a module of torch's when it is there."""
