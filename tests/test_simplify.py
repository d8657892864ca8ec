"""Simplification: each rule does its one thing, leaves alone what it must, and values stay the same bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoparallel_fp8.capture import capture
from autoparallel_fp8.capture.from_fx import Slot, graph_from_fx, layer_of
from autoparallel_fp8.capture.phases import SHARED_NUMEL
from autoparallel_fp8.capture.simplify import simplify
from autoparallel_fp8.graph import Graph, Node
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.simulate import run_graph

aten = torch.ops.aten


def traced(
    function: Callable[..., Any], *shapes: tuple[int, ...], kind: str = "input", target: str = "output"
) -> Graph:
    """A function of float tensors as a graph, just as it is traced."""
    graph = make_fx(function, tracing_mode="fake")(*(torch.empty(shape) for shape in shapes)).graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    slots = {node: Slot(kind, f"x{at}") for at, node in enumerate(inputs)}
    (end,) = (node for node in graph.nodes if node.op == "output")
    values = end.args[0] if isinstance(end.args[0], (list, tuple)) else [end.args[0]]
    return graph_from_fx(graph, slots, [(v, Slot(target, f"y{at}")) for at, v in enumerate(values)], lambda _: "")


def ops(graph: Graph) -> list[str]:
    return [node.op_name.removeprefix("aten.") for node in graph.nodes if node.kind == "op"]


def simplified(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    """Ops after simplification, which is held to keep values and to change nothing when run again."""
    before = traced(function, *shapes)
    after = simplify(before)
    assert simplify(after) == after
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    expected, found = (run_graph(graph, {}, inputs, check=True)["output"] for graph in (before, after))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    return ops(after)


CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[str]]] = {
    "detach": (lambda x: x.detach().exp(), [(2, 3)], ["exp.default"]),
    "alias": (lambda x: aten.alias(x).exp(), [(2, 3)], ["exp.default"]),
    "clone of contiguous": (lambda x: x.exp().clone(memory_format=torch.contiguous_format), [(2, 3)], ["exp.default"]),
    "clone of transposed": (lambda x: x.t().contiguous(), [(2, 3)], ["t.default", "clone.default"]),
    "cast to own dtype": (lambda x: aten._to_copy(x, dtype=torch.float32).exp(), [(2, 3)], ["exp.default"]),
    "cast up and back": (lambda x: x.double().float().exp(), [(2, 3)], ["exp.default"]),
    "cast down and back": (lambda x: x.half().float(), [(2, 3)], ["_to_copy.default", "_to_copy.default"]),
    "neutral numbers": (lambda x: ((((x + 0) - 0) * 1.0) / 1) ** 1, [(2, 3)], []),
    "other numbers": (lambda x: (x + 1) * 2, [(2, 3)], ["add.Tensor", "mul.Tensor"]),
    "x + y": (lambda x, y: x + y, [(2, 3), (2, 3)], ["add.Tensor"]),
    "view to the same shape": (lambda x: aten.view(x.exp(), [2, -1]), [(2, 3)], ["exp.default"]),
    "view of a view": (lambda x: x.view(6).view(3, 2), [(2, 3)], ["view.default"]),
    "views that cancel": (lambda x: x.view(6).view(2, 3).exp(), [(2, 3)], ["exp.default"]),
    "expand to the same shape": (lambda x: x.expand(2, 3).exp(), [(2, 3)], ["exp.default"]),
    "slice of everything": (lambda x: x[:, :].exp(), [(2, 3)], ["exp.default"]),
    "slice of a part": (lambda x: aten.slice(x, 1, 0, 2), [(2, 3)], ["slice.Tensor"]),
    "t of t": (lambda x: x.t().t().exp(), [(2, 3)], ["exp.default"]),
    "transpose back": (lambda x: x.transpose(0, 1).transpose(-1, -2).exp(), [(2, 3)], ["exp.default"]),
    "transpose on": (lambda x: x.transpose(0, 1).transpose(1, 2), [(2, 3, 4)], ["transpose.int"] * 2),
    "permute back": (lambda x: x.permute(1, 2, 0).permute(2, 0, 1).exp(), [(2, 3, 4)], ["exp.default"]),
    "equal ops": (lambda x: x.exp() + x.exp(), [(2, 3)], ["exp.default", "add.Tensor"]),
    "equal but for a number's type": (
        lambda x: torch.cat([x * 2, x * 2.0]),
        [(2, 3)],
        ["mul.Tensor"] * 2 + ["cat.default"],
    ),
    "constants of any spelling": (
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)) + torch.zeros(2, 3) + x.new_zeros(2, 3),
        [(2, 3)],
        ["gt.Scalar", "full.default", "where.self", "add.Tensor", "add.Tensor"],
    ),
    "arithmetic on constants": (
        lambda x: x * (torch.ones(()) * 3 + 1).reciprocal(),
        [(2, 3)],
        ["full.default", "mul.Tensor"],
    ),
    "arange": (lambda x: x + torch.arange(3), [(2, 3)], ["arange.default", "add.Tensor"]),
    "pads that fill each other": (
        lambda x, y: aten.constant_pad_nd(x, [0, 3]) + aten.constant_pad_nd(y, [2, 0]),
        [(4, 2), (4, 3)],
        ["cat.default"],
    ),
    "pads that overlap": (
        lambda x, y: aten.constant_pad_nd(x, [0, 3]) + aten.constant_pad_nd(y, [1, 1]),
        [(4, 2), (4, 3)],
        ["constant_pad_nd.default", "constant_pad_nd.default", "add.Tensor"],
    ),
    "sum that keeps dims for a view": (lambda x: x.sum((0, 1), True).view(4), [(2, 3, 4)], ["sum.dim_IntList"]),
    "sum that keeps dims for use": (lambda x: x - x.sum(0, True), [(2, 3)], ["sum.dim_IntList", "sub.Tensor"]),
    "cast of a flattened tensor": (
        lambda x: aten.view(x, [6, 4]).half() * 2 + aten.view(x.half() * 2, [6, 4]),
        [(2, 3, 4)],
        ["_to_copy.default", "mul.Tensor", "view.default", "add.Tensor"],
    ),
    "op on an unflattened tensor": (lambda x: x.view(2, 3, 4).exp(), [(6, 4)], ["view.default", "exp.default"]),
    "op on a transposed tensor": (lambda x: x.t().abs().t().exp(), [(2, 3)], ["abs.default", "exp.default"]),
    "op on a tensor transposed twice": (
        lambda x: x.transpose(0, 1).transpose(1, 2).exp(),
        [(2, 3, 4)],
        ["exp.default", "transpose.int", "transpose.int"],
    ),
    "op that closes gaps": (
        lambda x: x[:, :, :2].view(6, 2).exp(),
        [(2, 3, 4)],
        ["slice.Tensor", "view.default", "exp.default"],
    ),
    "op with a second tensor": (lambda x, y: x.t() * y, [(2, 3), (3, 2)], ["t.default", "mul.Tensor"]),
    "maximum of a flattened tensor": (
        lambda x: x.view(6, 4).max() + x.max(),
        [(2, 3, 4)],
        ["max.default", "add.Tensor"],
    ),
    "sum of a flattened tensor": (lambda x: x.view(6, 4).sum(), [(2, 3, 4)], ["view.default", "sum.default"]),
    "expanded argument": (
        lambda x, y: (x.expand(3, 4) / 4) * y,
        [(3, 1), (3, 4)],
        ["div.Tensor", "mul.Tensor"],
    ),
    "expanded result": (lambda x: x.expand(3, 4), [(3, 1)], ["expand.default"]),
    "dead ops": (lambda x: (x.exp(), x.sin())[1], [(2, 3)], ["sin.default"]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rules(case: tuple[Callable[..., Any], list[tuple[int, ...]], list[str]]) -> None:
    """The ops left of a small function; values, shapes and strides are checked along the way."""
    function, shapes, expected = case
    assert simplified(function, *shapes) == expected


def test_random_ops_are_not_merged() -> None:
    """Two draws are two draws."""
    assert (
        ops(simplify(traced(lambda x: torch.rand_like(x) + torch.rand_like(x), (2, 3)))).count("rand_like.default") == 2
    )


def weight_twice(scale: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return lambda w: (scale(w).half().t().exp(), scale(w).half().t().sin())


def phases_of(rows: int) -> Graph:
    """The cast and scaled weight [rows, 4] that forward (exp) and backward (sin) both read."""
    graph = traced(weight_twice(lambda w: w * w.max()), (rows, 4), kind="parameter")
    (late,) = (i for i, node in enumerate(graph.nodes) if node.op_name == "aten.sin.default")
    nodes = tuple(
        Node(**{**vars(node), "phase": "backward" if late <= i else node.phase}) for i, node in enumerate(graph.nodes)
    )
    return simplify(Graph(nodes, graph.outputs))


def test_backward_derives_large_values_of_parameters_itself() -> None:
    """Scale, cast and transpose are done again; the maximum is not."""
    graph = phases_of(SHARED_NUMEL)
    again = [node.op_name for node in graph.nodes if node.phase == "backward"]
    assert again == ["aten.mul.Tensor", "aten._to_copy.default", "aten.sin.default", "aten.t.default"]
    assert [node.op_name for node in graph.nodes].count("aten.max.default") == 1
    for node in graph.nodes:
        large = [ref for ref in node.reads() if graph.spec(ref).numel > SHARED_NUMEL]
        if node.phase == "backward":
            assert all(graph.nodes[ref.node].phase == "backward" or graph.nodes[ref.node].kind != "op" for ref in large)


def test_backward_reads_small_values_of_parameters_from_forward() -> None:
    """A few KiB are not worth a second pass."""
    graph = phases_of(4)
    assert [node.op_name for node in graph.nodes if node.phase == "backward"] == ["aten.sin.default", "aten.t.default"]


def test_from_parameters_means_parameters_and_constants_alone() -> None:
    """A product with an input, or a constant alone, is not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * torch.arange(4)).exp() * x

    graph = capture(Model(), (torch.empty(4),))
    found = {node.name: node.from_parameters for node in graph.nodes}
    assert [name for name, yes in found.items() if yes] == ["weight", "mul", "exp"]
    assert found["arange"] is False and found["mul_2"] is False


def test_layers_end_at_the_first_number() -> None:
    """Where there is none, there is no layer."""
    names = ["model.layers.3.mlp.up", "model.layers.3", "0", "h.0.1.x", "model.norm", "conv2d", ""]
    assert [layer_of(name) for name in names] == ["model.layers.3", "model.layers.3", "0", "h.0", "", "", ""]


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
def test_a_language_model_becomes_few_ops(recipe: str | None) -> None:
    """Simplified once is simplified; and these are all ops there are."""
    graph = capture(build("llama3-debug", num_layers=2), (torch.empty(2, 32, dtype=torch.long),), recipe=recipe)
    assert simplify(graph) == graph
    common = [
        "_to_copy.default",
        "add.Tensor",
        "amax.default",
        "arange.default",
        "cat.default",
        "clone.default",
        "cos.default",
        "div.Tensor",
        "embedding.default",
        "embedding_dense_backward.default",
        "eq.Tensor",
        "exp.default",
        "full.default",
        "log.default",
        "mean.dim",
        "mm.default",
        "mul.Tensor",
        "ne.Scalar",
        "neg.default",
        "pow.Tensor_Scalar",
        "rsqrt.default",
        "silu.default",
        "silu_backward.default",
        "sin.default",
        "slice.Tensor",
        "sub.Tensor",
        "sum.default",
        "sum.dim_IntList",
        "t.default",
        "transpose.int",
        "unsqueeze.default",
        "view.default",
        "where.self",
        "autoparallel_fp8.attention.default",
        "autoparallel_fp8.attention_backward.default",
    ]
    float8 = ["_scaled_mm.default", "abs.default", "clamp.default", "reciprocal.default"]
    scale = {"tensorwise": ["max.default"], "rowwise": ["exp2.default", "floor.default", "log2.default"]}
    assert set(ops(graph)) == {*common, *(float8 if recipe else []), *scale.get(recipe or "", [])}


def test_a_linear_casts_its_input_once() -> None:
    """Forward and weight gradient read the same float8 input; each amax is taken once."""
    graph = capture(build("llama3-debug", num_layers=1), (torch.empty(2, 32, dtype=torch.long),), recipe="tensorwise")
    # 7 weights, their 7 output gradients, and the inputs of attention, its output, of the MLP and of its output
    assert ops(graph).count("max.default") == 7 + 7 + 4
