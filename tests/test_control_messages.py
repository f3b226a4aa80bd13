"""Control messages and frames: what is sent is what arrives, and nothing else gets through."""

from __future__ import annotations

import types
import typing
from functools import cache

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.job.control import frames, messages
from jaxlamina.job.control.frames import FrameError, FrameReader
from jaxlamina.job.control.messages import (
    Array,
    Exchange,
    Fault,
    Hello,
    Message,
    MessageError,
    Ping,
    Prepare,
    PutRows,
    RunStep,
    StepShape,
    Welcome,
    decode,
    decode_any_hello,
    encode,
)

KINDS = typing.get_args(Message)
DTYPES = [
    np.dtype(name) for name in ("bool", "int8", "int32", "int64", "uint32", "float16", "float32", "float64")
]
DTYPES += [np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return Array(dtype.name, shape, draw(st.binary(min_size=size, max_size=size)))


def values(hint: typing.Any) -> st.SearchStrategy:
    """Whatever a field of that type may hold: a message that is added later is tested as well."""
    leaves = {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bool: st.booleans(),
        bytes: st.binary(max_size=40),
        type(None): st.none(),
        Array: arrays(),
        typing.Any: st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=20),
    }
    if hint in leaves:
        return leaves[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(map(values, args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if origin is tuple and args[-1] is Ellipsis:
        several = st.lists(values(args[0]), max_size=3).map(tuple)
        if (
            args[0] is StepShape
        ):  # of which one may hold several: mostly none, or there would be no end of them
            return st.integers(0, 5).flatmap(lambda n: st.just(()) if n else several)
        return several
    if origin is tuple:
        return st.tuples(*map(values, args))
    return structs(hint)


@cache
def structs(hint: type[msgspec.Struct]) -> st.SearchStrategy:
    """One strategy a type, made when it is first drawn from: a struct may hold its like."""
    assert issubclass(hint, msgspec.Struct), hint
    return st.deferred(
        lambda: st.builds(hint, **{name: values(of) for name, of in typing.get_type_hints(hint).items()})
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_message_comes_back_equal(kind, data):
    message = data.draw(values(kind))
    back = decode(encode(message))
    assert type(back) is kind
    assert back == message


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_an_array_comes_back_as_it_was(dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    step = RunStep(1, 0, StepShape("decode", 1, 1, 16), ({"x": Array.of(array)},))
    back = decode(encode(step)).segments[0]["x"].numpy()
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert not back.flags.writeable


def test_arrays_of_any_layout_and_byte_order():
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    for x in (array.T, array[:, ::2], array[::-1], array.astype(">i4"), array.tolist()):
        np.testing.assert_array_equal(Array.of(x).numpy(), np.asarray(x))
    assert Array.of(array.astype(">i4")).dtype == "int32"


@pytest.mark.parametrize(
    "bad", [np.array(["a"]), np.array([None]), np.array([1j]), np.zeros(2, "V4")], ids=repr
)
def test_an_array_that_no_message_carries(bad):
    with pytest.raises(ValueError, match="none that a message can carry: bool, int8"):
        Array.of(bad)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        ({"dtype": "object", "shape": [1], "data": b"12345678"}, "dtype 'object' is none"),
        ({"dtype": "int32", "shape": [2], "data": b"1234"}, "has 8 bytes, but 4 came"),
        ({"dtype": "int32", "shape": [-1, -1], "data": b"1234"}, "negative extent"),
        ({"dtype": "int32", "shape": [2**40, 2**40], "data": b"1234"}, "has .* bytes, but 4 came"),
    ],
)
def test_an_array_that_is_none_does_not_arrive(array, why):
    body = msgspec.msgpack.encode({"type": "TakeRows", "slots": array})
    with pytest.raises(MessageError, match=why):
        decode(body)


def test_what_is_not_exactly_one_message_does_not_arrive():
    good = encode(Fault(1, "rank 1: x"))
    raw = msgspec.msgpack.decode(good)
    assert raw == {"type": "Fault", "rank": 1, "line": "rank 1: x"}
    for bad in (b"", b"\xc1", good[:-1], good + b"\xc0", b"\x80"):
        with pytest.raises(MessageError, match=f"not a message of control protocol {messages.PROTOCOL}"):
            decode(bad)
    for other in ({"type": "Faulty"}, {"further": 1}, {"rank": "1"}, {"rank": 1.5}, {"line": None}):
        with pytest.raises(MessageError, match=f"not a message of control protocol {messages.PROTOCOL}"):
            decode(msgspec.msgpack.encode(raw | other))


@given(st.data())
def test_damaged_bytes_are_an_error_or_a_whole_message(data):
    slots = Array.of(np.arange(5, dtype=np.int32))
    body = bytearray(encode(PutRows(slots, (slots, Array.of(np.ones((2, 2), np.float16))))))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = decode(body)
    except MessageError:
        return
    assert isinstance(message, KINDS)
    if isinstance(message, PutRows):
        assert [message.slots.numpy().nbytes] == [len(message.slots.data)]


def test_what_msgpack_cannot_hold_is_said_by_the_sender():
    with pytest.raises(MessageError, match="Welcome cannot be sent"):
        encode(Welcome(2**70))
    with pytest.raises(MessageError, match="Fault cannot be sent"):
        encode(Fault(1, "\ud800"))


def test_a_hello_of_another_protocol_is_understood_as_far_as_it_must():
    theirs = {"type": "Hello", "protocol": 99, "rank": 2, "later": [1, 2]}
    claimed = decode_any_hello(msgspec.msgpack.encode(theirs))
    assert (claimed.protocol, claimed.rank) == (99, 2)
    ours = decode_any_hello(encode(Hello(messages.PROTOCOL, 3, 1, "host", {}, {})))
    assert (ours.protocol, ours.rank) == (messages.PROTOCOL, 3)
    with pytest.raises(MessageError, match="not a Hello"):
        decode_any_hello(encode(Ping()))


def test_buckets_and_exchanges_are_printed_for_people():
    assert str(StepShape("decode", 8, 1, 256)) == "decode, batch 8, context 256"
    assert (
        str(StepShape("chunk", 2, 64, 512, rows=1, new=32))
        == "chunk, batch 2, tokens 64, context 512, rows 1, new 32"
    )
    mixed = StepShape("decode", 8, 1, 256, chunk=StepShape("chunk", 1, 64, 512))
    assert str(mixed) == "decode, batch 8, context 256, with chunk, batch 1, tokens 64, context 512"
    assert (mixed.model_rows, decode(encode(Prepare(mixed)))) == (8 + 64, Prepare(mixed))
    assert str(Exchange("send", 2, (8, 1, 4), "bfloat16")) == "send bfloat16[8,1,4] to rank 2"
    assert str(Exchange("recv", 0, (), "float32")) == "receive float32[] from rank 0"
    assert str(Exchange("all", -1, (8,), "int8")) == "collective of all ranks on int8[8]"


def frame(body: bytes, **options: int) -> bytes:
    return b"".join(frames.frame(body, **options))


def taken(reader: FrameReader, pieces: list[bytes]) -> list[bytes]:
    bodies = []
    for piece in pieces:
        reader.feed(piece)
        bodies += [frame.body for frame in reader.frames()]
    return bodies


def cut(stream: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    while at < len(stream):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream[at : at + size])
        at += size
    return pieces


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1))
def test_frames_come_out_whole_however_they_are_cut(bodies, sizes):
    reader = FrameReader()
    assert taken(reader, cut(b"".join(map(frame, bodies)), sizes)) == bodies
    assert reader.is_between_frames


@given(
    st.lists(st.integers(0, 200_000), max_size=4),
    st.lists(st.integers(1000, 150_000), min_size=1),
    st.booleans(),
)
def test_large_frames_come_out_whole_fed_or_filled(lengths, sizes, fill):
    bodies = [bytes([i]) * (length - 1) + b"!" if length else b"" for i, length in enumerate(lengths)]
    stream = b"".join(map(frame, bodies))
    reader, found = FrameReader(), []
    for piece in cut(stream, sizes):
        while piece:
            space = reader.space() if fill else None
            n = len(piece) if space is None else min(len(piece), len(space))
            if space is None:
                reader.feed(piece)
            else:
                space[:n] = piece[:n]
                reader.filled(n)
            piece = piece[n:]
            found += [frame.body for frame in reader.frames()]
    assert found == bodies
    assert reader.is_between_frames


def test_a_frame_that_is_not_whole_is_waited_for():
    for length in (1000, 100_000):
        whole = frame(b"x" * length)
        reader = FrameReader()
        assert taken(reader, [whole[:3]]) == []
        assert taken(reader, [whole[3:500]]) == []
        assert not reader.is_between_frames
        assert taken(reader, [whole[500:] + frame(b"y")]) == [b"x" * length, b"y"]
        assert reader.is_between_frames


@given(st.binary(min_size=1))
def test_a_stream_of_something_else_is_told_from_its_first_bytes(garbage):
    reader = FrameReader(largest_bytes=100)
    reader.feed(garbage)
    if not any(magic.startswith(garbage[:4]) for magic in (b"JXLc", b"JXLs")):
        with pytest.raises(FrameError, match="none of JaxLamina's"):
            list(reader.frames())


def test_garbage_after_a_frame_comes_after_the_frame():
    reader = FrameReader()
    reader.feed(frame(b"good") + b"HTTP/1.1 400 Bad Request")
    bodies = reader.frames()
    assert next(bodies).body == b"good"
    with pytest.raises(FrameError, match=r"b'HTTP/1.1 400 Bad'"):
        next(bodies)


def test_a_frame_that_is_too_large_is_refused_on_both_sides():
    with pytest.raises(FrameError, match="11 bytes is larger than the 10"):
        frame(b"x" * 11, largest_bytes=10)
    reader = FrameReader(largest_bytes=10)
    reader.feed(frame(b"x" * 10) + frame(b"y" * 11)[:8])  # the header is enough
    bodies = reader.frames()
    assert next(bodies).body == b"x" * 10
    with pytest.raises(FrameError, match="11 bytes is larger than the 10 allowed"):
        next(bodies)
