"""Table look-ups: embedding, gather, scatter and their gradients.

A split table is looked up by every rank in its own rows, with zero where the index is another rank's (`masked_lookup`,
a program that needs the offset of the rank's part): the parts add up.
"""

from __future__ import annotations

import torch

from ..graph import TensorSpec
from .language import OpCall, Signature, einsum, heavy, rule

aten = torch.ops.aten

heavy(aten.embedding_dense_backward.default)


@rule(aten.embedding.default)
def embedding(op: OpCall) -> Signature:
    """weight[v, d], indices[...] -> out[..., d]."""
    i = " ".join(f"i{k}" for k in range(len(op.tensors[1].shape))) or "."
    return einsum(op, f"v d, {i} -> {i.strip('.')} d", linear=((0,),), local={"v": "masked_lookup"})


@rule(aten.embedding_dense_backward.default)
def embedding_backward(op: OpCall) -> Signature:
    """grad[..., d], indices[...] -> weight's gradient [v, d]: tokens add up; a split table keeps its own rows.

    Gradients scaled by how often an index occurs need all tokens on every rank.
    """
    tokens = [f"i{k}" for k in range(len(op.tensors[1].shape))]
    i = " ".join(tokens)
    whole = tokens if op.arg("scale_grad_by_freq") else ()
    return einsum(op, f"{i} d, {i} -> v d", linear=((0,),), whole=whole, local={"v": "masked_lookup"})


@rule(aten.gather.default)
def gather(op: OpCall) -> Signature:
    """x[..., v, ...] at index[..., j, ...] along one dim: the other dims split together; a split v adds up.

    Dims where x is longer than the index (only its first part is read) stay whole.
    """
    x, index = op.tensors
    ndim = len(x.shape)
    if not ndim or len(index.shape) != ndim:
        return _unsplit(op)
    dim = op.arg("dim") % ndim
    same = [f"d{i}" if x.shape[i] == index.shape[i] else "_" for i in range(ndim)]
    left, right = list(same), list(same)
    left[dim], right[dim] = "v", "j"
    texts = " ".join(left), " ".join(right)
    return einsum(op, f"{texts[0]}, {texts[1]} -> {texts[1]}", linear=((0,),), local={"v": "masked_lookup"})


@rule(aten.scatter.value)
def scatter_value(op: OpCall) -> Signature:
    """One value written at index[..., j, ...] of x[..., v, ...]: other dims split; a rank writes into its part of v.

    Linear where the value is zero.
    """
    x, index = op.tensors
    ndim = len(x.shape)
    if not ndim or len(index.shape) != ndim:
        return _unsplit(op)
    dim = op.arg("dim") % ndim
    same = [f"d{i}" if x.shape[i] == index.shape[i] else "_" for i in range(ndim)]
    left, right = list(same), list(same)
    left[dim], right[dim] = "v", "_"
    texts = " ".join(left), " ".join(right)
    linear = ((0,),) if op.arg("value") == 0 else ()
    return einsum(op, f"{texts[0]}, {texts[1]} -> {texts[0]}", linear=linear, local={"v": "masked_write"})


@rule(
    aten.scatter_add.default,
    left_out={r"P\(sum\) x S\(.\) x S\(.\) -> P\(sum\)": "indices split over a partial table: nobody makes one"},
)
def scatter_add(op: OpCall) -> Signature:
    """source[..., j, ...] added at index[..., j, ...] of x[..., v, ...]: as above; the indices stay whole along j.

    Linear in x and source together.
    """
    x, index, source = op.tensors
    ndim = len(x.shape)
    if not ndim or len(index.shape) != ndim:
        return _unsplit(op)
    dim = op.arg("dim") % ndim
    same = [f"d{i}" if x.shape[i] == index.shape[i] == source.shape[i] else "_" for i in range(ndim)]
    left, right = list(same), list(same)
    left[dim], right[dim] = "v", "_"
    texts = " ".join(left), " ".join(right)
    return einsum(
        op, f"{texts[0]}, {texts[1]}, {texts[1]} -> {texts[0]}", linear=((0, 2),), local={"v": "masked_write"}
    )


@rule(aten.index.Tensor)
def index(op: OpCall) -> Signature:
    """x[i, j, ...] with index tensors: dims of x that no index reads split, and so do the dims of the indices."""
    x, *index_specs = op.tensors
    indices = op.arg("indices")
    used = [k for k, item in enumerate(indices) if item is not None]
    rest = [k for k in range(len(x.shape)) if k not in used]
    index_ndim = len(op.out[0].shape) - len(rest)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    left = " ".join("_" if k in used else f"d{k}" for k in range(len(x.shape)))
    kept = [f"d{k}" for k in rest]
    names = [f"i{k}" for k in range(index_ndim)]
    out = " ".join([*kept[:first], *names, *kept[first:]]) or "."
    others = "".join(f", {_broadcast(names, spec)}" for spec in index_specs)
    return einsum(op, f"{left}{others} -> {out}", linear=((0,),))


def _unsplit(op: OpCall) -> Signature:
    """Numbers without dims, and empty indices of any shape: nothing to split."""
    operands, results = (tuple(((),) * len(spec.shape) for spec in specs) for specs in (op.tensors, op.out))
    return Signature(operands, results, {})


def _broadcast(names: list[str], spec: TensorSpec) -> str:
    """The last of the names, one a dim; `_` for dims of size 1, which serve every part."""
    own = names[len(names) - len(spec.shape) :]
    return " ".join("_" if size == 1 else name for name, size in zip(own, spec.shape, strict=True)) or "."
