"""Attention with a trained bias or a soft cap: values, gradients, memory order, and the capture that picks the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel_fp8.capture import capture
from autoparallel_fp8.ops.scored_attention import biased_attention, capped_attention

CASES = {
    "plain": {},
    "grouped queries": {"kv_heads": 2, "causal": True},
    "longer keys": {"keys": 7, "scale": 0.5},
    "one bias for all": {"bias": (5,)},
    "bias of a head": {"bias": (1, 4, 5, 5), "causal": True},
}


def tensors(kv_heads: int = 4, keys: int = 5, bias: Any = None, **_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 4, 5, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 6), bias or (2, 4, 5, keys))
    q, k, v, mask = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, k, v, mask


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, case: dict[str, Any], cap: float | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (case.get("scale") or q.shape[-1] ** -0.5)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & case.get("causal", False)
    return torch.softmax((scores + mask).masked_fill(future, -torch.inf), -1) @ v


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("cap", [None, 1.5])
def test_values_and_gradients_are_those_of_the_plain_formula(case: dict[str, Any], cap: float | None) -> None:
    """The bias's too, summed to the bias's own shape; a capped op takes its mask as it is."""
    q, k, v, mask = tensors(**case)
    options = (case.get("causal", False), case.get("scale"))
    wanted = (q, k, v, mask) if cap is None else (q, k, v)
    if cap is None:
        out, _ = biased_attention(q, k, v, mask, *options)
    else:
        out, _ = capped_attention(q, k, v, mask.detach(), *options, cap)
    plain = expected(q, k, v, mask, case, cap)
    torch.testing.assert_close(out, plain, rtol=1e-7, atol=1e-7)
    grad = torch.randn_like(out)
    found, right = (torch.autograd.grad(x, wanted, grad) for x in (out, plain))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_shapes_and_memory_order_are_known_without_data() -> None:
    """The fake results of forward and backward are the real ones, strides and all."""
    q, k, v, mask = tensors(kv_heads=2)
    for op, args in ((biased_attention, (q, k, v, mask)), (capped_attention, (q, k, v, None, True, None, 2.0))):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


class Biased(nn.Module):
    """Attention that adds a parameter to its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias)


def test_a_bias_that_is_trained_gets_its_gradient() -> None:
    """And one that is frozen is a mask like any other."""
    model, x = Biased(), torch.randn(2, 4, 8, 16)
    graph = capture(model, (x,))
    assert [o.target for o in graph.outputs if o.kind == "gradient"] == ["bias"]
    assert any(node.op_name == "autoparallel_fp8.biased_attention_backward.default" for node in graph.nodes)
    frozen = Biased().requires_grad_(False)
    assert [n.op_name for n in capture(frozen, (x,)).nodes if n.kind == "op"] == ["autoparallel_fp8.attention.default"]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_mask_that_masks_nothing_is_dropped(value: float) -> None:
    """Zeros added to the scores; another constant is kept."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.full((8, 8), value))

    (node,) = (n for n in capture(Masked(), (torch.randn(2, 4, 8, 16),)).nodes if "attention" in n.op_name)
    assert (node.args[3] is None) == (value == 0.0)
