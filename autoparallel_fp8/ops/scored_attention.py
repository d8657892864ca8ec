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

from typing import Any

import torch
from torch import Tensor

from .attention import (
    attend,
    attention_backward_fake,
    attention_fake,
    attention_formula,
    differentiate_with,
    grad_qk,
    grad_scores_of,
    masked,
    raw_scores,
    save_for_backward,
)

ops = torch.ops.autoparallel_fp8


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
    grad_scores, dv = grad_scores_of(masked(raw_scores(q, k, scale), mask, is_causal), grad_out, v, out, logsumexp)
    dmask = grad_scores.flatten(1, 2).sum_to_size(mask.shape).to(mask.dtype)
    return (*grad_qk(grad_scores, q, k, scale), dv, dmask.contiguous())


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
    squashed = torch.tanh(raw_scores(q, k, scale) / cap)
    return attend(masked(squashed * cap, mask, is_causal), q, v)


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
    squashed = torch.tanh(raw_scores(q, k, scale) / cap)
    grad_scores, dv = grad_scores_of(masked(squashed * cap, mask, is_causal), grad_out, v, out, logsumexp)
    return (*grad_qk(grad_scores * (1 - squashed.square()), q, k, scale), dv)


biased_attention = torch.library.custom_op("autoparallel_fp8::biased_attention", biased_formula, mutates_args=())
biased_attention_backward = torch.library.custom_op(
    "autoparallel_fp8::biased_attention_backward", biased_backward_formula, mutates_args=()
)
capped_attention = torch.library.custom_op("autoparallel_fp8::capped_attention", capped_formula, mutates_args=())
capped_attention_backward = torch.library.custom_op(
    "autoparallel_fp8::capped_attention_backward", capped_backward_formula, mutates_args=()
)


for _op in (biased_attention, capped_attention):
    _op.register_fake(attention_fake)
capped_attention_backward.register_fake(attention_backward_fake)


@biased_attention_backward.register_fake
def _biased_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor, *unused: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *attention_backward_fake(grad_out, q, k, v), mask.new_empty(mask.shape)


biased_attention.register_autograd(
    differentiate_with(ops.biased_attention_backward, 6), setup_context=save_for_backward
)
capped_attention.register_autograd(
    differentiate_with(ops.capped_attention_backward, 7), setup_context=save_for_backward
)
