"""Ops that capture writes in terms of simpler ones, so that few ops need rules.

`cross_entropy` stands in for `F.cross_entropy` before autograd sees it; the others decompose single aten ops while the
joint graph is traced. What is chosen, and why:

- the mean over tokens is a sum over a count, both explicit, so tokens may be split;
- the label's logit is picked by comparing labels with an arange and summing, not by gather and scatter: then splitting
  the vocabulary needs nothing but pointwise ops and sums, and backward creates no zeros of the logits' size;
- backward of a slice or a select is a pad, which a planner may split along every dim that is not padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """`F.cross_entropy` of logits [tokens, classes] and class numbers target [tokens], in splittable ops."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    shifted = logits - logits.detach().amax(1, keepdim=True)
    picked = torch.where(classes == target[:, None], shifted, 0.0).sum(1)
    per_token = shifted.exp().sum(1).log() - picked
    is_counted = target != ignore_index
    per_token = torch.where(is_counted, per_token, 0.0)
    if reduction == "none":
        return per_token
    total = per_token.sum()
    return total if reduction == "sum" else total / is_counted.sum().to(total.dtype)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """a @ b with the bias added after."""
    product = torch.mm(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    """The gradient padded with zeros to the size before the slice; a step above 1 is left to the op itself."""
    if step != 1:
        return NotImplemented
    size, dim = sizes[dim], dim % len(sizes)
    start = min(start + size if start < 0 else start, size)
    end = start + grad.shape[dim]
    return _pad_dim(grad, dim, start, size - end)


def select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """The gradient as one row of a dim, padded with zeros to the size before the select."""
    size, dim = sizes[dim], dim % len(sizes)
    index = index + size if index < 0 else index
    return _pad_dim(grad.unsqueeze(dim), dim, index, size - index - 1)


def split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    """The pieces as slices."""
    return [x.narrow(dim, at, min(size, x.shape[dim] - at)) for at in range(0, x.shape[dim], size)]


def split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """The pieces as slices."""
    return [x.narrow(dim, sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    """The pieces as selects."""
    return [x.select(dim, at) for at in range(x.shape[dim])]


def _pad_dim(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    pads = [0, 0] * (x.ndim - 1 - dim) + [before, after]
    return torch.constant_pad_nd(x, pads, 0.0)


OWN: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: addmm,
    aten.slice_backward.default: slice_backward,
    aten.select_backward.default: select_backward,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split_with_sizes,
    aten.unbind.int: unbind,
}

FROM_TORCH: tuple[Any, ...] = (
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten.baddbmm,
    aten.addcmul,
    aten.addcdiv,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.stack,
    aten.squeeze.default,
    aten.rsub,
    aten.masked_fill,
    aten.std,
    aten.var,
)
