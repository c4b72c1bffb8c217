"""Functions by name: what may be named, and that names are looked up anew."""

import functools
import operator
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from tests.kit.values import encode

from farcall.errors import FunctionNotFound, SerializationError
from farcall.protocol.frames import MAX_FUNCTION_BYTES
from farcall.serialize import TablePickler, decode_function, encode_function, use_rpc_pickler
from farcall.serialize.code import MAIN
from farcall.serialize.functions import forget_names


def plain(x):
    return x


@functools.wraps(plain)
def wrapped(x):
    return x


wrapped.__qualname__ = wrapped.__name__ = "wrapped"


@functools.lru_cache
def cached(x):
    return x


class Owner:
    @staticmethod
    def static():
        return "static"

    @classmethod
    def of_class(cls):
        return cls.__name__

    def method(self):
        return "method"

    def __call__(self):
        return "called"

    class Inner:
        @staticmethod
        def deep():
            return "deep"


class Heir(Owner):
    pass


NAMED = [
    plain,
    wrapped,
    cached,
    Owner,
    Owner.Inner,
    Owner.static,
    Owner.method,
    Owner.Inner.deep,
    Heir.static,
    torch.add,
    torch.relu,
    torch.conv2d,
    torch._C._VariableFunctions.mul,
    torch.ones,
    torch.Tensor.add_,
    torch.Tensor,
    torch.Size,
    torch.linalg.norm,
    torch.fft.fft,
    torch.special.erf,
    F.gelu,
    F.linear,
    F.relu,
    F.max_pool2d,
    operator.add,
    len,
    dict,
    dict.fromkeys,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add,
    pickle.dumps,
]


@pytest.mark.parametrize("function", NAMED, ids=lambda function: getattr(function, "__qualname__", str(function)))
def test_named_functions(function):
    for _ in range(3):
        data = encode_function(function)
        assert type(data) is bytes
        found = decode_function(memoryview(data))
        assert found is function or found == function


def test_class_methods_keep_the_class_they_were_taken_from():
    assert decode_function(encode_function(Owner.of_class))() == "Owner"
    assert decode_function(encode_function(Heir.of_class))() == "Heir"


@pytest.mark.parametrize(
    "function",
    [Owner().method, Owner(), functools.partial(plain, 1), [].append, torch.nn.Linear(1, 1), "x".join],
    ids=lambda function: str(function)[:30],
)
def test_everything_else_goes_with_the_arguments(function):
    assert encode_function(function) is None


def test_lambdas_and_local_functions_are_refused_with_advice():
    def local():
        pass

    class Local:
        @classmethod
        def of_class(cls):
            pass

    for function in (lambda: 1, local, Local, Local.of_class):
        with pytest.raises(SerializationError, match=r"module level, or install cloudpickle .*farcall\[notebook\]"):
            encode_function(function)


def test_launched_workers_lack_the_functions_of_the_script(monkeypatch):
    """Without cloudpickle they are refused here, before anything is sent."""

    script = types.ModuleType("__main__")
    exec("def square(x): ...\nclass Table:\n    @classmethod\n    def of_class(cls): ...", script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert encode_function(script.square) == b"p__main__\0square"  # every worker of `farcall run` runs the script
    forget_names()
    monkeypatch.setattr(MAIN, "is_alone", True)
    told = r"do not run your script; .* by cloudpickle: pip install 'farcall\[notebook\]', or put \w+ into a module"
    for function in (script.square, script.Table, script.Table.of_class):
        with pytest.raises(SerializationError, match=told):
            encode_function(function)
    for argument in (script.square, script.Table, script.Table()):
        with pytest.raises(SerializationError, match=told):
            encode(((argument,), {}))


def test_an_installed_pickler_gets_the_function_too():
    encode_function(plain)
    with use_rpc_pickler(TablePickler()):
        assert encode_function(plain) is None
        assert encode_function(lambda: 1) is None
    assert encode_function(plain) is not None


def test_rebinding_on_the_sender_is_noticed(monkeypatch):
    assert encode_function(plain) is not None
    old = plain
    monkeypatch.setattr(f"{__name__}.plain", lambda x: 2)
    with pytest.raises(SerializationError, match="not this object"):
        encode_function(old)
    monkeypatch.undo()
    assert encode_function(old) is not None


def test_rebinding_on_the_callee_is_seen(monkeypatch):
    data = encode_function(plain)
    static = encode_function(Owner.static)
    assert decode_function(data)(1) == 1
    assert decode_function(static)() == "static"
    monkeypatch.setattr(f"{__name__}.plain", lambda x: "patched")
    monkeypatch.setattr(Owner, "static", staticmethod(lambda: "patched"))
    assert decode_function(data)(1) == "patched"
    assert decode_function(static)() == "patched"


def test_function_missing_on_the_callee(monkeypatch):
    data = encode_function(plain)
    decode_function(data)
    monkeypatch.delattr(f"{__name__}.plain")
    with pytest.raises(FunctionNotFound, match=r"test_functions.*has no 'plain'.*does not serialize code") as caught:
        decode_function(data)
    assert isinstance(caught.value, AttributeError)
    assert isinstance(caught.value, RuntimeError)


def test_module_missing_on_the_callee(monkeypatch):
    module = types.ModuleType("only_here_module")
    exec("def f(): return 1", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here_module", module)
    data = encode_function(module.f)
    assert decode_function(data)() == 1
    monkeypatch.delitem(sys.modules, "only_here_module")
    with pytest.raises(FunctionNotFound, match="only_here_module"):
        decode_function(data)


def test_main_module_has_one_name(monkeypatch):
    # In a spawned process the script's module is called __mp_main__, in its parent __main__.
    spawned = types.ModuleType("__mp_main__")
    exec("def job(): return 'spawned'", spawned.__dict__)
    monkeypatch.setitem(sys.modules, "__mp_main__", spawned)
    data = encode_function(spawned.job)
    assert b"__mp_main__" not in data
    with pytest.raises(FunctionNotFound, match="__main__"):
        decode_function(data)
    monkeypatch.setitem(sys.modules, "__main__", spawned)
    assert decode_function(data)() == "spawned"


@pytest.mark.filterwarnings("ignore")
def test_torchscript_functions_go_by_qualified_name():
    function = torch.jit.script(plain_script)
    data = encode_function(function)
    assert decode_function(data)(torch.ones(2)).sum() == 4
    with pytest.raises(FunctionNotFound, match="no TorchScript function"):
        decode_function(data + b"_other")


def plain_script(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("data", [b"", b"?what", b"p\xff\0f", b"oaten.no_such_operator", b"kgarbage", b"pnothing"])
def test_garbage(data):
    with pytest.raises(SerializationError):
        decode_function(data)


def test_a_function_whose_name_is_too_long_for_a_name_travels_with_the_arguments(monkeypatch):
    def long():
        pass

    long.__name__ = long.__qualname__ = "f" * MAX_FUNCTION_BYTES
    monkeypatch.setattr(sys.modules[__name__], long.__name__, long, raising=False)
    for _ in range(2):
        assert encode_function(long) is None
    long.__name__ = long.__qualname__ = "f" * (MAX_FUNCTION_BYTES - 2 - len(__name__))
    monkeypatch.setattr(sys.modules[__name__], long.__name__, long, raising=False)
    assert len(encode_function(long)) == MAX_FUNCTION_BYTES


def test_a_local_function_goes_by_the_bare_name_that_leads_to_it(monkeypatch):
    def found():
        pass

    monkeypatch.setattr("farcall.serialize.code.is_available", lambda: True)
    assert encode_function(found) is None
    monkeypatch.setattr(f"{__name__}.found", found, raising=False)
    assert encode_function(found) == b"p" + __name__.encode() + b"\0found"
    assert decode_function(encode_function(found)) is found
    monkeypatch.delattr(f"{__name__}.found")
    assert encode_function(found) is None
