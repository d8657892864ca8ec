"""Attention: batch and heads split; a rank with some of the query heads needs just the key and value heads they use.

Query heads are `(h g)`: h key-value heads with g queries each. Over more ranks than there are key-value heads, each
rank has some of a head's queries, and picks that head out of the keys and values (`own_heads`). Under a causal
mask the sequence stays whole: a part of it would need its offset. Otherwise the query sequence splits, and a mask that
was passed splits with it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops import attention as _ops  # noqa: F401  (defines torch.ops.autoparallel_fp8.attention)
from ..ops import scored_attention as _more_ops  # noqa: F401  (attention with a trained bias, with capped scores)
from .language import OpCall, Signature, einsum, heavy, rule

ops = torch.ops.autoparallel_fp8

heavy(ops.attention.default, ops.attention_backward.default)
heavy(ops.biased_attention.default, ops.biased_attention_backward.default)
heavy(ops.capped_attention.default, ops.capped_attention_backward.default)


_VALUES = {
    r"R x R x P\(sum\)( x R)? -> P\(sum\),R": "values are not worth reducing after attention",
    r"R x R x S\(3\)( x R)? -> S\(3\),R": "the values' columns: every rank would work out all scores again",
}


def _mask(op: OpCall) -> str:
    """The mask broadcasts to [b, heads, s, t]: a dim of size 1 serves every part."""
    mask = op.arg("mask")
    if mask is None:
        return ""
    names = ["b", "(h g)", "s", "t"][4 - len(mask.shape) :]
    return ", " + " ".join("_" if size == 1 else name for name, size in zip(names, mask.shape, strict=True))


def _whole(op: OpCall) -> tuple[str, ...]:
    return ("t", "d", "e", "s") if op.arg("is_causal") else ("t", "d", "e")


def _sizes(op: OpCall) -> dict[str, int]:
    q, k = op.arg("q").shape, op.arg("k").shape
    return {"h": k[1], "g": q[1] // k[1]}


@rule(
    ops.attention.default,
    ops.capped_attention.default,
    left_out=_VALUES,
)
def attention(op: OpCall) -> Signature:
    """q[b,(h g),s,d], k[b,h,t,d], v[b,h,t,e] -> out[b,(h g),s,e], logsumexp[b,(h g),s]."""
    q, logsumexp = "b (h g) s", "b (h g) s"

    def way(heads: str, **more: Any) -> Signature:
        text = f"{q} d, b {heads} t d, b {heads} t e{_mask(op)} -> {q} e, {logsumexp}"
        return einsum(op, text, sizes=_sizes(op), **more)

    finer = way("_", whole=(*_whole(op), "b", "g"), local={"h": "own_heads"})
    return way("h", whole=_whole(op), finer=finer)


@rule(
    ops.attention_backward.default,
    ops.capped_attention_backward.default,
    left_out={r"R x R x S\(2\) x S\(2\) x .* -> P\(sum\),S\(2\),S\(2\)": "forward splits no keys"},
)
def attention_backward(op: OpCall) -> Signature:
    """Gradients of k and v add up over split query heads of one key-value head."""
    q, out = "b (h g) s d", "b (h g) s e"

    def way(heads: str, **more: Any) -> Signature:
        k, v = f"b {heads} t d", f"b {heads} t e"
        text = f"{out}, {q}, {k}, {v}, {out}, b (h g) s{_mask(op)} -> {q}, {k}, {v}"
        return einsum(op, text, sizes=_sizes(op), **more)

    finer = way("_", whole=(*_whole(op), "b", "g"), local={"h": "own_heads"})
    return way("h", whole=_whole(op), finer=finer)


@rule(
    ops.biased_attention.default,
    left_out=_VALUES,
)
def biased_attention(op: OpCall) -> Signature:
    """As `attention`; the mask is always there."""
    text = f"b (h g) s d, b h t d, b h t e{_mask(op)} -> b (h g) s e, b (h g) s"
    return einsum(op, text, sizes=_sizes(op), whole=_whole(op))


@rule(
    ops.biased_attention_backward.default,
    left_out={r"R x R x S\(2\) x S\(2\) x .* -> P\(sum\),S\(2\),S\(2\).*": "forward splits no keys"},
)
def biased_attention_backward(op: OpCall) -> Signature:
    """The mask's gradient adds up over split dims that the mask does not have."""
    q, k, v, out, mask = "b (h g) s d", "b h t d", "b h t e", "b (h g) s e", _mask(op)
    text = f"{out}, {q}, {k}, {v}, {out}, b (h g) s{mask} -> {q}, {k}, {v}{mask}"
    return einsum(op, text, sizes=_sizes(op), whole=_whole(op))
