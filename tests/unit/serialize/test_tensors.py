"""Tensors come back equal, with the memory relations they had."""

import copy
import gc
import weakref

import pytest
import torch
from tests.kit.values import assert_same, decode, encode, over_the_wire
from torch import nn

from farcall.errors import SerializationError

pytestmark = pytest.mark.usefixtures("road")
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def sent_bytes(value):
    payload, buffers = encode(value)
    return len(payload) + sum(buffer.nbytes for buffer in buffers)


def raw(tensor):
    """The elements as bytes, for dtypes that cannot be compared."""
    dense = torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    size = dense.numel() * dense.element_size()
    return bytes(bytearray(dense.contiguous().untyped_storage()[:size])) if size else b""


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")
@pytest.mark.parametrize("count", [1, 7, 5000], ids=["one", "small", "large"])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in QUANTIZED], ids=str)
def test_every_dtype(dtype, count):
    size = count * dtype.itemsize
    memory = bytearray(i * 37 % 251 for i in range(size))
    if dtype is torch.bool:
        memory = bytearray(i % 2 for i in range(size))
    sent = torch.frombuffer(memory, dtype=dtype)
    received = over_the_wire(sent)
    assert received.dtype == dtype
    assert received.shape == sent.shape
    assert raw(received) == bytes(memory)


@pytest.mark.parametrize("size", [8, 300], ids=["small", "large"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[::2, 1::3],
        lambda x: x[1:, 2:5],
        lambda x: x[3],
        lambda x: x[3, 4],
        lambda x: x[:0],
        lambda x: x[:, :0],
        lambda x: x[0].expand(5, -1),
        lambda x: x[:, 0],
        lambda x: x.flatten().unfold(0, 3, 1),
        lambda x: x.reshape(-1),
        lambda x: x[None, :, None],
        lambda x: x.to(torch.float64).conj(),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: torch.complex(x, x).t().conj()[1:],
    ],
)
def test_every_geometry(make, size):
    sent = make(torch.arange(size * size, dtype=torch.float32).reshape(size, size))
    received = over_the_wire(sent)
    assert_same(received, sent)
    assert received.is_conj() == sent.is_conj()
    assert received.is_neg() == sent.is_neg()
    if size == 8:
        # Small memory travels as it is; of large memory with wide gaps only the elements do.
        assert received.stride() == sent.stride()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1, 1, 1)])
def test_empty_and_scalar(shape):
    sent = torch.zeros(shape, dtype=torch.int16)
    received = over_the_wire(sent)
    assert_same(received, sent)
    assert received.stride() == sent.stride()


def test_expanded_tensor_sends_its_memory_once_and_stays_expanded():
    sent = torch.ones(1).expand(1_000_000)
    assert sent_bytes(sent) < 500
    assert over_the_wire(sent).stride() == (0,)


@pytest.mark.parametrize("size", [4, 100], ids=["inline", "out of band"])
def test_views_of_one_storage_stay_so(size):
    base = torch.zeros(size, size)
    received, row, column, reinterpreted = over_the_wire((base, base[1], base[:, 2], base.view(torch.int32)))
    received[1, 2] = 7
    assert row[2] == 7
    assert column[1] == 7
    assert reinterpreted[1, 2] == torch.tensor(7.0).view(torch.int32)
    assert row.untyped_storage()._cdata == received.untyped_storage()._cdata
    assert column.untyped_storage()._cdata == received.untyped_storage()._cdata


@pytest.mark.parametrize("size", [4, 100], ids=["inline", "out of band"])
def test_views_met_before_their_base(size):
    base = torch.arange(size * size).reshape(size, size).clone()
    tail, head, all_of_it = over_the_wire((base[-1], base[0], base))
    all_of_it[-1, 0] = -1
    all_of_it[0, 0] = -2
    assert (tail[0], head[0]) == (-1, -2)
    assert torch.equal(all_of_it[1:-1], base[1:-1])


def test_views_of_different_itemsize_with_an_odd_number_of_bytes():
    storage = torch.arange(5003, dtype=torch.uint8)
    wide = storage[:5000].view(torch.float64)
    received_wide, received = over_the_wire((wide, storage))
    assert torch.equal(received, storage)
    received[:8] = 0
    assert received_wide[0] == 0


def test_the_same_tensor_twice_is_one_object():
    tensor = torch.ones(3)
    first, again = over_the_wire([tensor, {"again": tensor}])
    assert first is again["again"]


def test_two_storages_do_not_become_one():
    first, second = over_the_wire((torch.zeros(2000), torch.zeros(2000)))
    first.fill_(1)
    assert second.sum() == 0


def test_temporary_storages_do_not_alias():
    # Storages freed while the message is written must not lend their address to later ones.
    class Making:
        def __init__(self, value):
            self.value = value

        def __reduce__(self):
            return list, ((torch.full((4,), float(self.value)),),)

    received = over_the_wire([Making(i) for i in range(50)])
    assert [int(part[0][0]) for part in received] == list(range(50))


def test_a_small_view_of_a_huge_storage_sends_only_what_it_needs():
    huge = torch.zeros(1 << 22)
    huge[1000:1010] = torch.arange(10.0)
    assert sent_bytes(huge[1000:1010]) < 1000
    assert torch.equal(over_the_wire(huge[1000:1010]), torch.arange(10.0))


def test_far_apart_views_send_only_what_they_need():
    huge = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024).clone()
    sent = [huge[3], huge[900], huge[3, 5:9], huge[899:902]]
    assert sent_bytes(sent) < 30_000
    received = over_the_wire(sent)
    for one, other in zip(received, sent, strict=True):
        assert torch.equal(one, other)
    received[3][1, 0] = -1
    assert received[1][0] == -1
    received[0][5] = -2
    assert received[2][0] == -2


def test_columns_of_a_large_matrix_are_compacted():
    matrix = torch.arange(1000 * 1000, dtype=torch.float32).reshape(1000, 1000).clone()
    sent = [matrix[:, 0], matrix[:, 7], matrix[:, 500:502], matrix[:, 3].expand(2, -1)]
    assert sent_bytes(sent) < 30_000
    for one, other in zip(over_the_wire(sent), sent, strict=True):
        assert torch.equal(one, other)
    assert over_the_wire(matrix[:, 3].expand(2, -1)).stride() == (0, 1)


def test_overlapping_columns_stay_one_storage():
    matrix = torch.zeros(1000, 1000)
    left, right = over_the_wire((matrix[:, 0:2], matrix[:, 1:3]))
    left[5, 1] = 4
    assert right[5, 0] == 4


def test_compact_copy_keeps_conjugation():
    matrix = torch.randn(1000, 1000, dtype=torch.complex64)
    sent = matrix[:, 0].conj()
    received = over_the_wire(sent)
    assert received.is_conj()
    assert torch.equal(received, sent)


def test_buffers_are_plain_bytes_and_keep_their_memory():
    tensor = torch.arange(40_960, dtype=torch.float64)
    expected = raw(tensor)
    payload, buffers = encode((tensor,))
    (buffer,) = buffers
    assert (buffer.format, buffer.itemsize, buffer.contiguous) == ("B", 1, True)
    del tensor
    gc.collect()
    torch.full((40_960,), -1.0, dtype=torch.float64)
    assert bytes(buffer) == expected
    assert len(payload) < 200


def test_a_tensor_is_sent_without_a_copy():
    tensor = torch.zeros(40_960)
    _, (buffer,) = encode(tensor)
    tensor[0] = 1
    assert bytes(buffer[:4]) == raw(tensor[:1])


def test_received_tensor_lies_over_the_buffer_and_keeps_it_alive():
    payload, (buffer,) = encode(torch.zeros(40_960))
    memory = memoryview(bytearray(buffer))
    received = decode(payload, [memory])
    memory[:4] = raw(torch.ones(1))
    assert received[0] == 1
    alive = weakref.ref(memory)
    del memory
    gc.collect()
    assert alive() is not None
    view = received[1:]
    del received
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


def test_read_only_buffers_give_writable_tensors():
    payload, buffers = encode(torch.zeros(40_960))
    received = decode(payload, [memoryview(bytes(buffer)) for buffer in buffers])
    received += 1
    assert received.sum() == 40_960


def test_misaligned_buffers_are_copied_to_aligned_memory():
    payload, (buffer,) = encode(torch.arange(40_960, dtype=torch.float64))
    memory = bytearray(1) + bytearray(buffer)
    received = decode(payload, [memoryview(memory)[1:]])
    assert received.data_ptr() % 8 == 0
    assert torch.equal(received, torch.arange(40_960, dtype=torch.float64))


@pytest.mark.parametrize("count", [3, 3000])
def test_requires_grad_arrives_as_a_leaf(count):
    leaf = torch.ones(count, requires_grad=True)
    for sent in (leaf, leaf * 2, (leaf * 2)[1:]):
        received = over_the_wire(sent)
        assert received.requires_grad
        assert received.is_leaf
        assert torch.equal(received, sent)
    (over_the_wire(leaf) * 3).sum().backward()
    assert leaf.grad is None


def test_requires_grad_with_conj_and_neg_bits():
    sent = torch.randn(4, dtype=torch.complex64, requires_grad=True).conj()
    received = over_the_wire(sent)
    assert received.is_leaf
    assert received.requires_grad
    assert torch.equal(received, sent)


def test_decoding_in_no_grad_keeps_requires_grad():
    with torch.no_grad():
        assert over_the_wire(torch.ones(3, requires_grad=True)).requires_grad


def test_default_device_does_not_matter():
    payload, buffers = encode((torch.ones(3, 3), torch.ones(2000)[1:], torch.ones(0)))
    with torch.device("meta"):
        received = decode(payload, buffers)
    assert all(tensor.device.type == "cpu" for tensor in received)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_both_sides_meet_tensors_in_the_same_order():
    parameter = nn.Parameter(torch.ones(2))
    parameter.extra = torch.full((3,), 2.0)
    value = [
        torch.ones(1),
        torch.eye(2).to_sparse().requires_grad_(True),
        parameter,
        {"x": torch.zeros(3000), "y": torch.zeros(3000)[5:]},
        torch.empty(2, device="meta"),
        torch.ones(4, 4)[1],
    ]
    met = []
    payload, buffers = encode(value, tensors=met)
    rebuilt = []
    decode(payload, [memoryview(bytearray(buffer)) for buffer in buffers], tensors=rebuilt)
    assert [(t.shape, t.layout, t.requires_grad, type(t)) for t in met] == [
        (t.shape, t.layout, t.requires_grad, type(t)) for t in rebuilt
    ]
    assert any(t is parameter for t in met)
    assert any(t is value[1] for t in met)


def test_tensors_are_not_collected_unasked():
    payload, buffers = encode(torch.ones(3))
    assert torch.equal(decode(payload, buffers), torch.ones(3))


def test_a_device_tensor_is_refused():
    class Elsewhere(torch.Tensor):
        is_cpu = False
        is_meta = False

    with pytest.raises(SerializationError, match="device map"):
        encode([torch.ones(2).as_subclass(Elsewhere)])


def test_deep_copies_elsewhere_are_untouched():
    # The extension codes that make messages small must not change what plain pickle or copy do with tensors.
    tensor = torch.ones(3)
    assert torch.equal(copy.deepcopy(tensor), tensor)


def test_elements_stay_as_aligned_as_they_were():
    received = over_the_wire((torch.zeros(1 << 16)[20:40_000], {1}))[0]  # with a set, which goes by pickle
    assert received.storage_offset() * received.element_size() == 20 * 4 % 64


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view, lambda x: torch._neg_view(x.conj())])
def test_negative_and_conjugate_tensors_arrive_as_one_tensor_each(view):
    """Not as views of others, which take a kilobyte each: a message of a megabyte had half a gigabyte of them."""
    x = torch.tensor([1 + 2j, 3 - 4j])
    for requires_grad in (False, True):
        (found,) = over_the_wire([view(x).detach().requires_grad_(requires_grad)])
        assert torch.equal(found.detach(), view(x))
        assert (found.is_neg(), found.is_conj(), found.requires_grad) == (
            view(x).is_neg(),
            view(x).is_conj(),
            requires_grad,
        )
        assert found._base is None
