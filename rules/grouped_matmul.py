"""Grouped GEMMs of experts: offsets say which rows of the tokens belong to which expert.

Features split as in any product: n gives a split result, k a part of the sum. Tokens and experts split through the
local program `own_group` (`local_grouped.py`), because the offsets are of the whole:

* tokens: each rank counts how many of its own tokens lie before each end, and multiplies those;
  Where tokens are contracted (gradients of weights) they stay together in runs of 16 bytes, as groups must end there;
* experts: each rank picks the tokens of its experts; results of the others are zero and add up to the whole. Where
  experts are a dim of the result (gradients of weights), that splits instead.

Rowwise scales follow the rows they belong to. MX scales of tokens lie group by group, each padded to whole tiles, so
where a rank's tokens begin inside a group its scales would begin inside a tile: tokens stay whole. The scales of
gradients' operands (2-D x 2-D) have groups of columns, which no split of the tensor follows: they stay whole, and each
rank swizzles those of its rows and experts again. A batched MX product, which has no kernel, splits its batch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..graph import TensorSpec
from ..ops import grouped_mm as _ops  # noqa: F401  (gives aten._scaled_grouped_mm_v2 its result's shape)
from ..ops.scaling import BLOCK_1X32, ROWWISE, SWIZZLE_32_4_4, TILE_ROWS, Scales, tiled_numel
from . import local_grouped as _programs  # noqa: F401  (defines own_group)
from .gemm_constraints import ROW_BYTES
from .language import Dims, OpCall, Signature, einsum, heavy, rule
from .scaled_matmul import Text, in_atoms, inner_dim, outer_dim, tile_dims, whole_text

aten = torch.ops.aten
OWN = "own_group"

heavy(aten._grouped_mm.default, aten._scaled_grouped_mm.default, aten._scaled_grouped_mm_v2.default)


@rule(aten._grouped_mm.default)
def grouped_mm(op: OpCall) -> Signature:
    """Plain operands: a partial sum of one of them passes."""
    if op.arg("bias") is not None:
        return einsum(op, whole_text(op))
    return _signature(op, None, (), linear=((0,), (1,)))


_LEFT_OUT = {r"R x R x .*P\(sum\).* -> P\(sum\)": "a scale is no partial sum"}


@rule(aten._scaled_grouped_mm.default, left_out=_LEFT_OUT)
def scaled_grouped_mm(op: OpCall) -> Signature:
    """Rowwise with float32 scales, MX with float8_e8m0fnu ones, which are swizzled."""
    if op.arg("bias") is not None or op.arg("scale_result") is not None:
        return einsum(op, whole_text(op))
    is_mx = op.tensors[2].dtype is torch.float8_e8m0fnu
    return _signature(op, Scales(BLOCK_1X32, "tiles") if is_mx else Scales(ROWWISE, "outer"), (2, 3))


@rule(aten._scaled_grouped_mm_v2.default, left_out=_LEFT_OUT)
def scaled_grouped_mm_v2(op: OpCall) -> Signature:
    """The same, recipes named; scales of two levels and unswizzled MX scales (ROCm) stay whole."""
    recipes = tuple(op.arg("recipe_a")), tuple(op.arg("recipe_b"))
    swizzles = tuple(op.arg("swizzle_a")), tuple(op.arg("swizzle_b"))
    if op.arg("bias") is None and recipes == ((ROWWISE,), (ROWWISE,)):
        return _signature(op, Scales(ROWWISE, "outer"), (2, 3))
    if op.arg("bias") is None and recipes == ((BLOCK_1X32,), (BLOCK_1X32,)) and swizzles == ((SWIZZLE_32_4_4,),) * 2:
        return _signature(op, Scales(BLOCK_1X32, "tiles"), (2, 3))
    return einsum(op, whole_text(op))


def _signature(op: OpCall, how: Scales | None, scales: tuple[int, ...], **more: Any) -> Signature:
    """The signature of the form that the operands' ranks say."""
    a, b = op.tensors[:2]
    form = len(a.shape), len(b.shape)
    if how is not None and how.recipe == BLOCK_1X32:
        if form == (2, 3):
            return _mx_tokens(op, scales)
        if form == (2, 2):
            local = dict.fromkeys(("e", "m", "n"), OWN)
            text = "m _, _ n, _ _, _ _, _ -> e m n"
            return _without_ones(einsum(op, text, sizes={"e": op.out[0].shape[0]}, local=local))
        return einsum(op, "e _ _, e _ _, e _, e _ -> e _ _" if form == (3, 3) else whole_text(op))
    text, factors, programs = {
        (2, 3): ("t k, e k n", "t, e n", ("t", "e")),
        (2, 2): ("m (t s), (t s) n", "(e m), (e n)", ("t", "e")),
        (3, 2): ("e m k, k t", "e m, t", ("t", "e")),
        (3, 3): ("e m k, e k n", "e m, e n", ()),
    }[form]
    made = {(2, 3): "t n", (2, 2): "e m n", (3, 2): "m t", (3, 3): "e m n"}[form]
    operands = ", ".join([text, *([factors] if scales else []), *(["_"] if form != (3, 3) else [])])
    local = dict.fromkeys(programs, OWN)
    sizes = {"e": op.out[0].shape[0], "s": _run(a)} if form == (2, 2) else None
    whole = ("s",) if form == (2, 2) else ()
    return _without_ones(einsum(op, f"{operands} -> {made}", sizes=sizes, local=local, whole=whole, **more))


def _run(a: TensorSpec) -> int:
    """Tokens that stay together where tokens are contracted: the kernel wants groups to end at multiples of 16 bytes.

    A split that keeps such runs keeps the ends of a rank's groups there. All tokens, where they are no such runs.
    """
    tokens, run = a.shape[1], ROW_BYTES // a.dtype.itemsize
    return run if tokens % run == 0 else tokens


def _without_ones(signature: Signature) -> Signature:
    """Without programs for atoms of size 1, which nothing splits."""
    local = {atom: name for atom, name in signature.local.items() if atom in signature.sizes}
    return Signature(**{**vars(signature), "local": local})


def _mx_tokens(op: OpCall, scales: Sequence[int]) -> Signature:
    """tokens[t, k], weights[e, k, n], swizzled scales of the groups' rows and of each expert's weight -> out[t, n]."""
    a, b, scale_a, scale_b = op.tensors[:4]
    how = Scales(BLOCK_1X32, "tiles")
    (experts, _, n), blocks = b.shape, -(-b.shape[1] // how.inner_block(b.dtype))
    width = tiled_numel(TILE_ROWS, blocks) // TILE_ROWS
    if scale_a.shape[1:] != (width,) or scale_b.shape != (experts, tiled_numel(n, blocks)):
        return einsum(op, whole_text(op))
    text = Text()
    t, e = text.add("t", a.shape[0], whole=True), text.add("e", experts)
    columns, inner = outer_dim(text, "n", n, how), inner_dim(text, a, (how, how))
    one = TensorSpec(scale_b.shape[1:], (1,), scale_b.dtype)
    own_b = ((e,), *tile_dims(text, "nz", one, columns, inner))
    if inner.tiles:  # scales of tokens stay whole: a part of their columns has another shape than a split gives it
        inner.local = (*inner.local, inner.tiles)
    operands: list[Dims] = [((t,), inner.atoms), ((e,), inner.atoms, columns.atoms), ((), ()), own_b, ((),)]
    return in_atoms(
        operands,
        (((t,), columns.atoms),),
        text.sizes,
        whole=text.whole,
        reduced=_sums((*inner.atoms, e)),
        local=dict.fromkeys((e, *columns.local, *inner.local), OWN),
        finer=dict.fromkeys((*columns.finer, *inner.finer), OWN),
        finer_dims={scales[0]: ((), ()), scales[1]: ((e,), ())},
    )


def _sums(atoms: Sequence[str]) -> Mapping[str, str]:
    return dict.fromkeys(atoms, "P")
