"""Attention whose scores are changed before the softmax: by a bias that is trained, or by a soft cap.

    autoparallel_fp8::biased_attention(q, k, v, mask, is_causal, scale) -> (out, logsumexp)
    autoparallel_fp8::biased_attention_backward(grad_out, q, k, v, out, logsumexp, mask, is_causal, scale)
        -> (dq, dk, dv, dmask)
    autoparallel_fp8::capped_attention(q, k, v, mask, is_causal, scale, cap) -> (out, logsumexp)
    autoparallel_fp8::capped_attention_backward(grad_out, q, k, v, out, logsumexp, mask, is_causal, scale, cap)
        -> (dq, dk, dv)

Shapes and memory order as in `attention`. The biased op adds a float mask and returns its gradient too, summed to the
mask's own shape (T5's relative positions). The capped op makes cap * tanh(score / cap) of each scaled score before the
mask (Gemma 2). Both run the formulas in float32 on every device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .attention import _heads_inside, _scale_of, _scores, _weights, attention_formula


def biased_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, is_causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`attention_formula` with a float mask."""
    return attention_formula(q, k, v, mask, is_causal, scale)


def biased_backward_formula(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `biased_formula` for q, k, v and the mask, which is added to the scores: its gradient is theirs."""
    grad_scores, dv = _grad_scores(_scores(q, k, mask, is_causal, scale), grad_out, v, out, logsumexp)
    dmask = grad_scores.flatten(1, 2).sum_to_size(mask.shape).to(mask.dtype)
    return (*_grad_qk(grad_scores, q, k, scale), dv, dmask.contiguous())


def capped_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    cap: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Attention on capped scores; returns out and the logarithm of each row's sum of exponentials."""
    scores, _ = _capped_scores(q, k, mask, is_causal, scale, cap)
    logsumexp = torch.logsumexp(scores, -1)
    out = torch.einsum("bhgst,bhtd->bhgsd", _weights(scores, logsumexp), v.to(scores.dtype))
    return _heads_inside(out.flatten(1, 2).to(q.dtype)), logsumexp.flatten(1, 2).to(torch.float32)


def capped_backward_formula(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    cap: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `capped_formula` for q, k and v; the cap's derivative is 1 - tanh(score / cap)^2."""
    scores, slope = _capped_scores(q, k, mask, is_causal, scale, cap)
    grad_scores, dv = _grad_scores(scores, grad_out, v, out, logsumexp)
    return (*_grad_qk(grad_scores * slope, q, k, scale), dv)


biased_attention = torch.library.custom_op("autoparallel_fp8::biased_attention", biased_formula, mutates_args=())
biased_attention_backward = torch.library.custom_op(
    "autoparallel_fp8::biased_attention_backward", biased_backward_formula, mutates_args=()
)
capped_attention = torch.library.custom_op("autoparallel_fp8::capped_attention", capped_formula, mutates_args=())
capped_attention_backward = torch.library.custom_op(
    "autoparallel_fp8::capped_attention_backward", capped_backward_formula, mutates_args=()
)


@biased_attention.register_fake
@capped_attention.register_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *unused: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    out = q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((batch, heads, length), dtype=torch.float32)


@biased_attention_backward.register_fake
def _biased_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor, *unused: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_grads_fake(q, k, v), mask.new_empty(mask.shape)


@capped_attention_backward.register_fake
def _capped_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *unused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _grads_fake(q, k, v)


def _grads_fake(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def empty(x: Tensor) -> Tensor:
        return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)

    return empty(q), empty(k), empty(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate_biased(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 6
    backward = torch.ops.autoparallel_fp8.biased_attention_backward
    return (*backward(grad_out, *ctx.saved_tensors, *ctx.options), None, None)


def _differentiate_capped(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 7
    backward = torch.ops.autoparallel_fp8.capped_attention_backward
    return (*backward(grad_out, *ctx.saved_tensors, *ctx.options), None, None, None, None)


biased_attention.register_autograd(_differentiate_biased, setup_context=_save)
capped_attention.register_autograd(_differentiate_capped, setup_context=_save)


def _capped_scores(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, cap: float
) -> tuple[Tensor, Tensor]:
    """Scores [b, hkv, hq / hkv, s, t] as softmax gets them, and the slope of the cap at each."""
    squashed = torch.tanh(_scores(q, k, None, False, scale) / cap)
    scores = squashed * cap
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).unflatten(1, scores.shape[1:3])
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores, 1 - squashed.square()


def _grad_scores(scores: Tensor, grad_out: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of what softmax got, and of v; source as in `attention_backward_formula`."""
    compute, groups = scores.dtype, scores.shape[1:3]
    weights = _weights(scores, logsumexp.to(compute).unflatten(1, groups))
    grad = grad_out.to(compute).unflatten(1, groups)
    delta = (grad * out.to(compute).unflatten(1, groups)).sum(-1, keepdim=True)
    dv = torch.einsum("bhgst,bhgsd->bhtd", weights, grad)
    return weights * (torch.einsum("bhgsd,bhtd->bhgst", grad, v.to(compute)) - delta), _heads_inside(dv.to(v.dtype))


def _grad_qk(grad_scores: Tensor, q: Tensor, k: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    compute, groups = grad_scores.dtype, grad_scores.shape[1:3]
    grad_scores = grad_scores * _scale_of(q, scale)
    dq = torch.einsum("bhgst,bhtd->bhgsd", grad_scores, k.to(compute)).flatten(1, 2)
    dk = torch.einsum("bhgst,bhgsd->bhtd", grad_scores, q.to(compute).unflatten(1, groups))
    return _heads_inside(dq.to(q.dtype)), _heads_inside(dk.to(k.dtype))
