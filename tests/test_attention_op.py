"""The attention op is `scaled_dot_product_attention`, in values, gradients and memory order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel_fp8.capture import capture
from autoparallel_fp8.errors import CaptureError
from autoparallel_fp8.ops.attention import attention
from autoparallel_fp8.simulate import run_graph

CASES = {
    "causal": {"causal": True},
    "grouped queries": {"kv_heads": 2, "causal": True},
    "longer keys": {"kv_heads": 1, "keys": 7, "causal": True},
    "not causal": {"keys": 3},
    "bool mask": {"keys": 7, "mask": "bool"},
    "added mask": {"kv_heads": 2, "mask": "added"},
    "scale": {"causal": True, "scale": 0.5},
    "wider values": {"value_dim": 16, "causal": True},
}


def tensors(kv_heads: int = 4, keys: int = 5, value_dim: int = 8, mask: str = "", **_: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    shapes = ((2, 4, 5, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, value_dim))
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    masks = {"bool": torch.rand(2, 1, 5, keys) > 0.3, "added": torch.randn(5, keys)}
    return q, k, v, masks.get(mask)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_values_and_gradients_are_those_of_sdpa(case: dict[str, Any]) -> None:
    """Forward and all three gradients agree to float32 rounding."""
    q, k, v, mask = tensors(**case)
    causal, scale = case.get("causal", False), case.get("scale")
    out, _ = attention(q, k, v, mask, causal, scale)
    expected = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), grad))


def test_logsumexp_is_that_of_the_scaled_scores() -> None:
    """The second result is float32 [b, hq, s]."""
    q, k, v, _ = tensors()
    _, logsumexp = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, False, None)
    scores = q.bfloat16().float() @ k.bfloat16().float().transpose(-1, -2) / 8**0.5
    assert logsumexp.dtype == torch.float32
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))


def test_results_lie_with_heads_inside() -> None:
    """out and the gradients are transposes of contiguous [b, s, h, d], so flattening them copies nothing."""
    q, k, v, _ = tensors(kv_heads=2)
    out, _ = attention(q, k, v, None, True, None)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *gradients))


def test_a_row_with_everything_masked_is_zero() -> None:
    """As in sdpa; not NaN, in forward or backward."""
    q, k, v, _ = tensors()
    mask = torch.zeros(5, 5, dtype=torch.bool)
    out, _ = attention(q, k, v, mask, False, None)
    assert torch.equal(out, torch.zeros_like(out))
    assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [{"causal": True}, {"kv_heads": 2, "causal": True}, {"keys": 7, "mask": "bool"}])
def test_cuda_agrees_with_the_formulas(case: dict[str, Any]) -> None:
    """Flash attention in bfloat16, or the formulas where it does not apply, to bfloat16 rounding; same memory order."""
    q, k, v, mask = tensors(**case)
    low = [x.detach().cuda().bfloat16().requires_grad_() for x in (q, k, v)]
    out, logsumexp = attention(*low, None if mask is None else mask.cuda(), case.get("causal", False), None)
    expected, expected_logsumexp = attention(q, k, v, mask, case.get("causal", False), None)
    torch.testing.assert_close(out.cpu().float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(logsumexp.cpu(), expected_logsumexp, rtol=2e-2, atol=2e-2)
    found = torch.autograd.grad(out.sum(), low)
    wanted = torch.autograd.grad(expected.sum(), (q, k, v))
    torch.testing.assert_close([x.cpu().float() for x in found], list(wanted), rtol=5e-2, atol=5e-2)
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *found))


def test_fake_results_are_laid_out_like_real_ones() -> None:
    """torch's own check of schema, fake kernel and autograd registration."""
    q, k, v, _ = tensors(kv_heads=2)
    torch.library.opcheck(attention, (q, k, v, None, True, None))


class Attention(nn.Module):
    """Projections around one attention call, with keys and values repeated in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.q, self.kv = how, nn.Linear(16, 32, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 8).transpose(1, 2)
        kv = self.kv(x).view(b, s, 2, 8)
        if self.how == "expand before transpose":
            kv = kv[:, :, :, None, :].expand(b, s, 2, 2, 8).reshape(b, s, 4, 8).transpose(1, 2)
        elif self.how == "unsqueeze":
            kv = torch.unsqueeze(kv, 3).expand(b, s, 2, 2, 8).reshape(b, s, 4, 8).transpose(1, 2)
        elif self.how == "expand after transpose":
            kv = kv.transpose(1, 2)[:, :, None].expand(b, 2, 2, s, 8).reshape(b, 4, s, 8)
        elif self.how == "repeat_interleave":
            kv = kv.transpose(1, 2).repeat_interleave(2, dim=1)
        else:
            kv = kv.transpose(1, 2)
        dropout = 0.1 if self.how == "dropout" else 0.0
        out = F.scaled_dot_product_attention(
            q, kv, kv, dropout_p=dropout, is_causal=True, enable_gqa=self.how in ("gqa", "dropout")
        )
        return out.transpose(1, 2).reshape(b, s, 32)


@pytest.mark.parametrize(
    "how", ["gqa", "expand before transpose", "unsqueeze", "expand after transpose", "repeat_interleave"]
)
def test_capture_makes_one_op_of_grouped_queries(how: str) -> None:
    """Whatever a model writes, the op reads the two key heads that there are, and gradients stay right."""
    torch.manual_seed(0)
    model, x = Attention(how), torch.randn(2, 6, 16)
    graph = capture(model, (x,))
    (node,) = (node for node in graph.nodes if node.op_name == "autoparallel_fp8.attention.default")
    assert [graph.spec(ref).shape for ref in node.reads()] == [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)]
    assert not any(node.op_name in ("aten.expand.default", "aten.clone.default") for node in graph.nodes)
    found = run_graph(graph, dict(model.named_parameters()), (x,), check=True)
    out = model(x)
    out.sum().backward()
    torch.testing.assert_close(found["output"]["output"], out)
    torch.testing.assert_close(found["gradient"], {name: p.grad for name, p in model.named_parameters()})


def test_attention_inside_torchs_own_modules_is_found() -> None:
    """`nn.TransformerEncoderLayer` calls it below what dynamo shows."""
    torch.manual_seed(0)
    model, x = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), torch.randn(2, 5, 16)
    graph = capture(model, (x,))
    names = [node.op_name for node in graph.nodes]
    assert names.count("autoparallel_fp8.attention.default") == 1
    assert not any("scaled_dot_product" in name for name in names)
    found = run_graph(graph, dict(model.named_parameters()), (x,), check=True)
    out = model(x)
    out.sum().backward()
    torch.testing.assert_close(found["output"]["output"], out)
    torch.testing.assert_close(found["gradient"], {name: p.grad for name, p in model.named_parameters()})


def test_attention_dropout_is_refused() -> None:
    """Replicas could not agree on it."""
    with pytest.raises(
        CaptureError, match=r"attention dropout is not planned: dropout_p is 0.1\n.*\n  do: set it to 0"
    ):
        capture(Attention("dropout"), (torch.empty(2, 6, 16),))
