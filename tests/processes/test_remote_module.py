"""`RemoteModule`: forwards, parameters, signatures, travel, and what it refuses."""

from __future__ import annotations

import gc
import inspect
import pickle
import weakref
from typing import Any, ClassVar

import pytest
import torch
from tests.kit.waiting import wait_until
from torch import nn

import farcall
import farcall.autograd as autograd
from farcall.errors import SerializationError, UnknownWorker
from farcall.nn import RemoteModule
from farcall.nn.remote_module import parse_remote_device
from farcall.testing.cluster import run_cluster


class Net(nn.Module):
    made: ClassVar[list[Any]] = []

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, width)
        self.scale = nn.Parameter(torch.tensor(scale))
        self.dropout = nn.Dropout(1.0)
        Net.made.append(weakref.ref(self))

    def forward(self, x: torch.Tensor, times: int = 1, *, shift: float = 0.0) -> tuple[torch.Tensor, str]:
        """Run it."""
        word = "training" if self.training else "evaluating"
        return self.inner(x) * self.scale * times + shift, word


def alive() -> int:
    gc.collect()
    return sum(module() is not None for module in Net.made)


def make_net() -> Any:
    return farcall.RRef(Net(2))


def not_a_module() -> int:
    return 7


def use_there(module: RemoteModule, x: torch.Tensor) -> Any:
    return module(x, 2), module.forward_async(x).wait(), inspect.signature(module.forward)


def forwards(rank: int) -> None:
    if rank:
        return
    x = torch.rand(4, 3)
    with torch.no_grad():
        twin = Net(2, 3.0)(x)[0]
    for where in ("w1", "w1/cpu", "rank:1/cpu", farcall.get_worker_info("w1")):
        module = RemoteModule(where, Net, args=(2,), kwargs={"scale": 3.0})
        torch.testing.assert_close(module(x)[0].detach(), twin)
        torch.testing.assert_close(module.forward(x, times=2)[0].detach(), 2 * twin)
        torch.testing.assert_close(module.forward_async(x, shift=1.0).wait()[0].detach(), twin + 1.0)
    parameters = inspect.signature(module.forward).parameters
    assert list(parameters) == ["x", "times", "shift"]
    assert parameters["times"].default == 1
    assert list(inspect.signature(module.forward_async).parameters) == ["x", "times", "shift"]
    for wrong in ((), (x, 1, 2.0)):
        with pytest.raises(TypeError, match="argument"):
            module(*wrong)
    assert module.on.name == "w1"
    assert "on=w1, device=cpu" in repr(module)
    assert module(x)[1] == "training"
    assert module.eval() is module
    assert not module.training
    assert module(x)[1] == "evaluating"
    assert module.train()(x)[1] == "training"
    assert module.get_module_rref().owner_name() == "w1"
    assert len(module.remote_parameters()) == 3
    assert len(module.remote_parameters(recurse=False)) == 1
    # To oneself, through a reference that exists already, and with a function that makes the module.
    near = RemoteModule("w0", Net, (2, 3.0))
    torch.testing.assert_close(near(x)[0].detach(), twin)
    rref = farcall.rpc_sync("w1", make_net)
    over = RemoteModule.init_from_module_rref("w1", rref)
    torch.testing.assert_close(over(x)[0].detach() * 3.0, twin)
    with pytest.raises(ValueError, match="lives on w1"):
        RemoteModule.init_from_module_rref("w0", rref)
    with pytest.raises(TypeError, match="RRef"):
        RemoteModule.init_from_module_rref("w0", Net(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"module_cls is a module already, a Net: .*init_from_module_rref"):
        RemoteModule("w1", Net(2))
    assert RemoteModule("w1", nn.Sequential, (nn.Linear(3, 5), nn.ReLU()))(x).shape == (4, 5)
    # The modules live as long as somebody refers to them.
    wait_until(lambda: farcall.rpc_sync("w1", alive) == 2, "the end of those that are no longer used")
    del module, over, rref
    wait_until(lambda: farcall.rpc_sync("w1", alive) == 0, "the end of the modules")


def test_forwards_parameters_and_lifetime() -> None:
    run_cluster(2, forwards)


def trained(rank: int) -> None:
    if rank:
        return
    x = torch.rand(4, 3)
    module = RemoteModule("w1", Net, (2,))
    optimizer = farcall.optim.DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    twin = Net(2)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        with autograd.context() as context_id:
            loss = (module(x)[0] ** 2).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        twin_optimizer.zero_grad()
        twin_loss = (twin(x)[0] ** 2).sum()
        twin_loss.backward()
        twin_optimizer.step()
        assert torch.equal(loss, twin_loss)


def test_training_one_is_training_a_module() -> None:
    run_cluster(2, trained)


class Named(RemoteModule):
    """A user's own kind."""


def name_of(module: RemoteModule) -> tuple[str, str]:
    return type(module).__name__, module.on.name


def sent_around(rank: int) -> None:
    if rank:
        return
    x = torch.rand(4, 3)
    module = RemoteModule("w1", Net, (2,)).eval()
    wanted = module(x)[0].detach()
    for name in ("w0", "w1", "w2"):
        (twice, _), (once, word), signature = farcall.rpc_sync(name, use_there, (module, x))
        torch.testing.assert_close(twice.detach(), 2 * wanted)
        torch.testing.assert_close(once.detach(), wanted)
        assert word == "evaluating"
        assert list(signature.parameters) == ["x", "times", "shift"]
    # Inside a module of this worker, as a part of it.
    whole = nn.Sequential(nn.Linear(3, 3))
    whole.append(module)
    assert whole(x)[0].shape == (4, 2)
    with pytest.raises(SerializationError, match="can only be pickled when using RPC: send it as an argument"):
        pickle.dumps(module)
    derived = Named("w1", Net, (2,))
    assert farcall.rpc_sync("w2", name_of, (derived,)) == ("Named", "w1")


def test_one_can_be_sent_and_shared() -> None:
    run_cluster(3, sent_around)


def refusals(rank: int) -> None:
    if rank:
        return
    module = RemoteModule("w1", Net, (2,))
    with pytest.raises(ValueError, match=r"Method ``parameters`` not supported.*``remote_parameters``"):
        module.parameters()
    for name in ("to", "cuda", "state_dict", "register_buffer", "zero_grad", "children", "share_memory", "half"):
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)()
    with pytest.raises(ValueError, match=r"returns an instance of <class nn\.Module>"):
        RemoteModule("w1", not_a_module)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="width"):
        RemoteModule("w1", Net)
    with pytest.raises(UnknownWorker, match="stranger"):
        RemoteModule("stranger/cpu", Net, (2,))
    with pytest.raises(RuntimeError, match="CUDA devices, and no cuda:99"):
        RemoteModule("w1/cuda:99", Net, (2,))


def test_what_makes_no_sense_is_refused() -> None:
    run_cluster(2, refusals)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "could not parse"),
        ("w1/", "could not parse"),
        ("/cpu", "could not parse"),
        ("w1/cpu/0", "could not parse"),
        ("w1/nonsense", "could not parse"),
        ("rank:x/cpu", "is not a rank"),
        ("cpu", "names no worker"),
        ("cuda:0", "names no worker"),
    ],
)
def test_a_device_that_cannot_be_read(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_remote_device(text)


def test_devices() -> None:
    assert parse_remote_device("w1") == ("w1", torch.device("cpu"))
    assert parse_remote_device("w1/cuda:1") == ("w1", torch.device("cuda:1"))
    assert parse_remote_device("rank:3/cpu") == (3, torch.device("cpu"))
    with pytest.raises(TypeError):
        parse_remote_device(3)  # type: ignore[arg-type]
