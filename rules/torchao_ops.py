"""torchao's block-scaled casts and GEMMs, by name: torchao is never imported for them.

Their ops exist where torchao registered them: the blockwise float8 ones wherever triton is installed, the MX ones on
sm100 and later and on gfx950. A block is never cut: every dim along which blocks lie is `(c s)` with s whole. torchao's
own DTensor rules (0.18) let half a block be split off, give the data of the dim-1 cast, which keeps the shape of its
input, the layout of the transposed one, and leave rowwise results of `mxfp8_quantize` replicated.

Source: torchao 0.18, prototype/mx_formats/kernels.py and prototype/blockwise_fp8_training/kernels.py.
"""

from __future__ import annotations

from dataclasses import replace

from ..ops.scaling import BLOCK_128X128, TILE_ROWS, named_scales
from .language import OpCall, Signature, einsum, heavy, named_rules, rule_by_name
from .scaled_matmul import scaled_signature, whole_text

_BLOCKWISE = "torchao.triton_fp8_blockwise_"
_GEMMS = (
    "torchao.triton_fp8_gemm_1x128_128x128.default",
    "torchao.triton_fp8_gemm_1x128_128x1.default",
    "torchao.blockwise_scaled_mm.default",
)

_LEFT_OUT = {r"R x R x .*P\(sum\).* -> P\(sum\)": "a scale is no partial sum"}

heavy(*_GEMMS)


def _blocked(op: OpCall, dim: int, name: str, block: int) -> str:
    """Text of a dim of the operand in whole blocks: `(name name_s)`; one atom that stays whole where it is ragged."""
    return f"({name} {name}s)" if op.tensors[0].shape[dim] % block == 0 else "_"


def _gemm(op: OpCall, text: str, **blocks: int) -> Signature:
    """Signature of a product; blocks: atom -> elements of its blocks."""
    inside = {f"{name}s": size for name, size in blocks.items()}
    return einsum(op, text, sizes=inside, whole=tuple(inside))


def _cast(op: OpCall, text: str, **blocks: int) -> Signature:
    """Signature of a cast, which sums nothing: a result that lacks an atom is one that was not asked for."""
    return replace(_gemm(op, text, **blocks), reduced={})


@rule_by_name("torchao.triton_to_mxfp8_dim0.default")
def to_mxfp8_dim0(op: OpCall) -> Signature:
    """x[..., (c s)] -> data[..., (c s)], scale[..., c]."""
    names = " ".join(f"d{i}" for i in range(len(op.tensors[0].shape) - 1))
    return _cast(op, f"{names} (c cs) -> {names} (c cs), {names} c", c=op.arg("inner_block_size"))


@rule_by_name("torchao.triton_to_mxfp8_dim1.default")
def to_mxfp8_dim1(op: OpCall) -> Signature:
    """x[(c s), n] -> data[(c s), n], column-major; scale[n, c]."""
    return _cast(op, "(c cs) n -> (c cs) n, n c", c=op.arg("inner_block_size"))


@rule_by_name("torchao.mxfp8_quantize.default")
def mxfp8_quantize(op: OpCall) -> Signature:
    """x[r, k] -> rowwise data[r, (c s)], columnwise data[(d t), k], scales[r, c, 1] and [k, d]; unasked ones empty."""
    rowwise, colwise = op.arg("rowwise"), op.arg("colwise")
    rows, columns = ("(d ds)" if colwise else "d"), ("(c cs)" if rowwise else "c")
    data = f"{rows} {columns}"
    by_row = (data, f"{rows} c _") if rowwise else ("_", "_")
    by_column = (data, f"{columns} d") if colwise else ("_", "_")
    blocks = {"d": op.arg("scale_dim_y")} if colwise else {}
    blocks |= {"c": 32} if rowwise else {}
    return _cast(op, f"{data} -> {by_row[0]}, {by_column[0]}, {by_row[1]}, {by_column[1]}", **blocks)


@rule_by_name("torchao.triton_mx_block_rearrange.default")
def mx_block_rearrange(op: OpCall) -> Signature:
    """Raw scales x[(t 128), c] -> swizzled, shown as [(t 128), c padded]: rows split in whole tiles, columns do not."""
    is_ragged = op.tensors[0].shape[0] % TILE_ROWS
    return einsum(op, whole_text(op)) if is_ragged else _cast(op, "(t ts) _ -> (t ts) _", t=TILE_ROWS)


@rule_by_name(f"{_BLOCKWISE}act_quant_lhs.default")
def act_quant_lhs(op: OpCall) -> Signature:
    """x[m, (c s)] -> data[m, (c s)], scale[m, c]."""
    return _cast(op, "m (c cs) -> m (c cs), m c", c=op.arg("block_size"))


@rule_by_name(f"{_BLOCKWISE}act_quant_rhs.default")
def act_quant_rhs(op: OpCall) -> Signature:
    """x[(c s), k] -> data[(c s), k], scale[c, k]; rows need not fill the last block and are whole then."""
    rows = _blocked(op, 0, "c", op.arg("block_size"))
    return _cast(op, f"{rows} k -> {rows} k, {'_' if rows == '_' else 'c'} k", c=op.arg("block_size"))


@rule_by_name(f"{_BLOCKWISE}act_quant_transposed_lhs.default")
def act_quant_transposed_lhs(op: OpCall) -> Signature:
    """x[(c s), k] -> data[k, (c s)], scale[k, c]."""
    return _cast(op, "(c cs) k -> k (c cs), k c", c=op.arg("block_size"))


@rule_by_name(f"{_BLOCKWISE}weight_quant_rhs.default")
def weight_quant_rhs(op: OpCall) -> Signature:
    """x[(c s), (d t)] -> data of the same dims, scale[c, d]."""
    block = op.arg("block_size")
    return _cast(op, "(c cs) (d ds) -> (c cs) (d ds), c d", c=block, d=block)


@rule_by_name(f"{_BLOCKWISE}weight_quant_transposed_rhs.default")
def weight_quant_transposed_rhs(op: OpCall) -> Signature:
    """x[(c s), (d t)] -> data[(d t), (c s)], scale[d, c]."""
    block = op.arg("block_size")
    return _cast(op, "(c cs) (d ds) -> (d ds) (c cs), d c", c=block, d=block)


@rule_by_name(*_GEMMS[:2], left_out=_LEFT_OUT)
def triton_fp8_gemm(op: OpCall) -> Signature:
    """a[m, (c s)], b[(c s), n], a_s[m, c], b_s[c, n] or, in 128x128, b[(c s), (d t)], b_s[c, d] -> out[m, n]."""
    block, (k, n) = op.arg("block_size"), op.tensors[1].shape
    inner, blocks = ("_", "_") if k % block else ("(c cs)", "c")
    if str(op.op) == _GEMMS[1]:
        outer, columns = "n", "n"
    else:
        outer, columns = ("_", "_") if n % block else ("(d ds)", "d")
    return _gemm(op, f"m {inner}, {inner} {outer}, m {blocks}, {blocks} {columns} -> m {outer}", c=block, d=block)


@rule_by_name(_GEMMS[2], left_out=_LEFT_OUT)
def blockwise_scaled_mm(op: OpCall) -> Signature:
    """`aten._scaled_mm_v2` in blocks of 128, which pads the 128x128 scales of b itself: they come unpadded."""
    a, b = op.tensors[:2]
    recipes = (op.arg("scale_recipe_a"),), (op.arg("scale_recipe_b"),)
    found = named_scales(a, b, recipes, ((), ()))
    if found is None or found[0].recipe == BLOCK_128X128:
        return einsum(op, whole_text(op))
    return scaled_signature(op, (0, 1), ((2,), (3,)), (found[0], replace(found[1], is_padded=False)))


TORCHAO_OPS = tuple(name for name in named_rules() if name.startswith("torchao."))
"""Names of torchao's ops that have a rule here; each is a kernel of its own."""
