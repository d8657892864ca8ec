"""Table look-ups: embedding, gather, scatter and their gradients.

A split table is looked up by every rank in its own rows, with zero where the index is another rank's (`masked_lookup`,
a program that needs the offset of the rank's part): the parts add up.
"""

from __future__ import annotations

import torch

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
    """grad[..., d], indices[...] -> weight's gradient [v, d]: tokens add up; a split table keeps its own rows."""
    i = " ".join(f"i{k}" for k in range(len(op.tensors[1].shape)))
    return einsum(op, f"{i} d, {i} -> v d", linear=((0,),), local={"v": "masked_lookup"})


@rule(aten.gather.default)
def gather(op: OpCall) -> Signature:
    """x[..., v, ...] at index[..., j, ...] along one dim: the other dims split together; a split v adds up.

    Dims where x is longer than the index (only its first part is read) stay whole.
    """
    x, index = op.tensors
    ndim = len(x.shape)
    dim = op.arg("dim") % ndim
    same = [f"d{i}" if x.shape[i] == index.shape[i] else "_" for i in range(ndim)]
    left, right = list(same), list(same)
    left[dim], right[dim] = "v", "j"
    texts = " ".join(left), " ".join(right)
    return einsum(op, f"{texts[0]}, {texts[1]} -> {texts[1]}", linear=((0,),), local={"v": "masked_lookup"})


@rule(aten.scatter.value)
def scatter_value(op: OpCall) -> Signature:
    """One value written at index[..., j, ...] of x[..., v, ...]: other dims split; each rank writes into its part of v."""
    x, index = op.tensors
    ndim = len(x.shape)
    dim = op.arg("dim") % ndim
    same = [f"d{i}" if x.shape[i] == index.shape[i] else "_" for i in range(ndim)]
    left, right = list(same), list(same)
    left[dim], right[dim] = "v", "_"
    texts = " ".join(left), " ".join(right)
    return einsum(op, f"{texts[0]}, {texts[1]} -> {texts[0]}", local={"v": "masked_write"})


@rule(aten.index.Tensor)
def index(op: OpCall) -> Signature:
    """x[i, j, ...] with index tensors: dims of x that no index reads split; the index's own dims stay whole."""
    x = op.tensors[0]
    indices = op.arg("indices")
    used = [k for k, item in enumerate(indices) if item is not None]
    rest = [k for k in range(len(x.shape)) if k not in used]
    index_ndim = len(op.out[0].shape) - len(rest)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    left = " ".join("_" if k in used else f"d{k}" for k in range(len(x.shape)))
    kept = [f"d{k}" for k in rest]
    out = " ".join([*kept[:first], *(["_"] * index_ndim), *kept[first:]]) or "."
    others = "".join(", " + ("_ " * len(spec.shape) or ".") for spec in op.tensors[1:])
    return einsum(op, f"{left}{others} -> {out}", linear=((0,),))
