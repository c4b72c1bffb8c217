"""Putting farcall's modules in the place of torch's, and torch's back.

    torch's                     replaced how
    a loaded module             in ``sys.modules`` and in its parent; the old module object, which programs may hold as
                                ``rpc``, hands every question on to the new one
    a module not loaded yet     a finder answers its import with the new one
    functions and classes       by identity, in every module that holds them under a name of its own, as after
                                ``from torch.distributed.rpc import rpc_sync``

Processes that ``multiprocessing`` starts get the same. Owns the table below and the order of the steps; `patches` has
the other changes to torch's modules.

Invariant: after `uninstall` every name that was changed is the object it was before.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from farcall.compat import patches
from farcall.compat.patches import Undo, patch
from farcall.imports import find_and_then, gc_paused

REPLACED = {
    "torch._C._distributed_autograd": "farcall.compat.autograd",
    "torch._C._distributed_rpc": "farcall.compat.rpc.native",
    "torch._C._distributed_rpc_testing": "farcall.compat.rpc.faults",
    "torch.distributed.autograd": "farcall.compat.autograd",
    "torch.distributed.nn.api.remote_module": "farcall.compat.nn",
    "torch.distributed.optim.optimizer": "farcall.compat.optim",
    "torch.distributed.rpc": "farcall.compat.rpc",
    "torch.distributed.rpc._testing": "farcall.compat.rpc.faults",
    "torch.distributed.rpc._testing.faulty_agent_backend_registry": "farcall.compat.rpc.faults",
    "torch.distributed.rpc._utils": "farcall.compat.rpc.native",
    "torch.distributed.rpc.api": "farcall.compat.rpc.api",
    "torch.distributed.rpc.backend_registry": "farcall.compat.rpc.backend_registry",
    "torch.distributed.rpc.constants": "farcall.compat.rpc.constants",
    "torch.distributed.rpc.functions": "farcall.compat.rpc.functions",
    "torch.distributed.rpc.internal": "farcall.compat.rpc.internal",
    "torch.distributed.rpc.options": "farcall.compat.rpc.options",
    "torch.distributed.rpc.rref_proxy": "farcall.compat.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": "farcall.compat.rpc.server_process_global_profiler",
}
"""The modules that take the places of torch's."""
_IN_PLACE_AT_ONCE = ("torch._C._distributed_autograd", "torch._C._distributed_rpc", "torch.distributed.autograd")
_TARGET = "__farcall_in_its_place__"

_lock = threading.RLock()
_undo: list[Undo] = []
_installed = False


def is_installed() -> bool:
    """Is farcall in the place of ``torch.distributed.rpc`` in this process?"""
    return _installed


def install() -> None:
    """Put farcall in the place of ``torch.distributed.rpc`` and its neighbours.

    The order of imports does not matter: modules, and functions and classes that other modules took out of them with
    ``from ... import``, are exchanged everywhere. Out of reach is an old class or function kept elsewhere than in a
    module: in a closure, an attribute of an object, a default argument. Where that matters, install before the program
    is imported, as ``python -m farcall`` does.

    Processes started by ``multiprocessing``, in whatever way, have it as well. Calling it again changes nothing.
    """
    global _installed
    with _lock:
        # Before `_installed` is read: where FARCALL_INSTALL is set, this very import installs.
        import torch

        if _installed:
            return
        if not torch.distributed.is_available():
            raise RuntimeError("farcall needs torch.distributed, and this torch was built without it")
        native = sys.modules.get("torch._C._distributed_rpc")
        if native is not None and native._is_current_rpc_agent_set():
            raise RuntimeError(
                "torch.distributed.rpc is running in this process: call farcall.compat.install() before it"
            )
        _installed = True
        try:
            _put_in_place()
        except BaseException:
            uninstall()
            raise


def uninstall() -> None:
    """Put ``torch.distributed.rpc`` back as it was; shut down first.

    Everything that was exchanged is exchanged back; a program keeps the names that it imported meanwhile.
    """
    global _installed
    with _lock:
        if not _installed:
            return
        from farcall.runtime.node.current import slot

        if slot.runtime is not None:
            raise RuntimeError("cannot uninstall farcall while it runs: call shutdown() first")
        while _undo:
            _undo.pop()()
        _give_back()
        _installed = False


def _put_in_place() -> None:
    sys.meta_path.insert(0, _finder)
    _undo.append(lambda: sys.meta_path.remove(_finder))
    present = {name for name in REPLACED if name in sys.modules} | set(_IN_PLACE_AT_ONCE)
    # Import all new modules first: that may import modules of torch's, which must not see half of the exchange.
    with gc_paused():
        replacements = {
            name: (sys.modules.get(name), importlib.import_module(REPLACED[name])) for name in sorted(present)
        }
    _undo.extend(_rebind(replacements))
    for name, (old, new) in replacements.items():
        _replace(name, old, new)
    _undo.extend(patches.apply())
    from farcall.autograd.replicas import watch_replicas

    watch_replicas()  # from here on: a program may build replicas long before init_rpc
    _undo.append(_take_along())


# ---------------------------------------------------------------------- modules


class _Forwarding(ModuleType):
    """The class of a replaced module: hands every question on to the new one."""

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__("__dict__")
        if name == "__dict__" or _TARGET not in own:
            return super().__getattribute__(name)
        return own[_TARGET] if name == _TARGET else getattr(own[_TARGET], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__[_TARGET], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__[_TARGET], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__[_TARGET])


def _replace(name: str, old: ModuleType | None, new: ModuleType) -> None:
    parent_name, _, child = name.rpartition(".")
    parent = sys.modules[parent_name]
    if isinstance(parent, _Forwarding):
        parent = getattr(parent, _TARGET)
    _undo.append(patch(parent, child, new))
    sys.modules[name] = new
    if old is None:
        _undo.append(lambda: sys.modules.pop(name, None))
        return
    old.__dict__[_TARGET] = new
    old.__class__ = _Forwarding

    def put_back() -> None:
        del old.__dict__[_TARGET]
        object.__setattr__(old, "__class__", ModuleType)
        sys.modules[name] = old

    _undo.append(put_back)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds new modules for old ones that are not loaded yet, and patches others as they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in REPLACED:
            return importlib.machinery.ModuleSpec(fullname, self)
        after = patches.AFTER_IMPORT.get(fullname)
        if after is None:
            return None
        return find_and_then(self, fullname, path, lambda module: _undo.extend(after(module)))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system then returns the entry in sys.modules.
        new = importlib.import_module(REPLACED[module.__name__])
        _undo.append(lambda: sys.modules.pop(module.__name__, None))
        sys.modules[module.__name__] = new


_finder = _Finder()

# ---------------------------------------------------------------------- names that modules hold


def _rebind(replacements: Mapping[str, tuple[ModuleType | None, ModuleType]]) -> list[Undo]:
    """Exchange the functions, classes and modules of the old modules in every module that holds one."""
    # Only these, since the exchange goes by identity: two equal numbers may be one object.
    exchanged: dict[int, tuple[object, object]] = {}
    old_modules: set[int] = set()
    for old, new in replacements.values():
        if old is None:
            continue
        old_modules.add(id(old))
        exchanged[id(old)] = (old, new)
        for name, value in list(vars(old).items()):
            home = getattr(value, "__module__", None)
            is_named = isinstance(value, FunctionType | BuiltinFunctionType | type)
            if is_named and isinstance(home, str) and home in replacements and name in vars(new):
                exchanged[id(value)] = (value, vars(new)[name])
    undo: list[Undo] = []
    for module in list(sys.modules.values()):
        # Not by getattr or isinstance: a module that loads lazily would load, and others may answer anything.
        if not issubclass(type(module), ModuleType) or id(module) in old_modules:
            continue
        names: dict[str, Any] = object.__getattribute__(module, "__dict__")
        module_name = str(names.get("__name__", ""))
        if module_name == "farcall" or module_name.startswith("farcall."):
            continue
        for name, value in names.copy().items():
            found = exchanged.get(id(value))
            # `_replace` sets the attributes of parents, which are modules, too.
            if found is not None and found[0] is value and f"{module_name}.{name}" not in replacements:
                undo.append(patch(module, name, found[1]))
    return undo


def _give_back() -> None:
    """In torch's modules that were loaded meanwhile, put torch's names in the places of ours."""
    homes: dict[int, tuple[str, str]] = {}
    for old_name, new_name in REPLACED.items():
        new = sys.modules.get(new_name)
        if new is None:
            continue
        homes[id(new)] = (old_name, "")
        for name, value in vars(new).items():
            home = getattr(value, "__module__", None) if isinstance(value, FunctionType | type) else None
            if isinstance(home, str) and home.startswith("farcall."):
                homes[id(value)] = (old_name, name)
    for module_name, module in sys.modules.copy().items():
        if not module_name.startswith("torch.") or not issubclass(type(module), ModuleType):
            continue
        for name, value in object.__getattribute__(module, "__dict__").copy().items():
            if id(value) not in homes:
                continue
            home_name, name_there = homes[id(value)]
            try:
                found: object = importlib.import_module(home_name)
                setattr(module, name, getattr(found, name_there) if name_there else found)
            except (ImportError, AttributeError):  # a torch without RPC lacks it
                delattr(module, name)


# ---------------------------------------------------------------------- children of this process

_INSTALL = """
import sys
if {root!r} not in sys.path:
    sys.path.append({root!r})
from farcall.compat import install
install()
"""


class _Installation:
    """An object whose unpickling installs farcall."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        return exec, (_INSTALL.format(root=root),)


def _take_along() -> Undo:
    """Install farcall in processes that ``multiprocessing`` starts.

    A forked process is a copy and needs nothing. A spawned one, or one of a fork server, first unpickles its
    preparation data, before it imports the program's main module again; the installation rides there.
    """
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"farcall": _Installation(), **prepare(name)}

    return patch(spawn, "get_preparation_data", get_preparation_data)
