"""Other kinds of tensors, and objects around them: parameters, subclasses, sparse ones, modules, storages."""

from typing import ClassVar, NamedTuple

import pytest
import torch
from tests.kit.values import assert_same, decode, encode, over_the_wire
from torch import nn

from farcall.errors import SerializationError

pytestmark = pytest.mark.usefixtures("road")


@pytest.mark.parametrize("count", [3, 3000])
def test_parameter(count):
    sent = nn.Parameter(torch.randn(count))
    frozen = nn.Parameter(torch.randn(count), requires_grad=False)
    sent.note = "kept"
    received, received_frozen = over_the_wire((sent, frozen))
    assert_same(received, sent)
    assert_same(received_frozen, frozen)
    assert received.note == "kept"


def test_parameter_and_its_data_share_memory():
    parameter = nn.Parameter(torch.zeros(3))
    received, data = over_the_wire((parameter, parameter.data))
    data[0] = 5
    assert received[0] == 5


def test_uninitialized_parameter():
    assert isinstance(over_the_wire(nn.UninitializedParameter()), nn.UninitializedParameter)


def test_buffer_keeps_its_attributes():
    received = over_the_wire(nn.Buffer(torch.ones(2), persistent=False))
    assert isinstance(received, nn.Buffer)
    assert received.persistent is False


def test_tensor_attributes_may_lead_back_to_the_tensor():
    sent = torch.ones(2)
    sent.me = [sent]
    received = over_the_wire(sent)
    assert received.me[0] is received


class Tagged(torch.Tensor):
    """A subclass with an attribute, whose operations keep the class."""


class Logging(torch.Tensor):
    """A subclass that sees every torch function."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def rebuild_reduced(data):
    return torch.tensor(data).as_subclass(Reduced)


class Reduced(torch.Tensor):
    """A subclass with its own idea of pickling."""

    def __reduce_ex__(self, protocol):
        return rebuild_reduced, ([8.0, 9.0],)


@pytest.mark.parametrize("count", [3, 3000])
def test_subclass_with_attributes(count):
    sent = torch.randn(count).as_subclass(Tagged)
    sent.tag = {"inner": torch.ones(2)}
    received = over_the_wire([sent])[0]
    assert_same(received, sent)
    assert torch.equal(received.tag["inner"], torch.ones(2))


def test_subclass_with_torch_function_is_not_asked():
    sent = torch.randn(3).as_subclass(Logging)
    Logging.seen.clear()
    payload, buffers = encode(sent)
    assert Logging.seen == []
    assert type(decode(payload, buffers)) is Logging


def test_subclass_with_its_own_reduction_keeps_it():
    received = over_the_wire(torch.ones(5).as_subclass(Reduced))
    assert type(received) is Reduced
    assert received.tolist() == [8.0, 9.0]


@pytest.mark.parametrize("size", [4, 100])
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse().coalesce(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_sparse_bsr((2, 2)),
        lambda x: x.to_sparse_bsc((2, 2)),
        lambda x: x.reshape(2, 2, -1).to_sparse(2),
    ],
    ids=["coo", "coalesced", "csr", "csc", "bsr", "bsc", "hybrid"],
)
def test_sparse(convert, size):
    sent = convert(torch.eye(size) * 3)
    received = over_the_wire(sent)
    assert received.layout == sent.layout
    assert received.shape == sent.shape
    assert torch.equal(received.to_dense(), sent.to_dense())


def test_sparse_requires_grad():
    received = over_the_wire(torch.eye(3).to_sparse().requires_grad_(True))
    assert received.requires_grad
    assert received.is_leaf


@pytest.mark.parametrize("count", [4, 4000])
@pytest.mark.filterwarnings("ignore")
def test_quantized(count):
    values = torch.linspace(-1, 1, count)
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        sent = torch.quantize_per_tensor(values, 0.1, 3, dtype)
        received = over_the_wire(sent)
        assert torch.equal(received.int_repr(), sent.int_repr())
        assert (received.q_scale(), received.q_zero_point()) == (sent.q_scale(), sent.q_zero_point())
    sent = torch.quantize_per_channel(
        values.reshape(2, -1), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    )
    received = over_the_wire(sent)
    assert torch.equal(received.int_repr(), sent.int_repr())
    assert torch.equal(received.q_per_channel_scales(), sent.q_per_channel_scales())


def test_meta():
    sent = torch.empty(3, 1 << 40, dtype=torch.float16, device="meta", requires_grad=True)
    received = over_the_wire(sent)
    assert received.device.type == "meta"
    assert (received.shape, received.dtype, received.requires_grad) == (sent.shape, sent.dtype, True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested(layout):
    sent = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=layout)
    received = over_the_wire(sent)
    assert received.is_nested
    assert received.layout == layout
    for one, other in zip(received.unbind(), sent.unbind(), strict=True):
        assert torch.equal(one, other)


def test_zero_tensor():
    received = over_the_wire([torch._efficientzerotensor(3), torch._efficientzerotensor(3000)])
    assert [int(tensor.count_nonzero()) for tensor in received] == [0, 0]


@pytest.mark.parametrize("count", [4, 4000])
def test_resized_away_storage_is_refused(count):
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match="storage"):
        encode([tensor])


def test_module_with_shared_parameters():
    module = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.BatchNorm1d(40))
    module.tied = module[0].weight
    received = over_the_wire(module.eval())
    assert received.tied is received[0].weight
    x = torch.randn(2, 40)
    assert torch.equal(received(x), module(x))
    assert [p.requires_grad for p in received.parameters()] == [p.requires_grad for p in module.parameters()]


def test_packed_sequence():
    packed = nn.utils.rnn.pack_sequence([torch.arange(3), torch.arange(2)])
    received = over_the_wire(packed)
    assert type(received) is type(packed)
    assert torch.equal(received.data, packed.data)


def test_small_torch_objects():
    generator = torch.Generator().manual_seed(3)
    sent = (torch.Size([1, 2]), torch.float16, torch.device("cpu"), torch.strided, torch.preserve_format)
    assert over_the_wire(sent) == sent
    assert type(over_the_wire(sent)[0]) is torch.Size
    assert torch.equal(torch.rand(3, generator=over_the_wire(generator)), torch.rand(3, generator=generator))


@pytest.mark.parametrize("count", [0, 5, 5000])
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_bare_storages(count):
    tensor = torch.arange(count, dtype=torch.float32)
    untyped, typed, received = over_the_wire((tensor.untyped_storage(), tensor.storage(), tensor))
    assert isinstance(untyped, torch.UntypedStorage)
    assert isinstance(typed, torch.TypedStorage)
    assert typed.dtype == torch.float32
    assert typed.tolist() == tensor.tolist()
    assert untyped.nbytes() == tensor.nbytes
    if count:
        received[0] = -1
        assert typed[0] == -1


@pytest.mark.filterwarnings("ignore")
def test_script_module_and_function():
    module = torch.jit.script(nn.Linear(3, 3))
    x = torch.ones(3)
    assert torch.equal(over_the_wire({"m": module})["m"](x), module(x))
    assert over_the_wire(torch.jit.script(plain_add))(x, x).sum() == 6


def plain_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def test_operators_among_the_arguments():
    sent = [torch.add, torch.ops.aten.add.Tensor, torch.ops.aten.mul, torch.Tensor.add_]
    assert all(one is other for one, other in zip(over_the_wire(sent), sent, strict=True))


class Named(NamedTuple):
    number: int
    tensor: torch.Tensor


def make_named(number: int, tensor: torch.Tensor) -> Named:
    return Named(number, tensor)


@pytest.mark.filterwarnings("ignore")
def test_named_tuples_of_torchscript_travel_and_travel_on():
    made = torch.jit.script(make_named)(3, torch.ones(2))
    assert type(made) is not Named  # a class of its own, that no module has
    arrived = over_the_wire(over_the_wire(made))
    assert (arrived.number, type(arrived).__name__) == (3, "Named")
    assert torch.equal(arrived.tensor, torch.ones(2))
