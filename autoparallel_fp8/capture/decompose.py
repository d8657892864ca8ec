"""Ops that capture writes in terms of simpler ones, so that few ops need rules.

`cross_entropy` stands in for `F.cross_entropy` before autograd sees it; the others decompose single aten ops while the
joint graph is traced. What is chosen, and why:

- the mean over tokens is a sum over a count, both explicit, so tokens may be split;
- the label's logit is picked by comparing labels with an arange and summing, not by gather and scatter: then splitting
  the vocabulary needs nothing but pointwise ops and sums, and backward creates no zeros of the logits' size;
- backward of a slice or a select is a pad, which a planner may split along every dim that is not padded;
- writing into a part of a tensor joins what stays with what is new.
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


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Any:
    """The convolution with its bias added after, as `addmm`, so that input channels may be split."""
    if bias is None:
        return NotImplemented
    product = aten.convolution.default(x, weight, None, *options)
    return product + bias.view(-1, *[1] * (x.ndim - 2))


def convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *options: Any) -> Any:
    """The bias's gradient as a sum of its own."""
    *settings, (wants_x, wants_weight, wants_bias) = options
    if not wants_bias:
        return NotImplemented
    found: tuple[Any, ...] = (None, None, None)
    if wants_x or wants_weight:
        mask = [wants_x, wants_weight, False]
        found = aten.convolution_backward.default(grad, x, weight, None, *settings, mask)
    return found[0], found[1], grad.sum([0, *range(2, grad.ndim)])


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


def slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """What stays before, the new part and what stays behind, joined; a step above 1 is left to the op itself."""
    if step != 1:
        return NotImplemented
    dim = dim % x.ndim
    size = x.shape[dim]
    first = 0 if start is None else min(start + size if start < 0 else start, size)
    behind = first + source.shape[dim]
    parts = [x.narrow(dim, 0, first), source.to(x.dtype), x.narrow(dim, behind, size - behind)]
    return torch.cat([part for part in parts if part.shape[dim]], dim)


def select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Any:
    """The same for one row of a dim."""
    start = index + x.shape[dim] if index < 0 else index
    return slice_scatter(x, source.unsqueeze(dim), dim, start)


def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The source in the shape and dtype of what it is written over."""
    return source.to(x.dtype).expand(x.shape).clone(memory_format=torch.contiguous_format)


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
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.slice_backward.default: slice_backward,
    aten.select_backward.default: select_backward,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.copy.default: copy,
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
    aten.fill,
    aten.std,
    aten.var,
)
