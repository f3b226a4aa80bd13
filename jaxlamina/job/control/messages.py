"""What rank 0 and the attention ranks say to each other: typed messages, as msgpack.

``encode`` and ``decode`` are all there is to it; a message that came over the wire has been checked against
its type, and so has each array in it. Knows nothing of sockets, devices or models, and never unpickles
anything.
"""

from __future__ import annotations

from typing import Any, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from jaxlamina.steps.exchange import Exchange
from jaxlamina.steps.shape import StepShape

PROTOCOL = 13
"""Raised whenever a message changes. Ranks of different protocols from 8 on can still read each other's
Challenge, Hello and Refused."""

_DTYPES = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (
        *(bool, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    )
}


class MessageError(ValueError):
    """Bytes that are no message, or a message that cannot be put into bytes."""


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A numpy array in a message: ``data`` holds its elements in C order and in the ranks' own byte order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise ValueError(f"dtype {self.dtype!r} is none that a message can carry: {', '.join(_DTYPES)}")
        size = dtype.itemsize
        for extent in self.shape:
            if extent < 0:
                raise ValueError(f"shape {self.shape} has a negative extent")
            size *= extent
        if size != len(self.data):
            raise ValueError(
                f"an array of {self.dtype} {self.shape} has {size} bytes, but {len(self.data)} came"
            )

    @classmethod
    def of(cls, array: Any) -> Array:
        """``array`` (anything `numpy.asarray` takes, a JAX array too), copied. ``ValueError`` for a dtype
        that no message can carry."""
        values = np.asarray(array)
        if not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("="))
        return cls(values.dtype.name, values.shape, values.tobytes())

    def numpy(self) -> np.ndarray:
        """The array, read-only: it lies in the message's own bytes."""
        return np.ndarray(self.shape, _DTYPES[self.dtype], self.data)


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attention operator of the model (the fields of `jaxlamina.workers.spec.AttentionSpec`)."""

    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    dtype: str
    scale: float
    window: int | None
    softcap: float | None
    kv: str


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=True):
    """A Struct that travels on its own; its class's name goes with it."""


# Starting


class Challenge(_Message, frozen=True, omit_defaults=True):
    """Rank 0's first words to whoever connects, without a seal. ``nonce``: as of `seals`. ``tls``: all that
    follows is TLS."""

    protocol: int
    nonce: bytes
    tls: bool = False


class Hello(_Message, frozen=True):
    """A rank's answer, sealed. ``config``: what it was started with; ``versions``: of the libraries that must
    agree; ``nonce``: as of `seals`."""

    protocol: int
    rank: int
    pid: int
    host: str
    config: dict[str, str | int | float | bool | None]
    versions: dict[str, str]
    nonce: bytes = b""


class Admitted(_Message, frozen=True):
    """To a rank whose Hello is right: its seal proves rank 0. Welcome follows when the others are there."""


class Welcome(_Message, frozen=True):
    """All ranks are there; ``epoch``: the job's, as seals have it, of now."""

    epoch: int


class Meets(_Message, frozen=True):
    """From a rank: it is about to take part in its transport's first exchange, where each waits for all."""


class Refused(_Message, frozen=True):
    """Instead of Admitted or Welcome: this rank cannot take part, or the group did not come about. Without a
    seal where the Hello had no true one."""

    reason: str


class Setup(_Message, frozen=True):
    """What an attention rank needs to know of the model and of its KV slots.

    ``kv_slots``: as many as the user asked for, or None to fill the memory with at most ``most_slots`` and at
    least ``least_slots``, leaving room for a step of ``largest`` (batch, context, prompt). ``n_host_slots``:
    as many as the user asked for, or None for as many as pay. ``stages``: the model rank that runs each
    slice, where model ranks are stages of a pipeline. ``local_share``: of the KV, what model ranks keep
    (`jaxlamina.steps.layout.Layout`), who get this message, too, if they do. ``heads_over``: as there.
    ``channel_scales``: each layer's `ChannelScales` for KV that is scaled by channel."""

    layers: tuple[Layer, ...]
    partition: str
    token_block: int
    kv_slots: int | None
    most_slots: int
    least_slots: int
    largest: tuple[int, int, int]
    n_host_slots: int | None
    stages: tuple[int, ...]
    local_share: float
    heads_over: int
    channel_scales: tuple[tuple[Array | None, ...], ...] | None = None


class SetupModel(_Message, frozen=True):
    """To a model rank other than rank 0, whose weights rank 0 then sends by the transport: the model
    (``origin``, as of `jaxlamina.models.causal_lm.CausalLM`), the dtype of weights, and how
    KV is kept; which parameters it gets; what the layout is, as of Setup. It answers ModelReady."""

    origin: dict[str, Any]
    dtype: str
    kv_dtype: str
    params: tuple[str, ...]
    partition: str
    stages: tuple[int, ...]
    local_share: float
    heads_over: int


class NewWeights(_Message, frozen=True):
    """To the same ranks, between two steps: rank 0 sends the weights anew, others of the same shapes. They
    answer ModelReady."""


class ModelReady(_Message, frozen=True):
    pass


class SlotsFound(_Message, frozen=True):
    """Slots of the whole memory pool, as far as this rank's memory goes, or this rank's own where tokens are
    on model ranks, too; and of the host's, as far as its host's does."""

    n_slots: int
    n_host_slots: int
    host: str = ""
    platform: str = ""


class Allocate(_Message, frozen=True):
    """``n_slots``: of this rank. ``measure``: also how long attention takes there."""

    n_slots: int
    n_host_slots: int
    measure: bool = False


class Allocated(_Message, frozen=True):
    """``token_s``: as of `jaxlamina.ranks.attention_speed.seconds_per_token`; 0 if it was not measured."""

    token_s: float = 0.0


class Prepare(_Message, frozen=True):
    """Compile the program of a bucket, do not run it. ``traceable``: so that a trace names each of its
    kernels. ``wait``: for what is being compiled since `PrepareLater`; if not, the answer may be that it is
    not done."""

    shape: StepShape
    traceable: bool = False
    wait: bool = True


class PrepareLater(_Message, frozen=True):
    """`Prepare` will come: begin with it, go on with other messages, and answer nothing yet. ``behind``:
    steps run meanwhile."""

    shape: StepShape
    traceable: bool = False
    behind: bool = False


class Prepared(_Message, frozen=True):
    """``exchanges`` of the compiled program, in the order in which they are run, None while it is being
    compiled; ``seconds`` that compiling took."""

    shape: StepShape
    exchanges: tuple[Exchange, ...] | None
    seconds: float


# Running


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is not as it was in an array: ``values`` int32 ``[n]`` at places ``at`` int32 ``[n]`` of it in one
    line."""

    at: Array
    values: Array


class RunStep(_Message, frozen=True):
    """Run the program of ``shape`` once, on arrays of each of its segments (`StepShape.segments`): slot
    tables, lengths, positions, … ``tables``: of each segment, how its slot table differs from that of the
    last step's segment in the same place; None where it is among the arrays."""

    step: int
    epoch: int
    shape: StepShape
    segments: tuple[dict[str, Array], ...]
    tables: tuple[Changes | None, ...] = ()


class SetupPrompts(_Message, frozen=True):
    """To a prefill worker that works at its own pace: take memory for the KV of a prompt of up to ``n_slots``
    tokens; ``channel_scales`` as of Setup. It answers Allocated."""

    n_slots: int
    channel_scales: tuple[tuple[Array | None, ...], ...] | None = None


class Compute(_Message, frozen=True):
    """To the same: compute a prompt's tokens after its first ``start``, which it has computed before, and
    keep what comes of it for the step that takes it in. ``tokens``, ``positions`` int32 ``[1, T]``;
    ``logits_at`` int32 ``[1]``, the last token that is no padding; ``scored``: logits of all. It answers
    Compiles first, if it has to, and Computed once all of it is on its device, whatever else it is asked
    meanwhile."""

    chunk: int
    start: int
    tokens: Array
    positions: Array
    logits_at: Array
    scored: bool = False


class Compiles(_Message, frozen=True):
    """That ``chunk`` takes longer, since its program has to be compiled first."""

    chunk: int


class Computed(_Message, frozen=True):
    """That ``chunk`` is computed."""

    chunk: int


class CopySlots(_Message, frozen=True):
    """Slots ``src`` int32 ``[n]`` copied to ``dst``, on the device."""

    src: Array
    dst: Array


class MoveOut(_Message, frozen=True):
    """Slots of the device to slots of the host, both int32 ``[n]``."""

    slots: Array
    host_slots: Array


class MoveIn(_Message, frozen=True):
    """Slots of the host to slots of the device, both int32 ``[n]``."""

    host_slots: Array
    slots: Array


class ForgetHost(_Message, frozen=True):
    """Whatever slots of the host, int32 ``[n]``, held is dropped."""

    host_slots: Array


class TakeRows(_Message, frozen=True):
    """Answer with the contents of ``slots`` int32 ``[n]``, as Rows. ``host``: of the host's slots, which are
    empty then."""

    slots: Array
    host: bool = False


class Rows(_Message, frozen=True):
    rows: tuple[Array, ...]


class OpenKept(_Message, frozen=True):
    """As `jaxlamina.kv.kept.KeptWanted` and the name of what this rank keeps; answer with KeptMarks.
    ``copy_at``: where another rank holds a copy of it, as CopiesAt has it."""

    name: str
    folder: str | None
    identity: str
    n_places: int | None
    n_sharing: int
    ahead: bool
    copy_at: str | None = None


class KeptMarks(_Message, frozen=True):
    """Of each place uint64."""

    marks: Array


class HoldCopies(_Message, frozen=True):
    """Listen for ranks that keep a copy of their KV here, in ``folder``, of whose memory ``n_sharing`` files
    have an equal part each; answer with CopiesAt."""

    folder: str
    n_sharing: int


class CopiesAt(_Message, frozen=True):
    """``address``: "host:port"; ":port" on rank 0's host, of which each rank knows an address."""

    address: str


class OpenCopy(_Message, frozen=True):
    """From the rank whose KV it is to the one that holds a copy, as all up to Rows: the copy ``name`` of KV
    of ``identity``, ``row_bytes`` a token. ``n_places`` None: what is there; else a copy of so many places,
    made anew if there is none. Answer with KeptMarks, of no place where there is no copy."""

    name: str
    identity: str
    row_bytes: int
    n_places: int | None


class PutCopy(_Message, frozen=True):
    """``rows`` uint8 ``[n, row_bytes]`` at ``places`` int64 ``[n]``, to be known by ``marks`` uint64
    ``[n]``. No answer."""

    places: Array
    marks: Array
    rows: Array


class Keep(_Message, frozen=True):
    """Copy the KV of ``slots`` to ``places``, both int32 ``[n]``, to be known there by ``marks`` uint64
    ``[n]``."""

    slots: Array
    places: Array
    marks: Array


class KeptSoFar(_Message, frozen=True):
    """``n`` tokens have been written of all that were to be kept since OpenKept. Comes unasked."""

    n: int


class Bring(_Message, frozen=True):
    """Copy what is kept at ``places`` into ``slots``, both int32 ``[n]``."""

    places: Array
    slots: Array


class TakeKept(_Message, frozen=True):
    """Answer with what is kept at ``places`` int32 ``[n]``, as Rows of one array."""

    places: Array


class PutBytes(_Message, frozen=True):
    """Write ``rows``, as they came for TakeKept, to ``slots`` int32 ``[n]``."""

    slots: Array
    rows: Array


class PutRows(_Message, frozen=True):
    """Write ``rows``, as they came in Rows, to ``slots`` int32 ``[n]``."""

    slots: Array
    rows: tuple[Array, ...]


class Record(_Message, frozen=True):
    """Trace the next ``steps`` steps, waiting for each, and answer with Recorded after the last."""

    steps: int


class Recorded(_Message, frozen=True):
    """A rank's time by a device's trace, in nanoseconds of its host's clock, int64.

    ``steps`` [n, 2]: when each was begun and was done. ``spans`` [m, 6]: stream, kind (its place in
    `jaxlamina.profiling.KINDS`), index, batch, start, end. ``meetings`` [k, 5]: step, peer (-1: all ranks),
    way (`jaxlamina.profiling.timeline`), start, end. ``error``: why there is nothing in them, where that is
    so.
    """

    host: str
    steps: Array
    spans: Array
    meetings: Array
    error: str = ""

    @classmethod
    def failed(cls, host: str, error: str) -> Recorded:
        steps, spans, meetings = (Array.of(np.empty((0, n), np.int64)) for n in (2, 6, 5))
        return cls(host, steps, spans, meetings, error)


class Observe(_Message, frozen=True):
    """Begin to record what the device does, without waiting for steps; or end it, and answer with
    Observed."""

    begin: bool


class Observed(_Message, frozen=True):
    """What a rank's device did in a stretch of time, in nanoseconds: in all, computing, in exchanges while it
    computed nothing, and idle, that in ``n_gaps`` gaps. ``kernels``: (name, nanoseconds, runs) of what took
    the most. ``error``: why there is nothing in it, where that is so."""

    host: str
    window_ns: int = 0
    compute_ns: int = 0
    exchange_ns: int = 0
    idle_ns: int = 0
    n_gaps: int = 0
    longest_gap_ns: int = 0
    kernels: tuple[tuple[str, int, int], ...] = ()
    error: str = ""

    @classmethod
    def failed(cls, host: str, error: str) -> Observed:
        return cls(host, error=error)

    def share(self, name: str) -> float:
        """Of the whole time, such as of "idle_ns"."""
        found: int = getattr(self, name)
        return found / self.window_ns if self.window_ns else 0.0


# Ending, and between


class Fault(_Message, frozen=True):
    """``rank`` cannot go on. ``line`` names it and is fit to be shown to the user as it is."""

    rank: int
    line: str


class Ping(_Message, frozen=True):
    pass


class Pong(_Message, frozen=True):
    pass


class Bye(_Message, frozen=True):
    """The work is done: leave."""


Message = (
    Challenge
    | Hello
    | Admitted
    | Welcome
    | Meets
    | Refused
    | Setup
    | SetupModel
    | NewWeights
    | ModelReady
    | SlotsFound
    | Allocate
    | Allocated
    | Prepare
    | PrepareLater
    | Prepared
    | RunStep
    | SetupPrompts
    | Compute
    | Compiles
    | Computed
    | CopySlots
    | MoveOut
    | MoveIn
    | ForgetHost
    | TakeRows
    | Rows
    | OpenKept
    | KeptMarks
    | KeptSoFar
    | HoldCopies
    | CopiesAt
    | OpenCopy
    | PutCopy
    | Keep
    | Bring
    | TakeKept
    | PutBytes
    | PutRows
    | Record
    | Recorded
    | Observe
    | Observed
    | Fault
    | Ping
    | Pong
    | Bye
)
M = TypeVar("M", bound=_Message)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """``MessageError`` for what msgpack cannot hold: an int of more than 64 bits, a str with a lone
    surrogate."""
    try:
        return _encoder.encode(message)
    except (OverflowError, TypeError, UnicodeEncodeError, ValueError) as error:
        raise MessageError(f"{type(message).__name__} cannot be sent: {error}") from error


def decode(body: bytes | bytearray | memoryview) -> Message:
    """``MessageError`` for anything but exactly one message of the types above."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"not a message of control protocol {PROTOCOL}: {error}") from error


class AnyHello(msgspec.Struct, frozen=True, tag_field="type", tag="Hello"):
    """What a Hello of any protocol says."""

    protocol: int
    rank: int
    nonce: bytes = b""


def decode_any_hello(body: bytes | bytearray) -> AnyHello:
    """A Hello of whatever protocol, further fields left out. ``MessageError`` if it is none."""
    try:
        return msgspec.msgpack.decode(body, type=AnyHello)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"not a Hello: {error}") from error
