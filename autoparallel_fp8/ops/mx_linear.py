"""A linear layer whose three GEMMs multiply MX operands, each cast along the dim that its GEMM contracts.

    y  [m, n] = x  [m, k] @ W^T [k, n]    x and W cast along k
    dX [m, k] = dY [m, n] @ W   [n, k]    dY and W cast along n
    dW [n, k] = dY^T [n, m] @ x [m, k]    dY and x cast along m, the tokens

So x, W and dY are cast twice each, from the full-precision tensor: what was cast along one dim cannot be read along
another. All three sizes are multiples of 32. The bias is added after, in full precision. `wgrad_with_hp` leaves dW in
full precision, as torchao's setting of that name does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.modules import with_state_of
from autoparallel_fp8.ops.mx_mm import mx_mm
from autoparallel_fp8.ops.to_mx import BLOCK_SIZE, to_mx


def mx_product(a: Tensor, b: Tensor, scaling_mode: str = "rceil") -> Tensor:
    """a [m, k] @ b [k, n] in the dtype of a, both cast to MX along k first."""
    data_a, scale_a = to_mx(a, torch.float8_e4m3fn, BLOCK_SIZE, 1, scaling_mode)
    data_b, scale_b = to_mx(b, torch.float8_e4m3fn, BLOCK_SIZE, 0, scaling_mode)
    product: Tensor = mx_mm(data_a, data_b, scale_a, scale_b, a.dtype)
    return product


@torch.compiler.allow_in_graph
class _MXLinearFunction(torch.autograd.Function):
    """x [..., k], weight [n, k] -> [..., n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling_mode: str, wgrad_with_hp: bool) -> Tensor:
        if not wgrad_with_hp:
            _check_tokens(x)
        ctx.save_for_backward(x, weight)
        ctx.scaling_mode, ctx.wgrad_with_hp = scaling_mode, wgrad_with_hp
        return mx_product(_rows(x), weight.t(), scaling_mode).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, mode = _rows(grads[0]), ctx.scaling_mode
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = mx_product(grad, weight, mode).unflatten(0, x.shape[:-1])
        if ctx.needs_input_grad[1]:
            is_plain = ctx.wgrad_with_hp
            dweight = grad.t() @ _rows(x) if is_plain else mx_product(grad.t(), _rows(x), mode).to(weight.dtype)
        return dx, dweight, None, None


class MXLinear(nn.Linear):
    """`nn.Linear` in MXFP8, forward and backward; parameters have the same names and dtypes.

    >>> MXLinear(64, 96, bias=False)(torch.ones(32, 64)).shape
    torch.Size([32, 96])

    Args:
        in_features, out_features: multiples of 32.
        scaling_mode: how a block's scale is found: "rceil", or "floor" as the OCP specification has it.
        wgrad_with_hp: the gradient of the weight is computed in full precision, for any number of tokens.
        more: of `nn.Linear`.

    Raises:
        UsageError: a size is no multiple of 32; in forward, the number of tokens is none.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        scaling_mode: str = "rceil",
        wgrad_with_hp: bool = False,
        **more: Any,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size % BLOCK_SIZE:
                raise UsageError(f"{name} {size} is not a multiple of {BLOCK_SIZE}", at="MXLinear")
        super().__init__(in_features, out_features, **more)
        self.scaling_mode, self.wgrad_with_hp = scaling_mode, wgrad_with_hp

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, scaling_mode: str = "rceil", wgrad_with_hp: bool = False) -> MXLinear:
        """The same layer in MXFP8: the very parameters, buffers and hooks of the one given."""
        settings: dict[str, Any] = {"scaling_mode": scaling_mode, "wgrad_with_hp": wgrad_with_hp}
        made = cls(linear.in_features, linear.out_features, bias=False, device="meta", **settings)
        return with_state_of(linear, made, **settings)

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _MXLinearFunction.apply(input, self.weight, self.scaling_mode, self.wgrad_with_hp)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scaling_mode={self.scaling_mode!r}"


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _check_tokens(x: Tensor) -> None:
    """The gradient of the weight contracts over tokens, in blocks of 32."""
    tokens = x.numel() // x.shape[-1]
    if tokens % BLOCK_SIZE == 0:
        return
    outer, seq = tokens // max(1, x.shape[-2]) if x.ndim > 1 else 1, x.shape[-2] if x.ndim > 1 else 1
    legal = next(n for n in range(seq, seq + BLOCK_SIZE + 1) if outer * n % BLOCK_SIZE == 0)
    raise UsageError(
        f"{tokens} tokens are not a multiple of {BLOCK_SIZE}: MXFP8 casts the gradient of a weight along tokens",
        do=f"give a batch x sequence of a multiple of {BLOCK_SIZE} tokens: the smallest from here is "
        f"{outer} x {legal} ({outer * legal} tokens)"
        if x.ndim > 2
        else f"give a multiple of {BLOCK_SIZE} rows: the smallest from here is {legal}",
    )
