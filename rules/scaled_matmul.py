"""Scaled GEMMs: split m or n and the result is split, split k and each rank has a part of the sum; scales follow.

Every recipe is written in the atoms of its blocks. A dim with blocks is `(c s)`: c blocks of s elements, s whole, so
no block is ever cut, and a scale has c where its data has it. What is ragged (a last block that is not full) stays
whole.

Swizzled scales (`ops/scale_tiles.py`) have tiles of 128 rows x 4 columns in order, so tile rows and tile columns are
atoms of the flat tensor, `(rows columns 512)`, whatever shape it is viewed in: a split on tile borders is a split of
the scales. A finer one reads parts of tiles: the scales stay whole and each rank swizzles its own again (the local
program `own_scales`, in `local_matmul.py`), as it does where the whole is padded. 128x128 scales of v2, padded to
multiples of 4 blocks, go the same way.

No operand is a partial sum: 8-bit rounding does not add up. A bias under a split k is added on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from ..errors import RuleError
from ..graph import TensorSpec
from ..ops.scaling import (
    PADDED_BLOCKS,
    ROWWISE,
    TENSORWISE,
    TILE_COLUMNS,
    TILE_ROWS,
    Scales,
    bias_fault,
    inferred_scales,
    named_scales,
    tiled_numel,
)
from . import local_matmul as _programs  # noqa: F401  (defines own_scales)
from .language import Dims, OpCall, Signature, einsum, heavy, rule

aten = torch.ops.aten
OWN = "own_scales"
TILE = TILE_ROWS * TILE_COLUMNS

heavy(aten._scaled_mm.default, aten._scaled_mm_v2.default)

_LEFT_OUT = {
    r".*P\(sum\).* -> P\(sum\)": "a scale is no partial sum, and neither is 8-bit data",
    r"S\(1\) x S\(0\) x R x R.* -> P\(sum\)": "one block of 128 spans all of k: no block is ever cut",
    r"S\(0\) x R x R x R.* -> S\(0\)": "one block of 128 spans all of m: no block is ever cut",
    r"R x S\(1\) x R x R.* -> S\(1\)": "one block of 128 spans all of n: no block is ever cut",
}


@rule(aten._scaled_mm.default, left_out=_LEFT_OUT)
def scaled_mm(op: OpCall) -> Signature:
    """a[m, k], b[k, n], one scale an operand; the recipe is what the kernel infers from their shapes."""
    _check_bias(op)
    a, b, scale_a, scale_b = op.tensors[:4]
    found = inferred_scales(a, b, scale_a, scale_b)
    return scaled_signature(op, (0, 1), ((2,), (3,)), found, bias=4 if op.arg("bias") is not None else None)


@rule(aten._scaled_mm_v2.default, left_out=_LEFT_OUT)
def scaled_mm_v2(op: OpCall) -> Signature:
    """a[m, k], b[k, n], a list of scales an operand; recipes and swizzles are arguments.

    NVFP4 has a second scale of one element, which every rank has. `contraction_dim` changes nothing (the kernel does
    not read it), nor does `use_fast_accum`.
    """
    _check_bias(op)
    a, b = op.tensors[:2]
    found = named_scales(a, b, (op.arg("recipe_a"), op.arg("recipe_b")), (op.arg("swizzle_a"), op.arg("swizzle_b")))
    count = len(op.arg("scale_a"))
    last = 2 + count + len(op.arg("scale_b"))
    scales = tuple(range(2, 2 + count)), tuple(range(2 + count, last))
    return scaled_signature(op, (0, 1), scales, found, bias=last if op.arg("bias") is not None else None)


def _check_bias(op: OpCall) -> None:
    """A bias has an element for each column of the result: no kernel reads another, and none is split with it."""
    bias = op.arg("bias")
    if bias is not None and (wrong := bias_fault(op.tensors[1].shape, bias.shape)):
        raise RuleError(wrong, do=f"pass a bias of {op.tensors[1].shape[1]} elements")


@dataclass
class Dim:
    """One dim of the product (m, n or k) in atoms.

    Attributes:
        atoms: of the data, major to minor.
        scale: what a raw scale has for it, in blocks; () where that stays whole.
        tiles: atom of the tile rows or columns; "" where tiles do not divide it.
        local: atoms whose split needs the local program.
        finer: atoms of which finer splits need it.
    """

    atoms: tuple[str, ...]
    scale: tuple[str, ...] = ()
    tiles: str = ""
    local: tuple[str, ...] = ()
    finer: tuple[str, ...] = ()


@dataclass
class Text:
    """Sizes of atoms and which stay whole, gathered while the dims are written."""

    sizes: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def add(self, name: str, size: int, *, whole: bool = False) -> str:
        self.sizes[name] = size
        if whole:
            self.whole.add(name)
        return name


def scaled_signature(
    op: OpCall,
    data: tuple[int, int],
    scales: tuple[Sequence[int], Sequence[int]],
    found: tuple[Scales, Scales] | None,
    bias: int | None = None,
) -> Signature:
    """Signature of a[m, k] x b[k, n] with the scales of a recipe.

    Args:
        op: the call.
        data: numbers of the operands a and b.
        scales: numbers of their scales.
        found: the recipe; None for one without a kernel, which stays whole.
        bias: number of the bias, where there is one.
    """
    a, b = (op.tensors[i] for i in data)
    if found is None or not _are_tiled(op, data, scales, found):
        return einsum(op, whole_text(op))
    text = Text()
    m = outer_dim(text, "m", a.shape[0], found[0])
    k = inner_dim(text, a, found)
    n = outer_dim(text, "n", b.shape[1], found[1])
    dims: list[Dims] = [() for _ in op.tensors]
    finer: list[Dims] = [() for _ in op.tensors]
    dims[data[0]], dims[data[1]] = (m.atoms, k.atoms), (k.atoms, n.atoms)
    for outer, how, numbers in ((m, found[0], scales[0]), (n, found[1], scales[1])):
        first = numbers[0]
        dims[first], finer[first] = scale_dims(text, op.tensors[first], how, outer, k)
    if bias is not None:
        dims[bias] = (n.atoms,)
    for number in (i for i, made in enumerate(dims) if not made):
        dims[number] = tuple(() for _ in op.tensors[number].shape)
    programs = dict.fromkeys((*m.local, *n.local, *k.local), OWN)
    if bias is not None:
        programs |= dict.fromkeys(k.atoms, OWN)
    if not all(_fits(made, spec, text.sizes) for made, spec in zip(dims, op.tensors, strict=True)):
        return einsum(op, whole_text(op))  # scales of another shape than the recipe's: the kernel will say so
    pairs = tuple((d, s[0]) for d, s in zip(data, scales, strict=True))
    return in_atoms(
        dims,
        ((m.atoms, n.atoms),),
        text.sizes,
        whole=text.whole,
        reduced=dict.fromkeys(k.atoms, "P"),
        local=programs,
        scaled=pairs if found[0].recipe in (TENSORWISE, ROWWISE) else (),
        finer=dict.fromkeys((*m.finer, *n.finer, *k.finer), OWN),
        finer_dims={i: dims_of for i, dims_of in enumerate(finer) if dims_of},
    )


def _are_tiled(
    op: OpCall, data: tuple[int, int], scales: tuple[Sequence[int], Sequence[int]], found: tuple[Scales, Scales]
) -> bool:
    """Whether swizzled scales have as many elements as their tiles."""
    a, b = (op.tensors[i] for i in data)
    for how, numbers, outer in ((found[0], scales[0], a.shape[0]), (found[1], scales[1], b.shape[1])):
        if how.order == "tiles":
            blocks = -(-a.shape[1] // how.inner_block(a.dtype))
            if op.tensors[numbers[0]].numel != tiled_numel(outer, blocks):
                return False
    return True


def _fits(dims: Dims, spec: TensorSpec, sizes: Mapping[str, int]) -> bool:
    return len(dims) == len(spec.shape) and all(
        not dim or prod(sizes[atom] for atom in dim) == size for dim, size in zip(dims, spec.shape, strict=True)
    )


def in_atoms(
    operands: Sequence[Dims],
    results: Sequence[Dims],
    sizes: Mapping[str, int],
    *,
    whole: set[str],
    reduced: Mapping[str, str],
    local: Mapping[str, str],
    finer: Mapping[str, str],
    finer_dims: Mapping[int, Dims],
    **more: Any,
) -> Signature:
    """A signature of dims in atoms, those of size 1 left out.

    Args:
        finer: atoms of which finer splits run a program, and its name.
        finer_dims: operands whose dims are others then.
        more: as in `Signature`.
    """
    big = {atom: size for atom, size in sizes.items() if size > 1}

    def pruned(dims: Dims) -> Dims:
        return tuple(tuple(atom for atom in dim if atom in big) for dim in dims)

    def kept(mapping: Mapping[str, str]) -> dict[str, str]:
        return {atom: value for atom, value in mapping.items() if atom in big and atom not in whole}

    base = Signature(
        tuple(map(pruned, operands)),
        tuple(map(pruned, results)),
        big,
        reduced={atom: kind for atom, kind in reduced.items() if atom in big},
        whole=frozenset(whole & big.keys()),
        local=kept(local),
        **more,
    )
    programs = kept(finer)
    if not programs:
        return base
    other = tuple(pruned(finer_dims.get(i, dims)) for i, dims in enumerate(operands))
    second = Signature(
        other, base.results, base.sizes, reduced=base.reduced, whole=base.whole, local=programs, finer=None
    )
    return Signature(**{**vars(base), "finer": second})


def outer_dim(text: Text, name: str, size: int, how: Scales) -> Dim:
    """m or n: whole blocks of 128 for 128x128 scales, whole tile rows for swizzled ones, else one atom."""
    if how.outer_block > 1:
        if size % how.outer_block:
            return Dim((text.add(name, size, whole=True),))
        blocks = text.add(f"{name}b", size // how.outer_block)
        return Dim((blocks, text.add(f"{name}s", how.outer_block, whole=True)), scale=(blocks,))
    if how.order == "tiles":
        return _tiled(text, name, size, TILE_ROWS)
    atom = text.add(name, size)
    return Dim((atom,), scale=(atom,))


def inner_dim(text: Text, a: TensorSpec, found: tuple[Scales, Scales]) -> Dim:
    """k: blocks, four of them to a tile column or to a padded run where scales come in those."""
    size, block = a.shape[1], found[0].inner_block(a.dtype)
    if not block:
        return Dim((text.add("k", size),))
    if size % block:
        return Dim((text.add("k", size, whole=True),))
    blocks = size // block
    if all(how.order != "tiles" and not how.is_padded for how in found):
        atom = text.add("kb", blocks)
        made = Dim((atom,), scale=(atom,))
    else:
        run = TILE_COLUMNS if found[0].order == "tiles" or found[1].order == "tiles" else PADDED_BLOCKS
        made = _tiled(text, "kb", blocks, run)
        made.scale = made.atoms
    made.atoms = (*made.atoms, text.add("ks", block, whole=True))
    return made


def _tiled(text: Text, name: str, size: int, run: int) -> Dim:
    """A dim of whole runs, `(t r)`: splits of t are plain unless finer; where runs do not divide it, none is.

    Factors split evenly from the major one on, so 86 tiles come apart in 2 ways and no more, while their 344 blocks
    come apart in 8. Where tiles are that few, the dim is one atom, and the local program cuts the scales.
    """
    if size % run or not _splits_well(size // run):
        atom = text.add(name, size)
        return Dim((atom,), local=(atom,))
    tiles, inside = text.add(f"{name}t", size // run), text.add(f"{name}r", run)
    return Dim((tiles, inside), tiles=tiles, local=(inside,), finer=(tiles,))


def _splits_well(count: int) -> bool:
    """Whether a number of tiles is a power of two, whose splits run on into the tiles, or a multiple of 8."""
    return count % 8 == 0 or count & (count - 1) == 0


def scale_dims(text: Text, spec: TensorSpec, how: Scales, outer: Dim, inner: Dim) -> tuple[Dims, Dims]:
    """Atoms of a scale, and those it has for splits finer than a tile.

    A tile that the scale's shape does not let stand as a factor of one dim is read by the local program: `inner` and
    `outer` are told so.
    """
    ndim = len(spec.shape)
    if how.order == "tiles":
        made = tile_dims(text, f"{outer.atoms[0]}z", spec, outer, inner)
        return made, ((),) * ndim
    if not how.order:
        return ((),) * ndim, ()
    if how.recipe == ROWWISE:
        dims: Dims = (outer.scale, ()) if how.order == "outer" else ((), outer.scale)
        return dims, dims if inner.finer or outer.finer else ()
    blocks = inner.scale
    if how.is_padded:
        run = text.add(f"{outer.atoms[0]}z", PADDED_BLOCKS, whole=True)
        blocks = (inner.tiles, run) if inner.tiles else ()
    dims = (outer.scale, blocks) if how.order == "outer" else (blocks, outer.scale)
    if ndim == 1 and how.order == "outer":
        return (((*outer.scale, *blocks),), ())
    return dims, ((), outer.scale) if how.is_padded else ()


def tile_dims(text: Text, fill: str, spec: TensorSpec, outer: Dim, inner: Dim) -> Dims:
    """Atoms of swizzled scales in whatever shape: tile rows and tile columns where a dim has them as factors.

    The flat order is `(tile rows, tile columns, 512)`. A border between two of them is a factor's where it is a border
    of the view too, or lies inside one dim and divides it.
    """
    shape = spec.shape
    total = prod(shape)
    columns = text.sizes[inner.tiles] if inner.tiles else None
    rows = text.sizes[outer.tiles] if outer.tiles else None
    borders: list[int] = []
    if rows is not None and rows > 1:
        borders.append(total // rows)
    if columns is not None and columns > 1:
        borders += [TILE * columns, TILE]
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    edges = {total, *strides}
    good = [b for b in dict.fromkeys(borders) if all(max(b, e) % min(b, e) == 0 for e in edges)]
    named = {total // rows: outer.tiles} if rows is not None and rows > 1 and total // rows in good else {}
    if columns is not None and columns > 1 and {TILE * columns, TILE} <= set(good):
        named[TILE] = inner.tiles
    spans = {start: text.sizes[atom] for start, atom in named.items()}
    named = {s: a for s, a in named.items() if not any(s < edge < s * spans[s] for edge in edges)}
    _tell(outer, named)
    _tell(inner, named)
    found = []
    for size, stride in zip(shape, strides, strict=True):
        inside = sorted((start for start in named if stride <= start < stride * size), reverse=True)
        atoms, above = [], stride * size
        for start in inside:
            end = start * text.sizes[named[start]]
            if above > end:
                atoms.append(text.add(f"{fill}{end}", above // end, whole=True))
            atoms.append(named[start])
            above = start
        if above > stride and inside:
            atoms.append(text.add(f"{fill}{stride}", above // stride, whole=True))
        found.append(tuple(atoms))
    return tuple(found)


def _tell(dim: Dim, named: Mapping[int, str]) -> None:
    """A tile atom that the scales do not have is split by the local program alone."""
    if dim.tiles and dim.tiles not in named.values():
        dim.local = tuple(dict.fromkeys((*dim.local, dim.tiles)))


def whole_text(op: OpCall) -> str:
    """Text of a rule that keeps every tensor whole."""

    def text(specs: Sequence[TensorSpec]) -> str:
        return ", ".join(" ".join("_" for _ in spec.shape) or "." for spec in specs)

    return f"{text(op.tensors)} -> {text(op.out)}"
