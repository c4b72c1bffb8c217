"""Putting farcall's modules in the place of torch's, and torch's back.

A module of torch's that is loaded already is replaced in ``sys.modules`` and in its parent, and the old module object,
which programs may hold as ``rpc``, hands every question on to the new one. One that is not loaded yet is found by a
finder when somebody imports it. What was taken out of the old modules by ``from ... import`` is the business of
`captured`.

Owns the table below and the order of things; knows nothing of what the new modules do.

Invariant: after `uninstall` everything that was touched is the object it was before.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from farcall.compat import captured, children
from farcall.imports import find_and_then

__all__ = ["REPLACED", "install", "is_installed", "uninstall"]

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
    "torch.distributed.rpc._utils": "farcall.compat.rpc.membership",
    "torch.distributed.rpc.api": "farcall.compat.rpc.api",
    "torch.distributed.rpc.backend_registry": "farcall.compat.rpc.backend_registry",
    "torch.distributed.rpc.constants": "farcall.compat.rpc.constants",
    "torch.distributed.rpc.functions": "farcall.compat.rpc.functions",
    "torch.distributed.rpc.internal": "farcall.compat.rpc.internal",
    "torch.distributed.rpc.options": "farcall.compat.rpc.options",
    "torch.distributed.rpc.rref_proxy": "farcall.compat.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": "farcall.compat.rpc.server_process_global_profiler",
}
"""Each module of torch's, and what takes its place."""
_IN_PLACE_AT_ONCE = ("torch._C._distributed_autograd", "torch._C._distributed_rpc", "torch.distributed.autograd")
_TARGET = "__farcall_in_its_place__"


class _Forwarding(ModuleType):
    """What an old module becomes: whoever holds it talks to the new one."""

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


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the new module when an old one that was not loaded yet is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in REPLACED:
            return importlib.machinery.ModuleSpec(fullname, self)
        after = captured.AFTER_IMPORT.get(fullname)
        return None if after is None else _find_and_add(fullname, path, after)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what is in sys.modules afterwards.
        new = importlib.import_module(REPLACED[module.__name__])
        _undo.append(lambda: sys.modules.pop(module.__name__, None))  # type: ignore[arg-type]
        sys.modules[module.__name__] = new


def _find_and_add(
    fullname: str, path: Sequence[str] | None, after: Callable[[ModuleType], list[captured.Undo]]
) -> importlib.machinery.ModuleSpec | None:
    """The module as it is, with our names added once it is loaded."""
    return find_and_then(_finder, fullname, path, lambda module: _undo.extend(after(module)))


_finder = _Finder()
_lock = threading.RLock()
_undo: list[captured.Undo] = []
_installed = False


def is_installed() -> bool:
    """Is farcall in the place of ``torch.distributed.rpc`` in this process?"""
    return _installed


def install() -> None:
    """Put farcall in the place of ``torch.distributed.rpc`` and its neighbours.

    It does not matter what was imported before: modules, and functions and classes that other modules took out of
    them with ``from ... import``, are exchanged everywhere. What cannot be reached is an old class or function kept
    elsewhere than in a module: in a closure, an attribute of an object, a default argument. Where that matters, install
    before the program is imported, as ``python -m farcall`` does.

    Processes started by ``multiprocessing``, in whatever way, have it as well. Calling it again changes nothing.
    """
    global _installed
    with _lock:
        # Before the question: where FARCALL_INSTALL is set, this very import installs.
        import torch

        if _installed:
            return
        if not torch.distributed.is_available():
            raise RuntimeError("this torch was built without torch.distributed, whose stores farcall needs")
        _refuse_while_running()
        _installed = True
        try:
            _put_in_place()
        except BaseException:
            uninstall()
            raise


def uninstall() -> None:
    """Put ``torch.distributed.rpc`` back as it was; shut down first.

    What was exchanged is exchanged back. What a program took out of the modules meanwhile, it keeps.
    """
    global _installed
    with _lock:
        if not _installed:
            return
        from farcall.runtime.node.current import slot

        if slot.runtime is not None:
            raise RuntimeError("farcall cannot be taken away while it runs: call shutdown() first")
        while _undo:
            _undo.pop()()
        captured.give_back(REPLACED)
        _installed = False


def _refuse_while_running() -> None:
    native = sys.modules.get("torch._C._distributed_rpc")
    if native is not None and native._is_current_rpc_agent_set():
        raise RuntimeError("torch.distributed.rpc is running in this process: call farcall.compat.install() before it")


def _put_in_place() -> None:
    sys.meta_path.insert(0, _finder)
    _undo.append(lambda: sys.meta_path.remove(_finder))
    present = {name for name in REPLACED if name in sys.modules} | set(_IN_PLACE_AT_ONCE)
    replacements: dict[str, tuple[ModuleType | None, ModuleType]] = {}
    # All new modules first: importing one may import what torch has not loaded yet, and that must not be torn.
    for name in sorted(present):
        replacements[name] = (sys.modules.get(name), importlib.import_module(REPLACED[name]))
    _undo.extend(captured.rebind(replacements))
    for name, (old, new) in replacements.items():
        _replace(name, old, new)
    _undo.extend(captured.complete())
    _undo.append(children.take_along())


def _replace(name: str, old: ModuleType | None, new: ModuleType) -> None:
    parent_name, _, child = name.rpartition(".")
    parent = sys.modules[parent_name]
    if isinstance(parent, _Forwarding):
        parent = getattr(parent, _TARGET)
    _undo.append(captured.setting(parent, child, new))
    sys.modules[name] = new

    def put_back() -> None:
        if old is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = old

    _undo.append(put_back)
    if old is None:
        return
    old.__dict__[_TARGET] = new
    old.__class__ = _Forwarding

    def be_itself() -> None:
        del old.__dict__[_TARGET]
        object.__setattr__(old, "__class__", ModuleType)

    _undo.append(be_itself)
