"""Capture: the graph is the model, in names, results and gradients, and errors say where the model cannot be traced."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoparallel_fp8.capture.trace as capture_stage
from autoparallel_fp8.capture import capture
from autoparallel_fp8.capture.meta_copy import meta_copy
from autoparallel_fp8.errors import CaptureError, UsageError
from autoparallel_fp8.graph import Graph, Node, Result
from autoparallel_fp8.integrations.hugging_face import build_from_config, causal_lm_wrapper
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.recipes import RECIPES, convert
from autoparallel_fp8.simulate import run_graph

SMALL: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "gpt2": {"n_embd": 64, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}


def small(kind: str, num_layers: int = 2, **changes: Any) -> Any:
    """A small Hugging Face model with random weights on the CPU, in float32."""
    config = {
        "model_type": kind,
        "vocab_size": 96,
        "bos_token_id": None,
        "eos_token_id": None,
        **SMALL[kind],
        **changes,
    }
    model = build_from_config(config, num_layers, torch.float32)
    torch.manual_seed(0)
    real: Any = model.to_empty(device="cpu")
    for name, buffer in type(model)(model.config).named_buffers():
        real.get_buffer(name).copy_(buffer)
    for parameter in real.parameters():
        parameter.data.normal_(std=0.1)
    return real


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 96, shape, generator=torch.Generator().manual_seed(0))


def ops(graph: Graph) -> list[str]:
    return [node.op_name for node in graph.nodes if node.kind == "op"]


def held(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def spy(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Graph]:
    """The graphs that one of capture's steps is called with."""
    seen: list[Graph] = []
    real = getattr(capture_stage, name)

    def called(graph: Graph, *rest: Any) -> Any:
        seen.append(graph)
        return real(graph, *rest)

    monkeypatch.setattr(capture_stage, name, called)
    return seen


class Block(nn.Module):
    """A linear, a norm with statistics, a frozen and an unused parameter, a counter and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.rand(16), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.plain = torch.rand(16)

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("count").add_(1)
        return self.norm(F.relu(self.lin(x)) * self.frozen + self.plain)


class Nested(nn.Module):
    """Two blocks and a tied head; nested arguments and results, some of them no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.get_parameter("layers.0.lin.weight")

    def forward(self, x: Tensor, *, mask: Tensor | None = None, pos: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
        y = self.head(x) + pos
        return {"flat": y.view(-1), "more": (x.sum(), 3, x.argmax(-1)), "part": y[:, :2], "same": options["k"]}


def nested_call() -> tuple[Tensor, dict[str, Any]]:
    torch.manual_seed(1)
    return torch.randn(8, 16), {"pos": torch.randn(8, 16), "options": {"k": torch.randn(3), "none": None}}


def test_every_tensor_has_a_node_and_a_name() -> None:
    """Parameters by fqn, unused and frozen too; ties once; arguments by path; each float result has a tangent."""
    torch.manual_seed(0)
    x, kwargs = nested_call()
    graph = capture(Nested(), (x,), kwargs=kwargs)
    named: dict[str, list[str]] = {}
    for node in graph.nodes:
        named.setdefault(node.kind, []).append(node.target)
    of_block = ["unused", "frozen", "lin.weight", "lin.bias", "norm.weight", "norm.bias"]
    buffers = ["count", "plain", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert named["parameter"] == [f"layers.{i}.{name}" for i in (0, 1) for name in of_block]
    assert named["buffer"] == [f"layers.{i}.{name}" for i in (0, 1) for name in buffers]
    assert named["input"] == ["x", "pos", "options.k"]
    assert named["tangent"] == ["flat", "more.0", "part"]
    assert graph.aliases == (("head.weight", "layers.0.lin.weight"),)
    assert graph.returns == {"flat": Result(0), "more": (Result(1), 3, Result(2)), "part": Result(3), "same": Result(4)}
    left = [(output.kind, output.target) for output in graph.outputs]
    trained = [f"layers.{i}.{name}" for i in (0, 1) for name in of_block[2:]]
    changed = [f"layers.{i}.{name}" for i in (0, 1) for name in (buffers[0], *buffers[2:])]
    assert left[:5] == [("output", name) for name in ("flat", "more.0", "more.2", "part", "same")]
    assert left[5:] == [("gradient", name) for name in trained] + [("buffer", name) for name in changed]


def test_nodes_know_their_module_phase_and_place() -> None:
    """Forward before backward, reads before readers; modules and layers by fqn, in backward too."""
    x, kwargs = nested_call()
    graph = capture(Nested(), (x,), kwargs=kwargs)
    phases = [node.phase for node in graph.nodes]
    assert phases == sorted(phases, key=("forward", "backward").index)
    assert all(ref.node < index for index, node in enumerate(graph.nodes) for ref in node.reads())
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)
    found = {(node.op_name, node.module, node.layer, node.phase) for node in graph.nodes}
    assert ("aten.relu.default", "layers.1", "layers.1", "forward") in found
    assert ("aten.threshold_backward.default", "layers.1", "layers.1", "backward") in found
    assert ("aten.mm.default", "layers.0.lin", "layers.0", "backward") in found
    assert ("aten.mm.default", "head", "", "forward") in found
    assert ("aten.add.Tensor", "layers.0.lin", "layers.0", "backward") in found  # the tied weight's gradients summed


def test_results_gradients_and_buffers_are_the_models() -> None:
    """Bit for bit, on nested results with a tangent each; and the model itself has not changed."""
    torch.manual_seed(0)
    model, (x, kwargs) = Nested(), nested_call()
    before = copy.deepcopy(model.state_dict())
    graph = capture(model, (x,), kwargs=kwargs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "plain" in vars(model.layers[0])
    tangents = [torch.randn(node.outputs[0].shape) for node in graph.nodes if node.kind == "tangent"]
    values = {name: value.clone() for name, value in held(model).items()}
    values |= {f"layers.{i}.plain": vars(model.get_submodule(f"layers.{i}"))["plain"] for i in (0, 1)}
    found = run_graph(graph, values, (x, kwargs["pos"], kwargs["options"]["k"]), tangents, check=True)
    out = model(x, **kwargs)
    torch.autograd.backward([out["flat"], out["more"][0], out["part"]], tangents)
    for name, value in {"flat": out["flat"], "more.2": out["more"][2], "same": out["same"]}.items():
        assert torch.equal(found["output"][name], value)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found["gradient"].keys() == gradients.keys()
    assert all(torch.equal(found["gradient"][name], value) for name, value in gradients.items())
    assert all(torch.equal(value, model.get_buffer(name)) for name, value in found["buffer"].items())


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("llama", None),
        ("qwen3", None),
        ("gpt2", None),
        ("llama", "tensorwise"),
        ("llama", "rowwise"),
        ("llama", "rowwise_with_gw_hp"),
    ],
)
def test_language_models_keep_loss_and_gradients(
    kind: str, recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager and captured agree to float32 rounding; simplified and as traced agree bit for bit, strides and all."""
    traced = spy(monkeypatch, "simplify")
    model, ids, labels = small(kind), tokens(2, 16), tokens(2, 16)
    labels[0, :5] = -100
    graph = capture(model, (ids, labels), recipe=recipe)
    eager, _ = convert(model, recipe)
    loss = causal_lm_wrapper(eager)(ids, labels)
    loss.backward()
    found = run_graph(graph, held(eager), (ids, labels), check=True)
    torch.testing.assert_close(found["output"]["loss"], loss)
    gradients = {name: p.grad for name, p in eager.named_parameters()}
    torch.testing.assert_close(found["gradient"], gradients, rtol=1e-3, atol=1e-6)
    as_traced = run_graph(traced[-1], held(eager), (ids, labels), check=True)
    assert torch.equal(as_traced["output"]["loss"], found["output"]["loss"])
    assert all(torch.equal(value, found["gradient"][name]) for name, value in as_traced["gradient"].items())


def test_labels_are_made_up_and_the_loss_can_be_left_out() -> None:
    """Token ids alone give a loss; loss=None gives logits."""
    model = build("llama3-debug", num_layers=1)
    graph = capture(model, (tokens(2, 16),))
    assert [node.target for node in graph.nodes if node.kind in ("input", "tangent")] == ["input_ids", "labels", "loss"]
    graph = capture(model, (tokens(2, 16),), loss=None)
    assert [output.target for output in graph.outputs if output.kind == "output"] == ["logits"]
    assert graph.spec(graph.outputs[0].ref).shape == (2, 16, 2256)


def test_cross_entropy_splits_along_tokens_and_classes() -> None:
    """Nothing but pointwise ops and sums: no gather or scatter, no zeros of the logits' size, an explicit count."""
    graph = capture(build("llama3-debug", num_layers=1), (tokens(2, 16),))
    (start,) = (index for index, node in enumerate(graph.nodes) if node.name == "lm_head.mm")
    (end,) = (index for index, node in enumerate(graph.nodes) if node.name == "lm_head.backward.mm")
    loss = [node for node in graph.nodes[start:end] if node.kind == "op" and not node.module]
    sums = {"amax", "sum"}
    pointwise = {"_to_copy", "eq", "ne", "sub", "exp", "log", "where", "div", "mul", "neg", "add"}
    allowed = {*sums, *pointwise, "view", "unsqueeze", "expand", "arange", "full"}
    assert {node.op_name.split(".")[1] for node in loss} <= allowed
    assert all(node.outputs[0].numel == 1 for node in loss if node.op_name == "aten.full.default")
    (result,) = (output.ref.node for output in graph.outputs if output.kind == "output")
    assert graph.nodes[result].op_name == "aten.div.Tensor"


def test_hugging_face_models_get_no_mask() -> None:
    """Causality is a flag of the attention op; nothing of size seq x seq is in the graph."""
    graph = capture(small("qwen3"), (tokens(2, 24),))
    nodes = [node for node in graph.nodes if node.op_name == "autoparallel_fp8.attention.default"]
    assert [node.args[3:5] for node in nodes] == [(None, True)] * 2
    assert not any(spec.shape[-2:] == (24, 24) for node in graph.nodes for spec in node.outputs)


def test_a_mask_that_the_user_passes_is_kept() -> None:
    """Then the op reads transformers' own mask."""
    mask = torch.ones(2, 16, dtype=torch.long)
    model = small("llama", 1)
    mask[0, 8:] = 0
    graph = capture(model, (tokens(2, 16),), kwargs={"attention_mask": mask}, loss=None)
    (node,) = (node for node in graph.nodes if node.op_name == "autoparallel_fp8.attention.default")
    assert graph.spec(node.args[3]).shape == (2, 1, 16, 16)
    found = run_graph(graph, held(model), (tokens(2, 16), mask))
    expected = model(tokens(2, 16), attention_mask=mask).logits
    torch.testing.assert_close(found["output"]["logits"][0, :8], expected[0, :8])


def test_a_bare_transformers_model_returns_what_it_returns() -> None:
    """No loss, no cache; the result's own class."""
    model = small("llama").model
    model.config.use_cache = True
    graph = capture(model, (tokens(2, 16),))
    assert model.config.use_cache is True
    assert type(graph.returns).__name__ == "BaseModelOutputWithPast"
    assert [output.target for output in graph.outputs if output.kind == "output"] == ["last_hidden_state"]


def test_a_window_shorter_than_the_sequence_is_refused() -> None:
    """A flag cannot say it; up to the window it makes no difference."""
    config = {"model_type": "mistral", "vocab_size": 96, "sliding_window": 16, **SMALL["llama"]}
    model = build_from_config(config, 1)
    with pytest.raises(
        CaptureError, match=r"sliding window is not planned: window 16, sequence 32\n  at: MistralConfig"
    ):
        capture(model, (tokens(2, 32),))
    assert "autoparallel_fp8.attention.default" in ops(capture(model, (tokens(2, 16),)))


@pytest.mark.parametrize(("name", "depth"), [("llama3-debug", 8), ("gpt2", 9)])
def test_sharing_blocks_does_not_change_the_graph(name: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node for node the graph of a trace through all blocks; and autograd went through six."""
    short = spy(monkeypatch, "lengthen")
    model, ids = build(name, num_layers=depth), torch.empty(2, 64, dtype=torch.long)
    shared = capture(model, (ids,))
    assert short and len(short[0].nodes) < len(shared.nodes)
    assert shared == capture(model, (ids,), share_blocks=False)


class Doubled(torch.autograd.Function):
    """The identity, whose backward multiplies by a setting: forward looks the same whatever it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


class Stacked(nn.Module):
    """Ten linears, one of them treated in its own way."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.layers, self.odd = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(10)), odd
        self.head = nn.Linear(16, 16)
        if odd == "frozen":
            self.layers[5].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, layer in enumerate(self.layers):
            if self.odd == "scaled" and number == 5:
                x = x * 2
            if self.odd == "backward":
                x = Doubled.apply(x, 3.0 if number == 5 else 2.0)
            with torch.set_grad_enabled(not (self.odd == "no_grad" and number == 5)):
                new = layer(self.layers[2](x) if self.odd == "shared" and number == 7 else x)
            x = new if self.odd == "fourth from the end" and number == len(self.layers) - 4 else new + x
            kept.append(x)
        return self.head(kept[4] + x if self.odd == "read later" else x)


ODD = ["scaled", "read later", "frozen", "backward", "no_grad", "shared", "fourth from the end"]


@pytest.mark.parametrize("odd", ["", *ODD])
def test_blocks_that_differ_are_traced_one_by_one(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What control flow does to one block is in the graph; only where all are alike is autograd traced through six."""
    used = spy(monkeypatch, "lengthen")
    torch.manual_seed(0)
    model, x = Stacked(odd), torch.randn(4, 16)
    graph = capture(model, (x,))
    assert graph == capture(model, (x,), share_blocks=False)
    assert bool(used) == (odd == "")
    found = run_graph(graph, held(model), (x,))
    out = model(x)
    out.sum().backward()
    torch.testing.assert_close(found["output"]["output"], out)
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found["gradient"], wanted)


def test_blocks_that_do_not_compare_are_traced_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the joint graph of six blocks does not agree with itself, the whole model is traced again."""
    expected = capture(Stacked(""), (torch.empty(4, 16),), share_blocks=False)
    monkeypatch.setattr(capture_stage, "lengthen", lambda graph, stack: None)
    assert capture(Stacked(""), (torch.empty(4, 16),)) == expected


def test_a_model_without_gradients_has_a_forward_alone() -> None:
    """Frozen, or without parameters; also under no_grad."""
    with torch.no_grad():
        assert ops(capture(nn.Linear(8, 8, bias=False), (torch.empty(2, 8),))).count("aten.mm.default") == 2
    frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
    assert ops(capture(frozen, (torch.empty(2, 8),))) == ["aten.t.default", "aten.mm.default"]
    assert ops(capture(nn.ReLU(), (torch.empty(2, 8),))) == ["aten.relu.default"]


def test_sharing_float8_blocks_does_not_change_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for linears that torchao converted, under mixed precision."""
    short = spy(monkeypatch, "lengthen")
    model, call = Stacked(""), (torch.empty(16, 16),)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    shared = capture(model, call, recipe="rowwise", mixed_precision=policy)
    assert len(short) == 1
    assert shared == capture(model, call, recipe="rowwise", mixed_precision=policy, share_blocks=False)


@pytest.mark.proof
@pytest.mark.parametrize("depth", [4, 8])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_graph_does_not_depend_on_how_it_was_traced(recipe: str | None, depth: int) -> None:
    """Node for node, for every recipe; four blocks are always traced in full."""
    model, call = build("llama3-debug", num_layers=depth), (torch.empty(2, 64, dtype=torch.long),)
    assert capture(model, call, recipe=recipe) == capture(model, call, recipe=recipe, share_blocks=False)


def test_the_same_model_gives_the_same_graph() -> None:
    """Also after a capture with other shapes: no size becomes a symbol."""
    model = build("llama3-debug", num_layers=1)
    first = capture(model, (tokens(2, 16),))
    other = capture(model, (tokens(4, 32),))
    assert first == capture(model, (tokens(2, 16),))
    assert [node.name for node in first.nodes] == [node.name for node in other.nodes]


def test_a_converted_model_is_planned_as_it_is() -> None:
    """torchao on every linear, the head too: 3 linears a matrix product each in forward, 2 in backward."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 48))
    for name in ("0", "1", "2"):
        model[int(name)], _ = convert(nn.Sequential(meta_copy(model[int(name)])), "tensorwise")
    graph = capture(model, (torch.empty(16, 32),))
    assert ops(graph).count("aten._scaled_mm.default") == 8  # the input of the first needs no gradient
    assert graph.skipped == ()


def test_mixed_precision_casts_masters_and_gradients() -> None:
    """float32 masters, bfloat16 compute, float32 reduction; frozen parameters are cast as well."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(16, 512, bias=False), nn.GELU(), nn.Linear(512, 16, bias=False)),
        torch.randn(8, 16),
    )
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    graph = capture(model, (x,), mixed_precision=policy)
    masters = [index for index, node in enumerate(graph.nodes) if node.kind == "parameter"]
    assert {graph.nodes[index].outputs[0].dtype for index in masters} == {torch.float32}
    readers = {graph.nodes[i].op_name for ref, found in graph.readers().items() if ref.node in masters for i in found}
    assert readers == {"aten._to_copy.default"}
    found = run_graph(graph, held(model), (x,), check=True)
    low = copy.deepcopy(model).bfloat16()
    out = low(x.bfloat16()).float()
    out.sum().backward()
    assert torch.equal(found["output"]["output"], out)
    assert {value.dtype for value in found["gradient"].values()} == {torch.float32}
    expected = {name: p.grad for name, p in low.named_parameters()}
    torch.testing.assert_close(found["gradient"], expected, rtol=0, atol=0, check_dtype=False)


def test_mixed_precision_of_a_language_model_casts_its_logits() -> None:
    """output_dtype is the model's, so the loss reads logits of that dtype."""
    model = build("llama3-debug", num_layers=1, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    graph = capture(model, (tokens(2, 16),), mixed_precision=policy, recipe="tensorwise")
    gradients = [graph.spec(output.ref) for output in graph.outputs if output.kind == "gradient"]
    assert {spec.dtype for spec in gradients} == {torch.float32}
    (product,) = (node for node in graph.nodes if node.name == "lm_head.mm")
    assert product.outputs[0].dtype == torch.bfloat16


class Odd(nn.Module):
    """Does one thing that cannot be traced, in a block of its own."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block = Act(act)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Act(nn.Module):
    """A linear, and a function after it."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(8, 8), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.lin(x))


def fails(_: Tensor) -> Tensor:
    raise ValueError("no such head")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda y: y * 2 if y.sum() > 0 else y, "cannot be traced: Data-dependent branching"),
        (lambda y: y * y.sum().item(), r"it reads a number out of a tensor, as `.item\(\)` does"),
        (lambda y: y[y > 0], "the shape of aten.nonzero.default's result depends on data"),
        (lambda y: y[:, :3] @ y, "RuntimeError: a and b must have same reduction dim"),
        (fails, "ValueError: no such head"),
        (lambda y: y + torch.tensor([1.0] * 8), "neither argument, parameter, buffer nor result of an op"),
    ],
)
def test_what_cannot_be_traced_says_where(act: Callable[[Tensor], Tensor], message: str) -> None:
    """The reason in a line, the module, the file, and what to do."""
    with pytest.raises(CaptureError, match=message) as caught:
        capture(Odd(act), (torch.empty(2, 8),))
    assert caught.value.at is not None and caught.value.at.startswith("block")
    assert "neither" in message or "test_capture.py:" in caught.value.at
    assert caught.value.do is not None and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("inputs", "kwargs", "error", "message"),
    [
        (
            (),
            {},
            UsageError,
            r"inputs do not fit the model's forward: missing a required argument: 'x'\n  at: Act.forward",
        ),
        ((torch.empty(2, 8), 1), {}, UsageError, "too many positional arguments"),
        ((torch.empty(2, 8),), {"mask": None}, UsageError, "unexpected keyword argument 'mask'"),
        ((torch.empty(2, 9),), {}, CaptureError, r"same reduction dim, but got \[2, 9\] X \[8, 8\].*\n  at: lin, "),
        ((torch.empty(2, 8, dtype=torch.long),), {}, CaptureError, r"a matrix product of float32 and int64\n  at: lin"),
    ],
)
def test_wrong_inputs_say_what_is_wrong(inputs: Any, kwargs: Any, error: type[Exception], message: str) -> None:
    """Arity, names, shapes and dtypes."""
    with pytest.raises(error, match=message):
        capture(Act(torch.relu), inputs, kwargs=kwargs)


def test_wrong_token_ids_say_what_is_wrong() -> None:
    """Floats, and ids without a batch."""
    model = build("llama3-debug", num_layers=1)
    with pytest.raises(UsageError, match=r"input_ids is torch.float32 \[2, 16\], not integers \[batch, seq\]"):
        capture(model, (torch.empty(2, 16),))
    with pytest.raises(UsageError, match="loss is 'mean'"):
        capture(model, (tokens(2, 16),), loss="mean")


def test_capture_is_silent_and_leaves_logging_as_it_was() -> None:
    """Warnings and log records of the tracers do not reach the user."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture(build("llama3-debug", num_layers=1), (tokens(2, 16),), recipe="tensorwise")
    assert caught == []
    assert logging.root.manager.disable == logging.NOTSET


def test_gradients_of_inputs_leave_the_graph_where_asked_for() -> None:
    """An input that requires a gradient gets one."""
    x = torch.empty(2, 8, requires_grad=True)
    graph = capture(nn.Linear(8, 4), (x,))
    assert [output.target for output in graph.outputs if output.kind == "gradient"] == ["weight", "bias", "input"]


def test_the_example_of_the_docstring() -> None:
    """It runs and prints what it says."""
    graph = capture(nn.Linear(8, 4, bias=False), (torch.empty(2, 8),))
    assert [node.op_name for node in graph.nodes if isinstance(node, Node) and node.kind == "op"] == [
        "aten.t.default",
        "aten.mm.default",
        "aten.t.default",
        "aten.mm.default",
    ]
