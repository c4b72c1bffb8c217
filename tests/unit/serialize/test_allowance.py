"""What others may name here: exactly what the table says, refused before anything is imported or called."""

from __future__ import annotations

import collections
import datetime
import enum
import functools
import operator
import os
import pickle
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tests.fuzz.mutations import mutate, rounds

from farcall.errors import InitError, NotAllowed, RemoteError, SerializationError
from farcall.protocol.frames import REQUEST, Frame
from farcall.rpc import shared_tensor
from farcall.serialize import (
    decode_function,
    encode_function,
    read_value,
    restrict,
    use_rpc_pickler,
    write_call,
    write_value,
)
from farcall.serialize.allowance import Allowance, loads, read_table
from farcall.serialize.failures import decode_failure, encode_failure
from farcall.serialize.rebuild import CODES, _view_of, rebuild_as, rebuild_special, rebuild_storage


class Known:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


class Unknown:
    pass


class Callable:
    """Like a module of a model: what calls an instance runs the program's code."""

    called: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> torch.Tensor:
        Callable.called = arguments
        return torch.ones(1)


class Role(enum.Enum):
    READER = "reader"
    ADMIN = "admin"


class Filled:
    """Not a container, although it has the methods of one."""

    filled: tuple[Any, ...] = ()

    def __setitem__(self, *arguments: Any) -> None:
        Filled.filled = arguments

    def extend(self, *arguments: Any) -> None:
        Filled.filled = arguments

    append = update = add = extend


class Items(list):  # type: ignore[type-arg]
    pass


def known(x: int) -> int:
    return x


@torch.jit.script
def scripted(x: int) -> int:
    return x


def unknown(x: int) -> int:
    return x


@pytest.fixture(autouse=True)
def _table() -> Iterator[None]:
    restrict(Allowance([known, torch.add, "json:dumps"], [Known, Callable, Role, Filled, Items]))
    yield
    restrict(None)


def sent(value: Any) -> Any:
    frame = Frame(REQUEST)
    write_value(frame, value)
    return read_value(Frame(REQUEST, payload=frame.payload, buffers=[memoryview(bytearray(b)) for b in frame.buffers]))


def readable(value: object) -> str:
    """The name of a case, the same in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))[:40]


@pytest.mark.parametrize(
    "value",
    [
        (1, 2.5, "text", b"bytes", None, True, [1], {"a": (1,)}, 10**40),
        {1, 2},
        frozenset({1}),
        bytearray(b"x"),
        complex(1, 2),
        range(3),
        collections.OrderedDict(a=1),
        collections.deque([1]),
        datetime.datetime(2026, 11, 16, tzinfo=datetime.UTC),
        Fraction(1, 3),
        torch.float32,
        torch.device("cpu"),
        torch.Size([1, 2]),
        Known([Known(1), {"x": 2}]),
        ValueError("an error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_data_and_the_classes_of_the_table_are_read(value: Any) -> None:
    found = sent(value)
    assert type(found) is type(value)
    assert str(found) == str(value) or found == value


def test_tensors_and_arrays_are_read() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    for tensor in (
        x,
        x.t(),
        x[:, 1],
        x.requires_grad_(),
        torch.nn.Parameter(x.detach()),
        torch.zeros(0),
        x.to_sparse(),
    ):
        found = sent({"tensor": tensor, "more": {1}})["tensor"]
        assert type(found) is type(tensor)
        assert torch.equal(found.to_dense(), tensor.to_dense())
    array = np.arange(5)
    assert (sent([array, {1}])[0] == array).all()


class Exploit:
    """Runs something while it is unpickled."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


EXPLOITS = [
    Exploit(os.system, ("touch /tmp/farcall-owned",)),
    Exploit(eval, ("1",)),
    Exploit(getattr, (Known, "__init__")),
    Exploit(functools.partial, (os.getpid,)),
    Exploit(operator.attrgetter, ("x",)),
    Exploit(__import__, ("os",)),
    Exploit(type, ("X", (), {})),
    Exploit(unknown, (1,)),
    Exploit(known, (1,)),  # may be called, by a request, and not while a message is read
    Exploit(torch.load, ("/tmp/x",)),
    Exploit(torch.jit.load, ("/tmp/x",)),
    Exploit(object.__reduce_ex__, (1, 2)),
    Unknown(),
    Unknown,
    known,
    lambda: 1,
    Known(1).__init__,  # type: ignore[misc]
    np.frombuffer,
    sys.modules,
]


@pytest.mark.parametrize("value", EXPLOITS, ids=readable)
def test_nothing_else_is(value: Any) -> None:
    try:
        written = pickle.dumps(value, 5)
    except Exception:
        pytest.skip("pickle cannot write it either")
    with pytest.raises(NotAllowed, match=r"farcall\.allow"):
        loads(written)
    assert not os.path.exists("/tmp/farcall-owned")


def made_by_hand(value: Any) -> bytes:
    """A part of a pickle."""
    return pickle.dumps(value, 2)[2:-1]


_DTYPE = b"cnumpy\ndtype\n"
_MULTIARRAY = np.array(0).__reduce__()[0].__module__.encode()


@pytest.mark.parametrize(
    "value",
    [
        Exploit(torch.Tensor, (1000,)),  # memory as others left it
        Exploit(np.ndarray, ((1000,),)),
        Exploit(set, (range(1 << 40),)),  # a few bytes that hold the interpreter, and take all memory
        Exploit(collections.deque, (range(1 << 40),)),
        Exploit(bytearray, (1 << 40,)),
        Exploit(Fraction, ("1e999999999",)),
        Exploit(torch._utils._rebuild_sparse_tensor, (torch.sparse_coo, (1, 2, 3))),
        Exploit(rebuild_special, (set, (range(1 << 40),), False, None)),
    ],
    ids=lambda value: readable(value.reduced),
)
def test_what_is_known_is_called_with_plain_arguments_only(value: Any) -> None:
    with pytest.raises(NotAllowed, match="arguments"):
        loads(pickle.dumps(value, 5))


def test_no_state_of_a_dtype_makes_numpy_take_numbers_for_addresses() -> None:
    objects = _DTYPE + made_by_hand(("O8", False, True)) + b"Rq\x64"
    state = made_by_hand((3, "|", None, None, None, -1, -1, 0)) + b"b0"  # without the flags of objects
    fields = made_by_hand((3, "|", None, ("a",), {"a": (np.dtype("f8"), 1 << 30)}, 1, 1, 16))
    scalar = b"c" + _MULTIARRAY + b"\nscalar\n(h\x64C\x08AAAAAAA\0tR."
    for data in (objects + state + scalar, _DTYPE + made_by_hand(("V1", False, True)) + b"R" + fields + b"b."):
        with pytest.raises(NotAllowed, match="dtype"):
            loads(b"\x80\x03" + data)


def test_an_array_gets_its_memory_once() -> None:
    array = pickle.dumps(np.arange(3, dtype="u1"), 3)
    assert array[-2:] == b"b."
    state = pickle.dumps((1, (1,), np.dtype("u1"), False, b"x"), 3)[2:-1]
    with pytest.raises(NotAllowed, match="an array that has one"):
        loads(b"\x80\x03" + array[2:-1] + state + b"b.")


@pytest.mark.parametrize("kind", ["f4", ">i4", "S8", "U4", "V8", "M8[ns]", "m8[s]", "?", "c16", "O"])
@pytest.mark.parametrize("protocol", [3, 5])
def test_arrays_of_each_kind_are_read(kind: str, protocol: int) -> None:
    array = np.zeros(3, kind)
    found = loads(pickle.dumps(array, protocol))
    assert found.dtype == array.dtype or kind == ">i4"  # of which numpy makes the order of this machine
    assert found.tolist() == array.tolist()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_has_its_indices_within_it() -> None:
    kept = len(torch._utils._sparse_tensors_to_validate)
    good = torch.eye(3).to_sparse()
    bad = torch.sparse_coo_tensor(torch.tensor([[1 << 33]]), torch.ones(1), (10,), check_invariants=False)
    rows = torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([1 << 33]), torch.ones(1), (1, 10), check_invariants=False
    )
    assert torch.equal(sent([good])[0].to_dense(), good.to_dense())
    for tensor in (bad, rows):
        with pytest.raises(SerializationError, match=r"found index|col_indices"):
            sent([tensor])
    assert len(torch._utils._sparse_tensors_to_validate) == kept


@pytest.mark.parametrize(
    "name",
    [
        "aten.add.__class__",
        "aten.add.__class__.__module__.__class__.format",
        "aten.add.__class__.__init__.__builtins__.clear",
        "aten.add.default.__class__",
        "aten.add.op",
    ],
)
def test_an_operator_leads_to_its_overloads_only(name: str) -> None:
    for kind in (b"o", b"b"):
        with pytest.raises(SerializationError):
            decode_function(kind + name.encode())
    assert decode_function(b"oaten.add.Tensor") is torch.ops.aten.add.Tensor


def called(function: Any, *arguments: Any) -> bytes:
    """A pickle that calls ``function``, without its end."""
    return pickle.dumps(Exploit(function, arguments), 3)[:-1]


@pytest.mark.parametrize(
    ("function", "before", "after"),
    [(rebuild_special, (), (False, None)), (rebuild_as, (torch.Tensor,), (0,)), (rebuild_storage, (), ())],
)
def test_no_instance_that_poses_as_a_function_is_called(function: Any, before: Any, after: Any) -> None:
    instance = Callable()
    instance.__module__, instance.__name__ = "torch._utils", "_rebuild"  # type: ignore[attr-defined]
    payload = called(function, *before, instance, ("mine",), *after) + b".T"
    with pytest.raises(NotAllowed, match="arguments"):
        read_value(Frame(REQUEST, payload=payload))
    assert not Callable.called


def test_nobodys_enum_is_changed() -> None:
    member = called(Role, "reader")
    assert loads(member + b".") is Role.READER
    for state in ({"_value_": "admin", "_name_": "ADMIN"}, (None, {"_value_": "admin"})):
        with pytest.raises(NotAllowed, match="state of a Role"):
            loads(member + made_by_hand(state) + b"b.")
    assert Role.READER.value == "reader"


@pytest.mark.parametrize("kind", [Known, ValueError])
def test_no_state_makes_an_object_another_one(kind: Any) -> None:
    fresh = called(ValueError, "x") if kind is ValueError else b"\x80\x03" + made_by_hand(Known) + b")\x81"
    for attributes in ({"__class__": Callable}, {"__dict__": {}}, {"__setstate__": Known}, {"__init__": 1}):
        states = (attributes,) if kind is ValueError else (attributes, (None, attributes))
        for state in states:
            with pytest.raises(NotAllowed, match="setting '__"):
                loads(fresh + made_by_hand(state) + b"b.")


@pytest.mark.parametrize("opcodes", [b"K\x01a.", b"(K\x01e.", b"K\x01K\x02s.", b"(K\x01K\x02u.", b"(K\x01\x90."])
def test_only_containers_are_filled(opcodes: bytes) -> None:
    fresh = b"\x80\x04" + made_by_hand(Filled) + b")\x81"
    with pytest.raises(NotAllowed, match="filling a Filled"):
        loads(fresh + opcodes)
    assert not Filled.filled
    items = Items([1, 2])
    items.more = {1: collections.deque([1]), "set": {3}}  # type: ignore[attr-defined]
    found = loads(pickle.dumps(items, 4))
    assert (type(found), found, found.more) == (Items, items, items.more)  # type: ignore[attr-defined]


class Own:
    """A pickler of the program's, which reads anything."""

    def serialize(self, value: Any) -> tuple[bytes, list[Any]]:
        return pickle.dumps(value), []

    def deserialize(self, data: bytes, tensors: Any) -> Any:
        return pickle.loads(data)


def test_no_pickler_goes_round_the_table() -> None:
    with pytest.raises(RuntimeError, match=r"beside farcall\.allow"), use_rpc_pickler(Own()):
        pass
    restrict(None)
    frame = Frame(REQUEST)
    with use_rpc_pickler(Own()):
        write_call(frame, (os.getpid, (), {}))
        with pytest.raises(RuntimeError, match="use_rpc_pickler"):
            restrict(Allowance([known], []))
    restrict(Allowance([known], []))
    with pytest.raises(NotAllowed, match="installed pickler"):
        read_value(Frame(REQUEST, payload=frame.payload))


HANDMADE = [
    # a class of the table, or a function that every message knows, is given state: its attributes would change
    b"\x80\x04c" + f"{__name__}\nKnown\n".encode() + b"N}\x8c\x05valueK\x01s\x86b.",
    b"\x80\x04cfarcall.serialize.rebuild\nrebuild_inline\n}\x8c\x01xK\x01sb.",
    # names with dots lead from what is known to what is not
    b"\x80\x04\x8c\x0cdatetime\x8c\x1cdatetime.__init__.__globals__\x93.",
    b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
    b"cos\nsystem\n(S'touch /tmp/farcall-owned'\ntR.",
    b"(S'touch /tmp/farcall-owned'\nios\nsystem\n.",
    b"\x80\x02\x82\x01.",  # an extension that nobody registered
    b"\x80\x04P1\n.",
]


@pytest.mark.parametrize("data", HANDMADE)
def test_pickles_made_by_hand_get_no_further(data: bytes) -> None:
    with pytest.raises(Exception) as caught:
        loads(data)
    assert not isinstance(caught.value, SystemExit)
    assert not hasattr(Known, "value")
    assert not os.path.exists("/tmp/farcall-owned")


def test_functions_are_found_by_their_names_letter_by_letter() -> None:
    assert decode_function(encode_function(known)) is known
    assert decode_function(encode_function(Known)) is Known
    assert decode_function(encode_function(torch.add)) is torch.add
    assert decode_function(b"baten.add.Tensor") is not None
    for data in (
        encode_function(unknown),
        encode_function(os.system),
        encode_function(torch.load),
        encode_function(Known)[:-1],
        b"p" + __name__.encode() + b"\0known.__globals__",
        b"p" + __name__.encode() + b"\0Known.__init__",
        b"baten.mul.Tensor",
        b"o__class__.__init__",
        b"sunknown",
        b"k" + pickle.dumps(os.getpid),
        b"pfarcall.rpc.owned_values\0methods.of___class__",
        b"pfarcall.rpc.owned_values\0methods.of_a.__globals__",
        b"pfarcall.rpc.owned_values\0methods",
        b"pfarcall.rpc.owned_values\0runtime_of_thread",
    ):
        with pytest.raises(NotAllowed, match="is not allowed here"):
            decode_function(data)


@pytest.mark.parametrize("name", ["lend", "lend_memory", "settle", "read", "write"])
def test_shared_tensors_are_read_and_written_in_groups_that_allow_little(name: str) -> None:
    function = getattr(shared_tensor, name)
    assert decode_function(encode_function(function)) is function


def test_what_is_refused_is_not_imported() -> None:
    sys.modules.pop("this", None)
    with pytest.raises(NotAllowed, match=r"'this\.d' is not allowed"):
        decode_function(b"pthis\0d")
    with pytest.raises(NotAllowed, match=r"this\.d"):
        loads(b"cthis\nd\n.")
    assert "this" not in sys.modules


def test_a_name_that_was_known_before_is_not_known_after() -> None:
    restrict(None)
    assert decode_function(encode_function(unknown)) is unknown
    restrict(Allowance([known], []))
    with pytest.raises(NotAllowed):
        decode_function(encode_function(unknown))


def test_methods_are_of_classes_of_the_table() -> None:
    table = Allowance([], [Known])
    table.check_method(Known(1), "value")
    for value in (Unknown(), 1, torch.zeros(1), Known):
        with pytest.raises(NotAllowed, match="the method 'run' of a"):
            table.check_method(value, "run")


TABLE = {"functions": [known], "classes": ["collections:Counter"]}
NO_TABLE = {"function": [known]}


def test_a_table_may_be_named() -> None:
    assert read_table(f"{__name__}:TABLE").classes == {("collections", "Counter")}
    for path in (f"{__name__}:NO_TABLE", f"{__name__}:nothing", "no_such_module:table"):
        with pytest.raises(InitError, match=r"table"):
            read_table(path)


@pytest.mark.parametrize("value", [3, "name", ":x", lambda: 1])
def test_what_names_nothing_is_refused_at_once(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Allowance([value], [])


@pytest.mark.parametrize(
    ("shape", "strides", "offset"), [((5,), (1,), 0), ((2, 2), (3, 1), 0), ((1,), (1,), 4), ((4,), (1,), -1)]
)
def test_a_tensor_does_not_make_its_storage_larger(shape: Any, strides: Any, offset: int) -> None:
    first = torch.ones(4)
    with pytest.raises(ValueError, match=r"outside the memory|no sense"):
        _view_of(first, CODES[torch.float32], shape, strides, offset)
    assert first.untyped_storage().nbytes() == 16
    assert _view_of(first, CODES[torch.float32], (2, 2), (2, 1), 0).tolist() == [[1.0, 1.0]] * 2


def test_scripts_go_by_their_name() -> None:
    data = encode_function(scripted)
    assert data is not None
    with pytest.raises(NotAllowed, match="scripted"):
        decode_function(data)
    for named in (scripted, f"{__name__}:scripted"):
        restrict(Allowance([named], []))
        assert decode_function(data).qualified_name == scripted.qualified_name


FORMS = (b"", b"T", b"S", b"C", b"D", b"F")


class TestDataOnly:
    """Plain data and tensors, and no pickle, whatever is in it."""

    @pytest.fixture(autouse=True)
    def _data(self) -> Iterator[None]:
        restrict(Allowance([known, torch.add], [], "data"))
        yield
        restrict(None)

    @pytest.mark.parametrize("compiled", [True, False])
    def test_plain_data_and_tensors_travel(self, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not compiled:
            monkeypatch.setattr("farcall.serialize.pickler.write_flat", lambda *_: None)
        shared = [1]
        x = torch.arange(6.0).reshape(2, 3)
        value = (1, 2.5, "text", b"b" * 100_000, None, True, {"a": (shared, shared), 2: []}, x, x.t(), x[1:], x)
        found = sent(value)
        assert found[:7] == value[:7]
        for one, other in zip(found[7:], value[7:], strict=True):
            assert torch.equal(one, other)
        assert torch.equal(sent(torch.nn.Parameter(x)), x)
        assert torch.equal(sent(torch.arange(100_000)), torch.arange(100_000))

    @pytest.mark.parametrize("value", [{1}, 10**40, Fraction(1), np.ones(2), known, {(): 1}, Known(1)], ids=readable)
    def test_what_would_need_a_pickle_is_not_sent(self, value: Any) -> None:
        with pytest.raises(SerializationError, match=r"cannot be sent without pickle.*trust='data'"):
            sent([value])

    @pytest.mark.parametrize("form", FORMS)
    def test_no_pickle_is_read(self, form: bytes) -> None:
        for payload in (pickle.dumps((1, None)), pickle.dumps(os.getpid), b"\x80\x05N."):
            with pytest.raises(SerializationError):
                read_value(Frame(REQUEST, payload=payload + form))
        with pytest.raises(NotAllowed, match="a pickle is not allowed"):
            loads(b"anything")

    def test_pickle_is_never_entered_whatever_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def entered(*_: Any, **__: Any) -> None:
            raise SystemExit("pickle was entered")

        written = [pickle.dumps(value) for value in ((1, None), os.getpid, torch.ones(2))]
        frame = Frame(REQUEST)
        write_value(frame, ([1, "text"], torch.ones(2)))
        written.append(bytes(frame.payload))
        # Undone before the restriction is lifted: lifting it takes whatever `pickle.loads` is then.
        with monkeypatch.context() as patch:
            patch.setattr(pickle, "loads", entered)
            patch.setattr(pickle._Unpickler, "load", entered)  # type: ignore[attr-defined]
            for _, chance in rounds(3000):
                payload = mutate(chance, chance.choice(written), written) + chance.choice(
                    (b"", b"F", b"T", b"S", b"C", b"D")
                )
                with suppress(SerializationError):
                    read_value(Frame(REQUEST, payload=payload or b"F", buffers=()))

    def test_only_functions_that_are_named_are_called(self) -> None:
        assert decode_function(encode_function(known)) is known  # type: ignore[arg-type]
        for data in (
            b"pos\0getpid",
            b"pfarcall.rpc.owned_values\0fetch",
            b"pfarcall.rpc.owned_values\0methods.of_run",
        ):
            with pytest.raises(NotAllowed):
                decode_function(data)

    def test_failures_travel_as_texts(self) -> None:
        for error in (ValueError("why"), NotAllowed("no"), KeyError("k"), Known):
            raised = error if isinstance(error, Exception) else type("Own", (Exception,), {})("own")
            found = decode_failure(encode_failure(raised, "w1"))
            assert str(raised) in str(found)
            assert isinstance(found, type(raised) if isinstance(raised, (ValueError, NotAllowed)) else RemoteError)

    def test_classes_and_data_do_not_go_together(self) -> None:
        with pytest.raises(ValueError, match="leave classes out"):
            Allowance([], [Known], "data")
        with pytest.raises(ValueError, match="'calls' or 'data'"):
            Allowance([], [], "everything")  # type: ignore[arg-type]
