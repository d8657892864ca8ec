"""Splits of attention heads that are finer than the key-value heads, or start inside them."""

from __future__ import annotations

import pytest
import torch
from split_ops import Sample, problems

from autoparallel_fp8.expansion import expand
from autoparallel_fp8.graph import Graph, Node, Ref, TensorSpec
from autoparallel_fp8.mesh import parse_mesh

aten = torch.ops.aten
attention = torch.ops.autoparallel_fp8.attention.default
HEADS, KV_HEADS, LENGTH, SIZE = (2, 2, 3), 4, 6, 2
pytestmark = pytest.mark.usefixtures("one_thread")


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, tuple(torch.empty(shape).stride()), torch.float64)


def graph() -> Graph:
    """Queries [batch, 2, 2, 3, length, size] seen as 12 heads, on 4 key-value heads."""
    kv, out = spec(2, KV_HEADS, LENGTH, SIZE), torch.empty(2, LENGTH, 12, SIZE).transpose(1, 2)
    parameters = [
        Node(name, "parameter", None, (), (), (one,), "forward", name)
        for name, one in (("q", spec(2, *HEADS, LENGTH, SIZE)), ("k", kv), ("v", kv))
    ]
    shape = (2, 12, LENGTH, SIZE)
    seen = Node("view", "op", aten.view.default, (Ref(0), shape), (), (spec(*shape),), "forward")
    results = (TensorSpec(tuple(out.shape), tuple(out.stride()), torch.float64), spec(2, 12, LENGTH))
    op = Node("op", "op", attention, (Ref(3), Ref(1), Ref(2)), (), results, "forward")
    return Graph((*parameters, seen, op), ())


@pytest.mark.parametrize("mesh", ["tp=6", "a=2,b=3", "a=3,b=2", "tp=2", "tp=12", "a=2,b=2"])
def test_a_split_that_starts_inside_the_heads_gives_the_unsplit_result(mesh: str) -> None:
    """A rank may have queries of several key-value heads, some of each: it picks all of those."""
    space = expand(graph(), parse_mesh(mesh), architecture="cpu")
    kind = space.kind(4)
    assert kind.operand_factors[0][1] == HEADS
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s.shape, generator=generator, dtype=torch.float64) for s in kind.call.tensors)
    wrong = list(problems(Sample(attention, (q, k, v), rtol=1e-6, atol=1e-6), kind, space.mesh.sizes))
    assert not wrong, wrong[0]
    if mesh in ("tp=6", "a=2,b=3"):
        inside = [o for o in kind.options if any(r.local for r in o.rows) and any(p.factor for p in o.operands[0])]
        assert inside, "the case that this is about"
