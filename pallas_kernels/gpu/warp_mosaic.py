"""One warp's operations as MLIR inside a Mosaic GPU kernel: arithmetic, and PTX for what MLIR has no name
for.

`MosaicWarp` has the same operations as `warp_numpy.WarpMachine`, which says what they mean. It is used inside
`plgpu.inline_mgpu`; every lane runs the program, and warps never wait for each other. Knows nothing of
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu

from pallas_kernels.compat import arith, ir, llvm, scf

_COMPARE = {"lt": 2, "le": 3, "gt": 4, "ge": 5, "eq": 0, "ne": 1}  # arith.CmpIPredicate, signed
_COMPARE_REAL = {"lt": 4, "le": 5, "gt": 2, "ge": 3, "eq": 1, "ne": 6}  # arith.CmpFPredicate, ordered
_CONSTRAINTS = {"i32": "r", "i64": "l", "f32": "f"}


def _type(kind: str) -> ir.Type:
    if kind == "f32":
        return ir.F32Type.get()
    return ir.IntegerType.get_signless({"i1": 1, "i32": 32, "i64": 64}[kind])


def _kind(value: ir.Value) -> str:
    return str(value.type)


class Reg:
    """A register: an MLIR value with Python's operators. Integers are signed."""

    __slots__ = ("value",)
    __hash__ = object.__hash__

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    @property
    def kind(self) -> str:
        return _kind(self.value)

    def _other(self, x: Any) -> ir.Value:
        if isinstance(x, Reg):
            assert x.kind == self.kind, f"{self.kind} and {x.kind}"
            return x.value
        return _constant(x, self.kind)

    def _binary(self, x: Any, integer: Callable[..., Any], real: Callable[..., Any] | None = None) -> Reg:
        op = real if self.kind == "f32" else integer
        assert op is not None
        return Reg(op(self.value, self._other(x)))

    def __add__(self, x: Any) -> Reg:
        return self._binary(x, arith.addi, arith.addf)

    __radd__ = __add__

    def __sub__(self, x: Any) -> Reg:
        return self._binary(x, arith.subi, arith.subf)

    def __rsub__(self, x: Any) -> Reg:
        return Reg(_constant(x, self.kind)) - self

    def __mul__(self, x: Any) -> Reg:
        return self._binary(x, arith.muli, arith.mulf)

    __rmul__ = __mul__

    def __floordiv__(self, x: Any) -> Reg:
        """Of non-negative integers."""
        return self._binary(x, arith.divui)

    def __mod__(self, x: Any) -> Reg:
        """Of non-negative integers."""
        return self._binary(x, arith.remui)

    def __and__(self, x: Any) -> Reg:
        return self._binary(x, arith.andi)

    def __or__(self, x: Any) -> Reg:
        return self._binary(x, arith.ori)

    def __xor__(self, x: Any) -> Reg:
        return self._binary(x, arith.xori)

    def _compare(self, x: Any, how: str) -> Reg:
        i64 = ir.IntegerType.get_signless(64)
        real = self.kind == "f32"
        predicate = ir.IntegerAttr.get(i64, (_COMPARE_REAL if real else _COMPARE)[how])
        return Reg((arith.cmpf if real else arith.cmpi)(predicate, self.value, self._other(x)))

    def __lt__(self, x: Any) -> Reg:
        return self._compare(x, "lt")

    def __le__(self, x: Any) -> Reg:
        return self._compare(x, "le")

    def __gt__(self, x: Any) -> Reg:
        return self._compare(x, "gt")

    def __ge__(self, x: Any) -> Reg:
        return self._compare(x, "ge")

    def __eq__(self, x: object) -> Reg:  # type: ignore[override]
        return self._compare(x, "eq")

    def __ne__(self, x: object) -> Reg:  # type: ignore[override]
        return self._compare(x, "ne")


def _constant(x: Any, kind: str) -> ir.Value:
    if kind == "f32":
        return arith.constant(_type(kind), ir.FloatAttr.get(_type(kind), float(x)))
    return arith.constant(_type(kind), ir.IntegerAttr.get(_type(kind), int(x)))


def _asm(
    ptx: str, out: Sequence[str], args: Sequence[ir.Value], *, effects: bool = False, memory: bool = False
) -> list[Reg]:
    """Inline PTX: `out` are the kinds of its results $0 …, `args` follow them."""
    constraints = [f"={_CONSTRAINTS[k]}" for k in out] + [_CONSTRAINTS[_kind(a)] for a in args]
    if memory:
        constraints.append("~{memory}")
    if not out:
        result_type = ir.Type.parse("!llvm.void")
    elif len(out) == 1:
        result_type = _type(out[0])
    else:
        result_type = llvm.StructType.get_literal([_type(k) for k in out])
    result = llvm.inline_asm(
        result_type, list(args), ptx, ",".join(constraints), has_side_effects=effects or memory
    )
    if not out:
        return []
    if len(out) == 1:
        return [Reg(result)]
    return [Reg(llvm.extractvalue(_type(k), result, [i])) for i, k in enumerate(out)]


def global_pointer(ref: ir.Value) -> ir.Value:
    """The address of a GMEM memref as an integer."""
    return llvm.ptrtoint(_type("i64"), mgpu.memref_ptr(ref))


def lines_of(context: Any, ref: ir.Value, n_lines: int) -> ir.Value:
    """What the copy engine needs to copy n_lines swizzled lines of a memref `[S, lines, 128 bytes]`, as an
    address."""
    width = ir.MemRefType(ref.type).shape[-1]
    descriptor = context._get_tma_desc(ref, (), None, (1, n_lines, width), 128, None)
    return llvm.ptrtoint(_type("i64"), descriptor)


def shared_pointer(ref: ir.Value) -> Reg:
    """The address of an SMEM memref within the CTA's shared memory."""
    return Reg(arith.trunci(_type("i32"), llvm.ptrtoint(_type("i64"), mgpu.memref_ptr(ref))))


class MosaicWarp:
    """Emits a warp's program where MLIR's insertion point is. Pointers are those of `global_pointer`."""

    def __init__(self) -> None:
        self._thread = mgpu.thread_idx()
        self._block = mgpu.block_idx()
        self.lane = Reg(self._thread) & 31
        # read back from lane 0, so that the compiler knows that a warp's lanes agree
        self.warp = self.shuffle(Reg(self._thread) // 32, 0)
        self.cta = Reg(self._block)
        # What is copied is read once: it is the first to leave the L2 cache again, before tables and queries.
        self._read_once = _asm("createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", ["i64"], [])[0]

    def i32(self, x: Any) -> Reg:
        if not isinstance(x, Reg):
            return Reg(_constant(x, "i32"))
        return x if x.kind == "i32" else Reg(arith.trunci(_type("i32"), x.value))

    def i64(self, x: Any) -> Reg:
        if not isinstance(x, Reg):
            return Reg(_constant(x, "i64"))
        return x if x.kind == "i64" else Reg(arith.extsi(_type("i64"), x.value))

    def f32(self, x: Any) -> Reg:
        if not isinstance(x, Reg):
            return Reg(_constant(x, "f32"))
        return x if x.kind == "f32" else Reg(arith.sitofp(_type("f32"), x.value))

    def select(self, where: Reg, yes: Any, no: Any) -> Reg:
        kind = yes.kind if isinstance(yes, Reg) else no.kind
        yes, no = (x.value if isinstance(x, Reg) else _constant(x, kind) for x in (yes, no))
        return Reg(arith.select(where.value, yes, no))

    def minimum(self, a: Reg, b: Any) -> Reg:
        return a._binary(b, arith.minsi)

    def maximum(self, a: Reg, b: Any) -> Reg:
        return a._binary(b, arith.maxsi, arith.maxnumf)

    def fma(self, a: Reg, b: Reg, c: Reg) -> Reg:
        return _asm("fma.rn.f32 $0, $1, $2, $3;", ["f32"], [a.value, b.value, c.value])[0]

    def exp2(self, x: Reg) -> Reg:
        return _asm("ex2.approx.ftz.f32 $0, $1;", ["f32"], [x.value])[0]

    def log2(self, x: Reg) -> Reg:
        return _asm("lg2.approx.f32 $0, $1;", ["f32"], [x.value])[0]

    def reciprocal(self, x: Reg) -> Reg:
        return _asm("rcp.rn.f32 $0, $1;", ["f32"], [x.value])[0]

    def number(self, bits: Reg) -> Reg:
        return Reg(arith.bitcast(_type("f32"), bits.value))

    def bits(self, x: Reg) -> Reg:
        return Reg(arith.bitcast(_type("i32"), x.value))

    def bf16_bits_to_f32(self, bits: Reg) -> Reg:
        return Reg(arith.bitcast(_type("f32"), arith.shli(bits.value, _constant(16, "i32"))))

    def shuffle(self, x: Reg, lane: Any) -> Reg:
        lane = self.i32(lane)
        kind = x.kind
        ptx = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
        return _asm(ptx, [kind], [x.value, lane.value], effects=True)[0]

    def shuffle_xor(self, x: Reg, mask: int) -> Reg:
        ptx = f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;"
        return _asm(ptx, [x.kind], [x.value], effects=True)[0]

    def sync(self) -> None:
        _asm("bar.warp.sync 0xffffffff;", [], [], memory=True)

    def loop(
        self, count: Any, body: Callable[[Reg, list[Reg]], list[Reg]], carry: Sequence[Reg]
    ) -> list[Reg]:
        count = self.i32(count)
        bounds = [_constant(0, "i32"), count.value, _constant(1, "i32")]
        op = scf.ForOp(*bounds, [x.value for x in carry])
        with ir.InsertionPoint(op.body):
            state = [Reg(x) for x in op.inner_iter_args]
            out = body(Reg(op.induction_variable), state)
            scf.YieldOp([x.value for x in out])
        return [Reg(x) for x in op.results]

    def repeat(self, body: Callable[[list[Reg]], tuple[Reg, list[Reg]]], carry: Sequence[Reg]) -> list[Reg]:
        types = [x.value.type for x in carry]
        op = scf.WhileOp(types, [x.value for x in carry])
        before = op.before.blocks.append(*types)
        with ir.InsertionPoint.at_block_begin(before):
            again, out = body([Reg(x) for x in before.arguments])
            scf.condition(again.value, [x.value for x in out])
        after = op.after.blocks.append(*types)
        with ir.InsertionPoint.at_block_begin(after):
            scf.YieldOp(list(after.arguments))
        return [Reg(x) for x in op.results]

    def cond(self, where: Reg, yes: Callable[[], Sequence[Reg]], no: Sequence[Reg]) -> list[Reg]:
        op = scf.IfOp(where.value, [x.value.type for x in no], has_else=bool(no))
        with ir.InsertionPoint(op.then_block):
            scf.YieldOp([x.value for x in yes()])
        if no:
            with ir.InsertionPoint(op.else_block):
                scf.YieldOp([x.value for x in no])
        return [Reg(x) for x in op.results]

    def load(self, pointer: ir.Value, offset: Any, kind: str) -> Reg:
        address = Reg(pointer) + self.i64(offset)
        if kind == "u16":  # widened by the load itself: a conversion after it would wait for it
            return _asm("ld.global.u16 $0, [$1];", ["i32"], [address.value], effects=True)[0]
        kind, suffix = ("f32", "f32") if kind == "f32" else ("i32", "b32")
        return _asm(f"ld.global.{suffix} $0, [$1];", [kind], [address.value], effects=True)[0]

    def store_f32(self, pointer: ir.Value, offset: Any, values: Sequence[Reg], where: Reg) -> None:
        address = Reg(pointer) + self.i64(offset)
        n = len(values)
        vector, slots = {
            1: ("", "$2"),
            2: (".v2", "{$2, $3}"),
            4: (".v4", "{$2, $3, $4, $5}"),
        }[n]
        flag = arith.extui(_type("i32"), where.value)
        ptx = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global{vector}.f32 [$0], {slots}; }}"
        _asm(ptx, [], [address.value, flag, *(v.value for v in values)], memory=True)

    def store_b32(self, pointer: ir.Value, offset: Any, value: Reg, where: Reg) -> None:
        address = Reg(pointer) + self.i64(offset)
        self._predicated("st.global.b32 [$1], $2;", where, address, value)

    def load_pointer(self, pointer: ir.Value, offset: Any) -> ir.Value:
        """An address that is stored somewhere."""
        address = Reg(pointer) + self.i64(offset)
        return _asm("ld.global.b64 $0, [$1];", ["i64"], [address.value], effects=True)[0].value

    def load_word(self, pointer: ir.Value, offset: Any, where: Reg) -> list[Reg]:
        address, flag = Reg(pointer) + self.i64(offset), arith.extui(_type("i32"), where.value)
        ptx = "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
        return _asm(ptx, ["i32"] * 4, [address.value, flag], memory=True)

    def store_word(self, pointer: ir.Value, offset: Any, word: Sequence[Reg], where: Reg) -> None:
        address = Reg(pointer) + self.i64(offset)
        self._predicated("st.global.v4.b32 [$1], {$2, $3, $4, $5};", where, address, *word)

    def wait_for(self, pointer: ir.Value, offset: Any, least: Reg, where: Reg) -> None:
        address, flag = Reg(pointer) + self.i64(offset), arith.extui(_type("i32"), where.value)
        ptx = (
            "{ .reg .pred p, q; .reg .b32 v; setp.eq.b32 q, $0, 0; @q bra done;"
            " again: ld.acquire.sys.global.b32 v, [$1]; sub.s32 v, v, $2; setp.lt.s32 p, v, 0; @p bra "
            "again; done: }"
        )
        _asm(ptx, [], [flag, address.value, least.value], memory=True)

    def release(self, pointer: ir.Value, offset: Any, value: Reg, where: Reg) -> None:
        address = Reg(pointer) + self.i64(offset)
        self._predicated("st.release.sys.global.b32 [$1], $2;", where, address, value)

    def prefetch(self, pointer: ir.Value, offset: Any) -> None:
        _asm("prefetch.global.L2 [$0];", [], [(Reg(pointer) + self.i64(offset)).value], effects=True)

    def store_shared(self, shared: Reg, value: Reg, where: Reg) -> None:
        self._predicated("st.shared.b32 [$1], $2;", where, shared, value)

    def load_shared(self, shared: Reg) -> Reg:
        return _asm("ld.shared.b32 $0, [$1];", ["i32"], [shared.value], memory=True)[0]

    def init_barrier(self, barrier: Reg, arrivals: int, where: Reg) -> None:
        self._predicated(f"mbarrier.init.shared::cta.b64 [$1], {arrivals};", where, barrier)

    def sync_cta(self) -> None:
        _asm("fence.mbarrier_init.release.cluster; bar.sync 0;", [], [], memory=True)

    def expect(self, barrier: Reg, n_bytes: int, where: Reg) -> None:
        ptx = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {n_bytes};"
        self._predicated(ptx, where, barrier)

    def arrive(self, barrier: Reg, where: Reg) -> None:
        self._predicated("mbarrier.arrive.shared::cta.b64 _, [$1];", where, barrier)

    def _predicated(self, instruction: str, where: Reg, *args: Reg) -> None:
        flag = arith.extui(_type("i32"), where.value)
        ptx = f"{{ .reg .pred p; setp.ne.b32 p, $0, 0; @p {instruction} }}"
        _asm(ptx, [], [flag, *(a.value for a in args)], memory=True)

    def wait(self, barrier: Reg, parity: Reg) -> None:
        ptx = "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra again; }"
        _asm(ptx, [], [barrier.value, parity.value], memory=True)

    def copy_rows(
        self, shared: Reg, pointer: ir.Value, offset: Any, n_bytes: int, barrier: Reg, where: Reg
    ) -> None:
        address = Reg(pointer) + self.i64(offset)
        instruction = (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
            f" [$1], [$2], {n_bytes}, [$3], $4;"
        )
        self._predicated(instruction, where, shared, address, barrier, self._read_once)

    def copy_lines(
        self, shared: Reg, box: ir.Value, line: Reg, slot: Reg, n_lines: int, barrier: Reg, where: Reg
    ) -> None:
        del n_lines  # the box has them
        instruction = (
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [$1], [$2, {$3, $4, $5}], [$6], $7;"
        )
        zero = self.i32(0)
        args = (shared, Reg(box), zero, line, slot, barrier, self._read_once)
        self._predicated(instruction, where, *args)

    def set_registers(self, n: int, more: bool) -> None:
        """Of this warp's whole warp group, all of whose warps must come here."""
        _asm(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {n};", [], [], effects=True)

    def load_matrices(self, shared: Reg, transposed: bool) -> list[Reg]:
        trans = ".trans" if transposed else ""
        ptx = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
        return _asm(ptx, ["i32"] * 4, [shared.value], memory=True)

    def transpose(self, pair: Reg) -> Reg:
        return _asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", ["i32"], [pair.value], effects=True)[0]

    def pack(self, low: Reg, high: Reg, kind: str) -> Reg:
        return _asm(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", ["i32"], [low.value, high.value])[0]

    def bytes_to_f16(self, quad: Reg, low: int, high: int) -> Reg:
        # 0x64uu is the float16 1024 + uu: biased bytes become floats by a byte permutation and one
        # subtraction
        select = 0x4040 | low | high << 8
        ptx = (
            f"{{ .reg .b32 u, f, bias; xor.b32 u, $1, 0x80808080; prmt.b32 f, u, 0x64646464, 0x{select:04x};"
            " mov.b32 bias, 0x64806480; sub.rn.f16x2 $0, f, bias; }"
        )
        return _asm(ptx, ["i32"], [quad.value])[0]

    def mma(self, acc: Sequence[Reg], a: Sequence[Reg], b: Sequence[Reg], kind: str) -> list[Reg]:
        ptx = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}},"
            " {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        args = [x.value for x in (*a, *b, *acc)]
        return _asm(ptx, ["f32"] * 4, args)
