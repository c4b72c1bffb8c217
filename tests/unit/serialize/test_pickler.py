"""Messages: plain values, arrays, nesting, errors, and a pickler of the user's."""

import functools
import gc
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from tests.kit.values import decode, encode, encode_call

from farcall.errors import FunctionNotFound, SerializationError
from farcall.protocol.frames import RESPONSE, Frame
from farcall.serialize import (
    TablePickler,
    current_decoding,
    decline,
    installed_pickler,
    pickler,
    policy,
    read_value,
    register_reducer,
    use_rpc_pickler,
)


def moved(buffers):
    return [memoryview(bytearray(buffer)) for buffer in buffers]


def over_the_wire(value):
    payload, buffers = encode(value)
    return decode(payload, moved(buffers))


class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __eq__(self, other):
        return (self.x, self.y) == (other.x, other.y)

    __hash__ = None

    def norm(self):
        return self.x + self.y


@pytest.mark.parametrize(
    "value",
    [
        ((), {}),
        (1, "a"),
        None,
        [1.5, True, b"x", bytearray(b"y"), {1, 2}, frozenset({3}), range(3), 1 << 100, 1j],
        {"a": [Point(1, 2), Point], ("t",): ...},
        ["same"] * 3,
        b"z" * 50_000,
        [str(i) for i in range(50_000)],
        functools.partial(int, base=2),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_plain_values(value):
    payload, buffers = encode(value)
    assert len(buffers) == 0
    for form in (payload, memoryview(payload), memoryview(bytearray(payload))):
        received = decode(form)
        if isinstance(value, functools.partial):
            assert received("101") == 5
        else:
            assert received == value


def test_large_bytes():
    value = [b"z" * 200_000, bytearray(b"y" * 100_000)]
    assert over_the_wire(value) == value
    assert over_the_wire(value[0]) == value[0]


def test_bound_method_travels_with_its_object():
    assert over_the_wire(Point(3, 4).norm)() == 7


def test_identity_inside_a_message():
    shared = Point(1, 2)
    first, second = over_the_wire((shared, [shared]))
    assert first is second[0]


def test_one_message_does_not_remember_another():
    shared = ["x"] * 10
    assert over_the_wire((shared,)) == over_the_wire((shared,))
    big = [Point(i, i) for i in range(20_000)]
    assert over_the_wire(big) == big
    assert over_the_wire((shared, shared)) == (shared, shared)


def test_nothing_sent_is_kept_alive():
    point = Point(1, torch.ones(3))
    payload, _ = encode([point])
    watch = weakref.ref(point)
    del point
    gc.collect()
    assert watch() is None
    assert decode(payload)[0].x == 1


@pytest.mark.parametrize("count", [3, 3000])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x[::2],
        lambda x: x.reshape(3, -1).T,
        lambda x: x.astype("f4")[:0],
        lambda x: x.astype(object),
        lambda x: np.array(x[0]),
    ],
    ids=["dense", "gaps", "fortran", "empty", "objects", "scalar"],
)
def test_arrays(make, count):
    sent = make(np.arange(count))
    received = over_the_wire([sent])[0]
    assert received.dtype == sent.dtype
    assert np.array_equal(received, sent)
    received[...] = 0


def test_large_arrays_are_out_of_band_even_with_gaps():
    for array in (np.zeros(10_000), np.zeros((100, 200))[:, ::2], np.zeros((100, 100)).T):
        payload, buffers = encode(array)
        assert len(payload) < 400
        assert [buffer.nbytes for buffer in buffers] == [80_000]
        assert {(buffer.format, buffer.contiguous) for buffer in buffers} == {("B", True)}


def test_arrays_and_tensors_mixed():
    sent = [
        np.arange(5000),
        torch.arange(5000),
        np.ones(4000),
        torch.ones(3000)[5:],
        torch.ones(2),
        np.ones(2),
    ]
    received = over_the_wire(sent)
    for one, other in zip(received, sent, strict=True):
        assert type(one) is type(other)
        assert (one == other).all()


@pytest.mark.parametrize("writable", [True, False])
def test_received_array_keeps_its_memoryview_alive(writable):
    array = np.arange(5000)
    array.flags.writeable = writable
    payload, buffers = encode(array)
    (memory,) = moved(buffers)
    received = decode(payload, [memory])
    watch = weakref.ref(memory)
    del memory
    gc.collect()
    assert watch() is not None
    assert received.flags.writeable == writable
    assert received[-1] == 4999
    del received
    gc.collect()
    assert watch() is None


def test_array_from_read_only_buffer_is_writable():
    payload, buffers = encode(np.zeros(5000))
    received = decode(payload, [memoryview(bytes(buffer)) for buffer in buffers])
    received[0] = 1


class Unpicklable:
    def __init__(self):
        self.lock = threading.Lock()


def test_unpicklable_argument_is_named_by_place_and_type():
    with pytest.raises(SerializationError) as caught:
        encode(((1, {"deep": [Unpicklable()]}), {}))
    text = str(caught.value)
    assert "[0][1]['deep'][0].lock" in text
    assert "_thread.lock" in text
    assert "TypeError: cannot pickle" in text
    assert isinstance(caught.value.__cause__, TypeError)


def test_lambda_among_arguments_says_what_to_do():
    with pytest.raises(SerializationError, match=r"module level, or install cloudpickle .*farcall\[notebook\]"):
        encode(((lambda: 1,), {}))


def test_failing_reduction_of_any_kind():
    class Local:
        def __reduce__(self):
            raise ZeroDivisionError("in reduce")

    with pytest.raises(SerializationError, match="ZeroDivisionError: in reduce") as caught:
        encode(Local())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError, match="RecursionError"):
        encode(deep)
    while deep:  # taken apart by hand: its destruction would recurse as well
        deep = deep[0]


def test_encoding_works_after_a_failure():
    for _ in range(3):
        with pytest.raises(SerializationError):
            encode([torch.ones(5000), torch.ones(3), threading.Lock()])
        assert torch.equal(over_the_wire((torch.ones(3),))[0], torch.ones(3))


def test_interrupt_while_encoding_is_not_wrapped():
    class Interrupting:
        def __reduce__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(Interrupting())


def test_class_missing_on_the_reader(monkeypatch):
    payload, buffers = encode(Point(1, 2))
    monkeypatch.delattr(f"{__name__}.Point")
    with pytest.raises(FunctionNotFound, match=r"Point.*does not serialize code"):
        decode(payload, buffers)


@pytest.mark.parametrize("garbage", [b"\x80\x05.", b"\x80\x05", b"xxS", b"abcC", b"T", b"", b"\0\0\0\0\0S"])
def test_garbage_is_a_serialization_error(garbage):
    with pytest.raises(SerializationError):
        decode(garbage)


@pytest.mark.usefixtures("road")
def test_missing_buffers_are_a_serialization_error():
    payload, _ = encode(torch.ones(50_000))
    with pytest.raises(SerializationError):
        decode(payload, [])


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ((("x", [threading.Lock()]), None), r"args\[1\]\[0\], a _thread.lock"),
        (((), {"key": threading.Lock()}), r"kwargs\['key'\], a _thread.lock"),
        ((print, (threading.Lock(),), None), r"args\[0\], a _thread.lock"),
        (((0, 5, (threading.Lock(),), None), None), r"args\[0\], a _thread.lock"),  # a method of a reference's value
    ],
)
def test_the_parts_of_a_call_are_named_as_its_caller_knows_them(value, place):
    with pytest.raises(SerializationError, match=f"^cannot send {place}: .*send a reference") as caught:
        encode_call(value)
    assert isinstance(caught.value, TypeError)


def test_a_tensor_payload_is_nothing_to_plain_pickle():
    payload, _ = encode({torch.ones(5000)})  # in a set: alone it would not be pickled
    with pytest.raises(SerializationError, match="only be read as part"):
        pickle.loads(payload)


class Handle:
    def __init__(self, number):
        self.number = number


def rebuild_handle(number, made_for):
    return number, made_for, current_decoding().peer


@pytest.fixture
def handle_reducer():
    log = []

    def reduce_handle(handle, encoding):
        encoding.on_failure(lambda: log.append(("undone", handle.number)))
        return rebuild_handle, (handle.number, encoding.peer)

    register_reducer(Handle, reduce_handle)
    yield log
    del policy.REDUCERS[Handle]


def test_registered_reducer_knows_both_peers(handle_reducer):
    payload, _ = encode([Handle(5)], peer="b")
    assert decode(payload, (), peer="a") == [(5, "b", "a")]
    assert handle_reducer == []


def test_reducers_are_undone_when_the_message_fails(handle_reducer):
    with pytest.raises(SerializationError):
        encode([Handle(1), Handle(2), threading.Lock()], peer="b")
    assert handle_reducer == [("undone", 2), ("undone", 1)]
    encode([Handle(3)])
    with pytest.raises(SerializationError):
        encode(threading.Lock())
    assert handle_reducer == [("undone", 2), ("undone", 1)]


class Nesting:
    """Encodes and decodes a message of its own while being pickled."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        payload, buffers = encode(self.value)
        return rebuild_nesting, (payload, [bytearray(buffer) for buffer in buffers])


def rebuild_nesting(payload, buffers):
    return decode(payload, [memoryview(buffer) for buffer in buffers], peer="inner")


def test_messages_inside_messages():
    sent = [torch.ones(3000), Nesting([torch.zeros(3000), torch.zeros(2)]), torch.ones(3)]
    first, (inner, small), last = over_the_wire(sent)
    assert (first.sum(), inner.sum(), small.sum(), last.sum()) == (3000, 0, 0, 3)


def test_threads_do_not_disturb_each_other():
    failures = []

    def work(seed):
        try:
            for i in range(200):
                sent = [torch.full((n,), seed * 1000 + i) for n in (3, 2000)]
                received = over_the_wire([sent, str(seed)])
                assert all(torch.equal(a, b) for a, b in zip(sent, received[0], strict=True))
                assert received[1] == str(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


class Reversing:
    """A pickler whose bytes nobody else reads."""

    def serialize(self, value):
        data, tensors = TablePickler().serialize(value)
        return data[::-1], tensors

    def deserialize(self, data, tensors):
        return TablePickler().deserialize(data[::-1], tensors)


def test_installed_pickler_is_used_for_calls_and_marked():
    value = (Point(1, 2), torch.arange(5000), torch.ones(2))
    with use_rpc_pickler(Reversing()):
        payload, buffers = encode_call(value)
        plain, _ = encode(value)
        received = decode(payload, moved(buffers))
    assert payload[-1:] == pickler._CUSTOM != plain[-1:]
    assert [buffer.nbytes for buffer in buffers] == [40_000]
    assert received[0] == value[0]
    assert torch.equal(received[1], value[1])
    assert encode_call(value)[0][-1:] != pickler._CUSTOM
    with pytest.raises(SerializationError):
        decode(payload, moved(buffers))


def test_reader_without_a_pickler_reads_what_plain_pickle_reads():
    class Plain:
        def serialize(self, value):
            return pickle.dumps(value), []

        def deserialize(self, data, tensors):
            raise AssertionError("not installed on the reader")

    with use_rpc_pickler(Plain()):
        payload, buffers = encode_call(("f", [1, 2]))
    assert decode(payload, moved(buffers)) == ("f", [1, 2])


def test_subclassed_table_pickler_is_read_without_being_installed(handle_reducer):
    class Mine(TablePickler):
        pass

    with use_rpc_pickler(Mine()):
        payload, buffers = encode_call([torch.ones(2000), Handle(1)], peer="b")
    received = decode(payload, moved(buffers), peer="a")
    assert received[0].sum() == 2000
    assert received[1] == (1, "b", "a")


def test_installed_pickler_is_restored_even_after_an_error():
    outer, inner = Reversing(), Reversing()
    with use_rpc_pickler(outer):
        with pytest.raises(ZeroDivisionError), use_rpc_pickler(inner):
            1 / (installed_pickler() is not inner)
        assert installed_pickler() is outer
    assert installed_pickler() is None


def test_failing_pickler_is_named():
    class Failing:
        def serialize(self, value):
            raise OSError("no disk")

    with use_rpc_pickler(Failing()), pytest.raises(SerializationError, match=r"Failing.*OSError: no disk"):
        encode_call(1)


COLLECTS_WHILE_A_MESSAGE_IS_FORGOTTEN = """
import gc
from farcall.protocol.frames import RESPONSE, Frame
from farcall.serialize import write_value

class Part:
    def __del__(self):
        gc.collect()

class Whole:
    def __reduce__(self):
        return rebuild, ([Part(), Part()], [[number] for number in range(50)])

def rebuild(parts, more):
    return Whole()

gc.collect()
gc.freeze()  # so that each of the many collections is a quick one
for _ in range(20):
    write_value(Frame(RESPONSE), [Whole(), Whole()])
print("alive")
"""


def test_garbage_may_be_collected_while_a_message_is_forgotten():
    # In a process of its own: what is tested against is a segmentation fault.
    done = subprocess.run([sys.executable, "-c", COLLECTS_WHILE_A_MESSAGE_IS_FORGOTTEN], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_what_is_recorded_is_received_once():
    log = []

    class Context:
        id = 1

        def record_receive(self, peer, message_id, tensors):
            log.append(("received", message_id))

        def decline_receive(self, peer, message_id):
            log.append(("declined", message_id))

    payload, buffers = encode(torch.ones(3))
    frame = Frame(RESPONSE, payload=payload, buffers=list(buffers), recording=Context(), message_id=7)
    read_value(frame)
    decline(frame, None)
    assert log == [("received", 7)]
