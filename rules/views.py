"""Ops that rename, merge, cut or move dims without arithmetic; sums, maxima and own scales pass through them."""

from __future__ import annotations

import torch

from .language import OpCall, Signature, einsum, moved, rule
from .regroup import regrouped

aten = torch.ops.aten

CUT = {r"S\((.)\) -> S\(\1\)": "a step that fits each part, or a slice of everything"}


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    left_out={r"S\(0\) -> S\(0\)": "(6 4) -> (8 3): a split of both, but no factor of both"},
)
def view(op: OpCall) -> Signature:
    return regrouped(op)


@rule(aten.view.dtype)
def view_dtype(op: OpCall) -> Signature:
    """The same bytes as another dtype, of which `r` narrow elements make a wide one; bits are no parts of a sum."""
    before, after = op.tensors[0].dtype.itemsize, op.out[0].dtype.itemsize
    ratio = max(before, after) // min(before, after)
    *outer, last = [f"d{i}" for i in range(len(op.out[0].shape))] or ["."]
    wide, narrow = " ".join([*outer, last]), " ".join([*outer, last if ratio == 1 else f"({last} r)"])
    text = f"{wide} -> {narrow}" if before > after else f"{narrow} -> {wide}"
    return einsum(op, text, sizes={"r": ratio}, whole=("r",))


@rule(aten.t.default)
def t(op: OpCall) -> Signature:
    return moved(op, tuple(reversed(range(len(op.tensors[0].shape)))))


@rule(aten.transpose.int)
def transpose(op: OpCall) -> Signature:
    ndim = len(op.tensors[0].shape)
    order = list(range(ndim))
    if ndim:
        a, b = op.arg("dim0") % ndim, op.arg("dim1") % ndim
        order[a], order[b] = b, a
    return moved(op, order)


@rule(aten.permute.default)
def permute(op: OpCall) -> Signature:
    ndim = len(op.tensors[0].shape)
    return moved(op, [d % ndim for d in op.arg("dims")])


@rule(aten.unsqueeze.default)
def unsqueeze(op: OpCall) -> Signature:
    order: list[int | None] = list(range(len(op.tensors[0].shape)))
    order.insert(op.arg("dim") % len(op.out[0].shape), None)
    return moved(op, order)


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(op: OpCall) -> Signature:
    shape = op.tensors[0].shape
    gone = set(range(len(shape)))
    if op.op is not aten.squeeze.default:
        dims = op.arg("dim")
        gone = {d % max(len(shape), 1) for d in (dims if isinstance(dims, tuple) else (dims,))}
    return moved(op, [i for i, size in enumerate(shape) if not (i in gone and size == 1)])


@rule(aten.expand.default)
def expand(op: OpCall) -> Signature:
    """A new or widened dim may be split too: every rank makes its part of it from the whole operand."""
    before, after = op.tensors[0].shape, op.out[0].shape
    offset = len(after) - len(before)
    names = tuple((f"d{i}",) if size > 1 else () for i, size in enumerate(after))
    operand = tuple(names[offset + i] if size > 1 else () for i, size in enumerate(before))
    sizes = {f"d{i}": size for i, size in enumerate(after) if size > 1}
    return Signature((operand,), (names,), sizes, linear=((0,),), monotone=(0,), passes_scales=True)


@rule(
    aten.repeat.default,
    left_out={r"R -> S\(.\)": "a longer dim that is repeated: needs as many repeats as ranks"},
)
def repeat(op: OpCall) -> Signature:
    """A dim of size 1 that is repeated may be split as in `expand`; one that is longer stays whole."""
    before, after, times = op.tensors[0].shape, op.out[0].shape, op.arg("repeats")
    offset = len(after) - len(before)
    sizes = (*[1] * offset, *before)
    names = tuple((f"d{i}",) if size > 1 and (sizes[i] == 1 or times[i] == 1) else () for i, size in enumerate(after))
    operand = tuple(names[offset + i] if size > 1 else () for i, size in enumerate(before))
    atoms = {name[0]: after[i] for i, name in enumerate(names) if name}
    return Signature((operand,), (names,), atoms, linear=((0,),), monotone=(0,), passes_scales=True)


@rule(aten.slice.Tensor, left_out=CUT)
def slice_(op: OpCall) -> Signature:
    """The dim that is cut stays whole."""
    return _rewritten(op, op.arg("dim"))


@rule(aten.select.int)
def select(op: OpCall) -> Signature:
    ndim = len(op.tensors[0].shape)
    return moved(op, [i for i in range(ndim) if i != op.arg("dim") % ndim])


@rule(aten.slice_backward.default, aten.flip.default, aten.roll.default, left_out=CUT)
def slice_backward(op: OpCall) -> Signature:
    dims = op.arg("dim" if op.op is aten.slice_backward.default else "dims")
    if op.op is aten.roll.default and not dims:
        dims = tuple(range(len(op.tensors[0].shape)))  # rolls the flattened tensor
    return _rewritten(op, *(dims if isinstance(dims, (tuple, list)) else (dims,)))


@rule(aten.constant_pad_nd.default)
def pad(op: OpCall) -> Signature:
    """Padded dims stay whole; sums pass where the padding is zero."""
    ndim, widths = len(op.tensors[0].shape), op.arg("pad")
    padded = [ndim - 1 - i for i in range(len(widths) // 2) if widths[2 * i] or widths[2 * i + 1]]
    signature = _rewritten(op, *padded)
    if op.arg("value") in (0, None) or not padded:
        return signature
    return Signature(signature.operands, signature.results, signature.sizes)


@rule(aten.cat.default, left_out={r"S\((.)\) -> S\(\1\)": "one tensor joined with nothing"})
def cat(op: OpCall) -> Signature:
    """The dim that is joined stays whole; partial sums pass where every part is one."""
    shape = op.out[0].shape
    dim = op.arg("dim") % len(shape)
    names = tuple((f"d{i}",) if size > 1 and i != dim else () for i, size in enumerate(shape))
    sizes = {f"d{i}": size for i, size in enumerate(shape) if size > 1 and i != dim}
    every = tuple(range(len(op.tensors)))
    operands = tuple(((),) if spec.shape == (0,) else names for spec in op.tensors)  # (0,) joins with any shape
    return Signature(operands, (names,), sizes, linear=(every,), monotone=every)


@rule(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    left_out={r"S\((.)\) -> S\(\1\)": "one piece: nothing is cut"},
)
def split_(op: OpCall) -> Signature:
    """The dim that is cut stays whole."""
    ndim = len(op.tensors[0].shape)
    dim = op.arg("dim") % ndim
    names = tuple((f"d{i}",) if size > 1 and i != dim else () for i, size in enumerate(op.tensors[0].shape))
    sizes = {f"d{i}": size for i, size in enumerate(op.tensors[0].shape) if size > 1 and i != dim}
    return Signature((names,), tuple(names for _ in op.out), sizes, linear=((0,),), monotone=(0,))


def _rewritten(op: OpCall, *dims: int) -> Signature:
    ndim = len(op.tensors[0].shape)
    whole = {d % ndim for d in dims}
    return moved(op, [None if i in whole else i for i in range(ndim)])
