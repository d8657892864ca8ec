"""Attention as one op of ours, so that a captured graph does not depend on the machine that traced it.

    autoparallel_fp8::attention(q, k, v, mask, is_causal, scale) -> (out, logsumexp)
    autoparallel_fp8::attention_backward(grad_out, q, k, v, out, logsumexp, mask, is_causal, scale) -> (dq, dk, dv)

q [b, hq, s, d], k [b, hkv, t, d], v [b, hkv, t, dv] with hq a multiple of hkv (head i of q reads head i // (hq / hkv)
of k and v), mask broadcastable to [b, hq, s, t] (bool: True attends; else added). out [b, hq, s, dv] lies in memory as
a transposed [b, s, hq, dv], as flash attention leaves it; so do the gradients. logsumexp [b, hq, s] is float32, or
float64 where q is.
A causal op masks key j from query i where j > i, whatever s and t, as `scaled_dot_product_attention` does.

CUDA runs flash attention where it can; everything else runs the formulas in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_MAX_HEAD_DIM = 256  # flash attention 2, aten/src/ATen/native/transformers/cuda/flash_attn


def attention_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention; returns out and the logarithm of each row's sum of exponentials."""
    return attend(masked(raw_scores(q, k, scale), mask, is_causal), q, v)


def attention_backward_formula(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention_formula` for q, k and v, from what its forward returned."""
    grad_scores, dv = grad_scores_of(masked(raw_scores(q, k, scale), mask, is_causal), grad_out, v, out, logsumexp)
    return (*grad_qk(grad_scores, q, k, scale), dv)


attention = torch.library.custom_op("autoparallel_fp8::attention", attention_formula, mutates_args=())
attention_backward = torch.library.custom_op(
    "autoparallel_fp8::attention_backward", attention_backward_formula, mutates_args=()
)


@attention.register_kernel("cuda")
def _attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    if not _takes_flash(q, k, v, mask, is_causal):
        return attention_formula(q, k, v, mask, is_causal, scale)
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return _heads_inside(out), logsumexp


@attention_backward.register_kernel("cuda")
def _attention_backward_cuda(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _takes_flash(q, k, v, mask, is_causal):
        return attention_backward_formula(grad_out, q, k, v, out, logsumexp, mask, is_causal, scale)
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # generator state: read with dropout only
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        q,
        _repeat_heads(k, num_heads),
        _repeat_heads(v, num_heads),
        out,
        logsumexp,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        is_causal,
        unused,
        unused,
        scale=scale,
    )
    dk, dv = (_heads_inside(_sum_heads(grad, num_kv_heads)) for grad in (dk, dv))
    return _heads_inside(dq), dk, dv


@attention.register_fake
def attention_fake(q: Tensor, k: Tensor, v: Tensor, *unused: Any) -> tuple[Tensor, Tensor]:
    """Empty results of any attention op."""
    batch, heads, length, _ = q.shape
    out = q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((batch, heads, length), dtype=_computed_in(q))


@attention_backward.register_fake
def attention_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *unused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients of q, k and v of any attention op."""

    def empty(x: Tensor) -> Tensor:
        return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)

    return empty(q), empty(k), empty(v)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What backward of any attention op reads: its tensors, and the other arguments as `ctx.options`."""
    q, k, v, mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def differentiate_with(backward: Any, num_inputs: int) -> Callable[..., tuple[Any, ...]]:
    """What autograd calls for an attention op of so many inputs, the gradients being those of the first few."""

    def differentiate(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        grads = () if grad_out is None else backward(grad_out, *ctx.saved_tensors, *ctx.options)
        return (*grads, *[None] * (num_inputs - len(grads)))

    return differentiate


attention.register_autograd(
    differentiate_with(torch.ops.autoparallel_fp8.attention_backward, 6), setup_context=save_for_backward
)


# ---- the formulas' parts; scores are [b, hkv, hq / hkv, s, t] -----------------------------------------------------


def _computed_in(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def raw_scores(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """Scaled scores in float32 (float64 for float64)."""
    compute = _computed_in(q)
    grouped = q.to(compute).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    return torch.einsum("bhgsd,bhtd->bhgst", grouped, k.to(compute)) * _scale_of(q, scale)


def masked(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Scores as softmax gets them."""
    batch, kv_heads, group, length, keys = scores.shape
    if is_causal:
        future = torch.ones(length, keys, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if mask is not None:
        mask = mask.expand(batch, kv_heads * group, length, keys).unflatten(1, (kv_heads, group))
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def attend(scores: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and logsumexp of masked scores."""
    logsumexp = torch.logsumexp(scores, -1)
    out = torch.einsum("bhgst,bhtd->bhgsd", _weights(scores, logsumexp), v.to(scores.dtype))
    return _heads_inside(out.flatten(1, 2).to(q.dtype)), logsumexp.flatten(1, 2)


def grad_scores_of(
    scores: Tensor, grad_out: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of masked scores, and of v.

    Source: with P the weights and D = rowsum(grad_out * out): dv = P^T grad_out, dS = P * (grad_out v^T - D), and
    then dq = scale * dS k, dk = scale * dS^T q (FlashAttention, Dao et al. 2022, algorithm 4).
    """
    compute, groups = scores.dtype, scores.shape[1:3]
    weights = _weights(scores, logsumexp.to(compute).unflatten(1, groups))
    grad = grad_out.to(compute).unflatten(1, groups)
    delta = (grad * out.to(compute).unflatten(1, groups)).sum(-1, keepdim=True)
    dv = torch.einsum("bhgst,bhgsd->bhtd", weights, grad)
    return weights * (torch.einsum("bhgsd,bhtd->bhgst", grad, v.to(compute)) - delta), _heads_inside(dv.to(v.dtype))


def grad_qk(grad_scores: Tensor, q: Tensor, k: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Gradients of q and k from those of the raw scores."""
    compute, groups = grad_scores.dtype, grad_scores.shape[1:3]
    grad_scores = grad_scores * _scale_of(q, scale)
    dq = torch.einsum("bhgst,bhtd->bhgsd", grad_scores, k.to(compute)).flatten(1, 2)
    dk = torch.einsum("bhgst,bhgsd->bhtd", grad_scores, q.to(compute).unflatten(1, groups))
    return _heads_inside(dq.to(q.dtype)), _heads_inside(dk.to(k.dtype))


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Softmax from its logsumexp; rows in which everything is masked give 0."""
    return torch.where(logsumexp.isneginf()[..., None], 0.0, torch.exp(scores - logsumexp[..., None]))


def _scale_of(q: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def _heads_inside(x: Tensor) -> Tensor:
    """The same [b, h, s, d] laid out as a transposed [b, s, h, d]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _takes_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    head_dim = q.shape[-1]
    return (
        mask is None
        and q.dtype in _FLASH_DTYPES
        and head_dim == v.shape[-1]
        and head_dim % 8 == 0
        and head_dim <= _FLASH_MAX_HEAD_DIM
        and (not is_causal or q.shape[2] == k.shape[2])
    )


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def _sum_heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[1] == num_heads else x.unflatten(1, (num_heads, -1)).sum(2)
