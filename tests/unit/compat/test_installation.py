"""Putting farcall in the place of torch.distributed.rpc, and taking it away: whatever was imported before."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.autograd
import torch.distributed.nn
import torch.distributed.rpc as held_rpc
import torch.distributed.rpc.api as held_api
from torch.distributed.rpc import RRef as held_class  # noqa: F401 (asked for by name below)
from torch.distributed.rpc import rpc_sync as held_function

import farcall
import farcall.compat
from farcall.compat.installation import REPLACED

importlib.import_module("torch.distributed.optim")

STOCK = {name: dict(vars(sys.modules[name])) for name in REPLACED if name in sys.modules}
THIS = sys.modules[__name__]


@pytest.fixture
def installed() -> Iterator[None]:
    farcall.compat.install()
    yield
    farcall.compat.uninstall()


def test_every_way_to_the_modules(installed: None) -> None:
    from farcall.compat import rpc

    assert torch.distributed.rpc is rpc
    assert sys.modules["torch.distributed.rpc"] is rpc
    assert importlib.import_module("torch.distributed.rpc") is rpc
    assert importlib.import_module("torch.distributed.rpc.api") is rpc.api
    assert torch.distributed.rpc.api is rpc.api
    assert torch.distributed.autograd.context.__module__ == "farcall.compat.autograd"
    assert torch.distributed.optim.DistributedOptimizer is farcall.optim.DistributedOptimizer
    assert torch.distributed.nn.RemoteModule.__module__ == "farcall.compat.nn"


def test_what_was_imported_before(installed: None) -> None:
    # This module's own globals, bound long before.
    assert THIS.held_function is farcall.compat.rpc.api.rpc_sync
    assert THIS.held_class is farcall.RRef
    assert THIS.held_rpc is torch.distributed.rpc


def test_a_module_object_held_elsewhere_serves_farcall(held: types.SimpleNamespace) -> None:
    assert held.rpc.init_rpc is farcall.compat.rpc.init_rpc
    assert held.rpc.api.rpc_sync is farcall.compat.rpc.api.rpc_sync
    assert "init_rpc" in dir(held.rpc)
    held.api._ignore_rref_leak = "a value of ours"
    assert farcall.compat.rpc.api._ignore_rref_leak == "a value of ours"
    held.api._ignore_rref_leak = True


@pytest.fixture
def held() -> Iterator[types.SimpleNamespace]:
    """Module objects that are kept where nobody looks for them."""
    kept = types.SimpleNamespace(rpc=held_rpc, api=held_api)
    farcall.compat.install()
    yield kept
    farcall.compat.uninstall()


def test_names_that_torch_itself_took(installed: None) -> None:
    from torch._C._distributed_rpc import PyRRef, _is_current_rpc_agent_set

    assert PyRRef is farcall.RRef
    assert torch._jit_internal.RRef is torch._jit_internal.PyRRef is farcall.RRef
    assert torch.jit.annotations.RRef is farcall.RRef
    assert torch.nn.parallel.distributed.RRef is farcall.RRef
    assert not _is_current_rpc_agent_set()
    assert torch._jit_internal.is_rref(farcall.RRef[int])


def test_scripts_that_use_distributed_autograd_compile(installed: None) -> None:
    from torch.jit._builtins import _find_builtin

    assert _find_builtin(torch.distributed.autograd.get_gradients) == "aten::get_gradients"
    assert _find_builtin(torch.distributed.autograd.backward) == "aten::dist_backward"


@pytest.mark.parametrize("module_name", sorted(STOCK))
def test_every_name_of_torch_is_there(installed: None, module_name: str) -> None:
    new = sys.modules[module_name]
    made_there = {
        name
        for name, value in STOCK[module_name].items()
        if not name.startswith("__") and getattr(value, "__module__", None) == module_name
    }
    assert {name for name in made_there - NOT_OURS if not hasattr(new, name)} == set()


@pytest.mark.parametrize("module_name", ["torch._C._distributed_rpc", "torch.distributed.rpc"])
def test_every_name_of_the_package_is_there(installed: None, module_name: str) -> None:
    # Whatever it has, wherever it has it from.
    names = {name for name, value in STOCK[module_name].items() if not isinstance(value, types.ModuleType)}
    elsewhere = {"Generator", "Store", "Tuple", "timedelta", "urlparse", "rendezvous_iterator"}
    assert {name for name in names - elsewhere if not hasattr(sys.modules[module_name], name)} <= DUNDER


DUNDER = {"__annotations__", "__file__", "__path__", "__cached__"}

NOT_OURS = {
    *("T", "_P", "_R", "GenericWithOneTypeVar", "_grad_t"),  # variables for types
    *("_backend_type_repr", "_backend_type_doc"),
}


@pytest.mark.parametrize("chosen", [None, "0", "1"])
def test_process_groups_are_complete_unless_the_user_chose(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_DIST_INIT_BARRIER"
    monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(name, chosen)
    farcall.compat.install()
    assert torch.distributed.distributed_c10d._is_barrier_after_init() == int(chosen or "1")  # type: ignore[attr-defined]
    farcall.compat.uninstall()
    assert os.environ.get(name) == chosen


@pytest.mark.parametrize("name", ["_deserialize"])
def test_methods_of_references_that_are_not_served_say_so(installed: None, name: str) -> None:
    with pytest.raises(farcall.errors.RpcError, match="a part of the old RPC agent: "):
        getattr(torch.distributed.rpc.RRef, name)()


def test_all_is_as_before_after_uninstall() -> None:
    before = {name: sys.modules[name] for name in REPLACED if name in sys.modules}
    captured = (torch._jit_internal.RRef, torch.nn.parallel.distributed.RRef, torch.futures.wait_all)
    finders = list(sys.meta_path)
    farcall.compat.install()
    farcall.compat.install()
    assert farcall.compat.is_installed()
    farcall.compat.uninstall()
    assert not farcall.compat.is_installed()
    assert {name: sys.modules[name] for name in REPLACED if name in sys.modules} == before
    assert (torch._jit_internal.RRef, torch.nn.parallel.distributed.RRef, torch.futures.wait_all) == captured
    assert sys.meta_path == finders
    assert type(held_rpc) is types.ModuleType
    assert THIS.held_function is held_function is held_api.rpc_sync
    for name, module in before.items():
        assert {key: value for key, value in vars(module).items() if STOCK[name].get(key, value) is not value} == {}
    farcall.compat.uninstall()


def test_a_module_that_nobody_imported_yet_is_found(installed: None) -> None:
    from torch.distributed.rpc import rref_proxy

    assert rref_proxy.__name__ == "farcall.compat.rpc.rref_proxy"


def test_not_while_the_old_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._distributed_rpc, "_is_current_rpc_agent_set", lambda: True)
    with pytest.raises(RuntimeError, match="before it"):
        farcall.compat.install()
    assert not farcall.compat.is_installed()


def test_a_module_that_loads_lazily_is_left_alone() -> None:
    spec = importlib.util.find_spec("this")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    sys.modules["this"] = lazy
    try:
        spec.loader.exec_module(lazy)
        farcall.compat.install()
        farcall.compat.uninstall()
        assert type(lazy).__name__ == "_LazyModule"
    finally:
        del sys.modules["this"]
