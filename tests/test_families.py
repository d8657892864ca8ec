"""Families of Hugging Face models: captured as they are, every op planned by a right rule, whole plans run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from autoparallel_fp8.cost_models import load_device
from autoparallel_fp8.cost_models.compute import gemm_us, op_us
from autoparallel_fp8.cost_models.fusion import Traffic
from autoparallel_fp8.rules import OpCall
from family_models import BATCH, FAMILIES, SEQ, VOCAB, call_of, family, family_graph, with_weights
from graph_samples import retyped, sample_of
from split_ops import problems
from test_simulate_plan import Planned
from torch import Tensor

from autoparallel_fp8 import AutoParallel
from autoparallel_fp8.capture import capture
from autoparallel_fp8.errors import UsageError
from autoparallel_fp8.expansion import expand
from autoparallel_fp8.graph import Graph, TensorSpec
from autoparallel_fp8.integrations.hugging_face import build_from_config, causal_lm_wrapper, is_causal_lm
from autoparallel_fp8.mesh import parse_mesh
from autoparallel_fp8.simulate import run_graph
from autoparallel_fp8.simulate_plan import run_plan

NO_LINEARS = ("gpt2",)  # transformers writes them as Conv1D, which torchao does not convert
NOT_CONVERTED = (*NO_LINEARS, "falcon")  # adds into a linear's result in place, which torchao's linear refuses
PLANNED_ELSEWHERE = ("llama", "qwen3", "gpt2", "t5-gated", "bert-base")  # or so close to another that one will do
RECIPES = ("tensorwise", "rowwise")
CONVERTED = [(name, recipe) for name in FAMILIES if name not in NOT_CONVERTED for recipe in RECIPES]

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- capture -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_is_the_model(name: str) -> None:
    """Results and gradients are those of transformers' own code on its own attention, masks included."""
    model = with_weights(name)
    named = call_of(model)
    if is_causal_lm(model):
        named["labels"] = named["input_ids"].roll(1, -1)
        graph = capture(model, tuple(named.values()))
        causal_lm_wrapper(model)(**named).backward()
        results, tangents = {}, None
    else:
        graph = capture(model, (), kwargs=named)
        results = dict(model(**named, use_cache=False) if "decoder_input_ids" in named else model(**named))
        tangents = [torch.randn(n.outputs[0].shape) for n in graph.nodes if n.kind == "tangent"]
        torch.autograd.backward([results[n.target] for n in graph.nodes if n.kind == "tangent"], tangents)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = run_graph(graph, held, tuple(named.values()), tangents, check=True)
    for target, value in results.items():
        torch.testing.assert_close(found["output"][target], value, rtol=1e-4, atol=1e-5)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found["gradient"].keys() == gradients.keys()
    torch.testing.assert_close(found["gradient"], gradients, rtol=2e-3, atol=1e-4)


def ops(graph: Graph) -> list[str]:
    return [node.op_name for node in graph.nodes if node.kind == "op"]


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("bert", {("attention", False, None): 2}),
        ("vit", {("attention", False, None): 2}),
        ("gpt_neox", {("attention", True, None): 2}),
        ("opt", {("attention", True, None): 2}),
        ("gemma2", {("capped_attention", True, None): 2}),
        ("t5", {("biased_attention", False, (1, 4, SEQ, SEQ)): 4, ("attention", False, None): 2}),
    ],
)
def test_attention_is_what_the_family_asks_for(name: str, attention: dict[Any, int]) -> None:
    """Causal or not by a flag; a mask where positions are trained, and none where it would mask nothing."""
    graph = family_graph(name)
    found: dict[Any, int] = {}
    for node in graph.nodes:
        kind = node.op_name.removeprefix("autoparallel_fp8.").removesuffix(".default")
        if kind.endswith("attention"):
            mask = None if node.args[3] is None else graph.spec(node.args[3]).shape
            found[kind, node.args[4], mask] = found.get((kind, node.args[4], mask), 0) + 1
    assert found == attention


def test_a_convolution_adds_its_bias_after() -> None:
    """So that its input channels may be split; and its gradient is a sum."""
    calls = [node for node in family_graph("vit").nodes if "convolution" in node.op_name]
    assert [node.args[2] for node in calls if node.op_name == "aten.convolution.default"] == [None]
    assert [node.args[-1] for node in calls if "backward" in node.op_name] == [(False, True, False)]


def test_a_list_of_one_index_is_a_slice() -> None:
    """Falcon picks keys and values so; backward of it is a pad."""
    found = set(ops(family_graph("falcon")))
    assert "aten.index_put.default" not in found and {"aten.slice.Tensor", "aten.constant_pad_nd.default"} <= found


@pytest.mark.parametrize(("name", "more"), [("t5", "labels"), ("bert", "labels"), ("vit", "labels")])
def test_labels_as_an_input_give_the_models_own_loss(name: str, more: str) -> None:
    """Then the loss is a result beside the logits."""
    model = family(name)
    named = call_of(model, torch.bfloat16)
    if name == "t5":
        del named["decoder_input_ids"]
    labels = torch.zeros(BATCH, dtype=torch.int64) if name == "vit" else named["input_ids"]
    graph = capture(model, (), kwargs={**named, more: labels})
    assert [o.target for o in graph.outputs if o.kind == "output"][:2] == ["loss", "logits"]
    assert expand(graph, parse_mesh("dp=2,tp=2"), architecture="cpu", strict=True).replicated_ops == ()


# ---- rules ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tried() -> set[object]:
    """Calls with their options that were tried already: families share most of them."""
    return set()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_op_as_it_is_called_there(name: str, tried: set[object]) -> None:
    """All options that the graph's own factors allow, with its shapes, dtypes and memory orders."""
    assert not wrong_options(family_graph(name), tried)


@pytest.mark.proof
@pytest.mark.parametrize(("name", "recipe"), CONVERTED)
def test_every_op_of_a_float8_model_as_it_is_called_there(name: str, recipe: str, tried: set[object]) -> None:
    """The same with linears converted."""
    assert not wrong_options(family_graph(name, recipe), tried)


def wrong_options(graph: Graph, tried: set[object]) -> list[str]:
    space = expand(graph, parse_mesh("dp=2,tp=2"), architecture="cpu", strict=True)
    assert space.replicated_ops == ()
    wrong: list[str] = []
    for kind in space.kinds:
        key = kind.call, kind.options
        if kind.call.op is not None and key not in tried:
            tried.add(key)
            wrong += problems(sample_of(kind.call), kind, space.mesh.sizes, 16)
    return wrong[:5]


def test_a_convolution_costs_its_gemm() -> None:
    """Patches x (channels and kernel) x output channels; backward one for each gradient that is wanted."""
    device = load_device("H100")
    found = {}
    for node in family_graph("vit").nodes:
        if "convolution" in node.op_name:
            x = TensorSpec((64, 3, 224, 224), (150528, 50176, 224, 1), torch.bfloat16)
            weight = TensorSpec((768, 3, 16, 16), (768, 256, 16, 1), torch.bfloat16)
            out = TensorSpec((64, 768, 14, 14), (150528, 196, 14, 1), torch.bfloat16)
            is_forward = node.op is torch.ops.aten.convolution.default
            reads, makes = ((x, weight), (out,)) if is_forward else ((out, x, weight), (weight,))
            call = OpCall(node.op, (*reads, *node.args[len(reads) :]), (), reads, makes)
            found[is_forward] = op_us(call, Traffic(is_own_kernel=True), reads, makes, device)
    a = TensorSpec((64 * 196, 768), (768, 1), torch.bfloat16)
    b = TensorSpec((768, 768), (1, 768), torch.bfloat16)
    assert found == {True: gemm_us(a, b, None, device), False: gemm_us(a, b, None, device)}


# ---- plans ---------------------------------------------------------------------------------------------------------


def planned(name: str, recipe: str | None = None) -> Any:
    model = family(name)
    batch = 4 * BATCH if recipe and name in ("bert-base", "vit") else BATCH  # layers that see one token a sequence
    named = call_of(model, torch.bfloat16, batch)
    inputs, kwargs = (tuple(named.values()), {}) if len(named) == 1 else ((), named)
    return AutoParallel(
        model, "dp=2,tp=2", inputs=inputs, kwargs=kwargs, recipe=recipe, device="H100", strict=True, time_limit=60
    ).optimize()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in PLANNED_ELSEWHERE])
def test_a_family_is_planned(name: str) -> None:
    """No op without a rule, every parameter placed."""
    plan = planned(name)
    assert plan.status in ("optimal", "feasible") and plan.replicated_ops == ()
    assert len(plan.parameters) == len(dict(family(name).named_parameters()))


@pytest.mark.proof
@pytest.mark.parametrize(("name", "recipe"), CONVERTED)
def test_a_family_is_planned_in_float8(name: str, recipe: str) -> None:
    """The same with linears converted, those with a bias too."""
    plan = planned(name, recipe)
    assert plan.status in ("optimal", "feasible") and plan.replicated_ops == ()
    assert any(node.op == "aten._scaled_mm.default" for node in plan.nodes)


def values_for(graph: Graph) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Parameters, inputs and tangents, the same for the same graph."""
    generator = torch.Generator().manual_seed(0)

    def values(spec: Any, scale: float = 0.3) -> Tensor:
        if not spec.dtype.is_floating_point:
            return torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype)
        return (torch.randn(spec.shape, generator=generator) * scale).to(spec.dtype)

    parameters, inputs, tangents = {}, [], []
    for node in graph.nodes:
        spec = node.outputs[0]
        if node.kind in ("parameter", "buffer"):
            is_gain = len(spec.shape) == 1 and node.target.endswith("weight")
            parameters[node.target] = values(spec) + (1 if is_gain else 0)
        elif node.kind == "input" and not spec.dtype.is_floating_point:
            inputs.append(torch.randint(0, VOCAB, spec.shape, generator=generator))
        elif node.kind in ("input", "tangent"):
            (inputs if node.kind == "input" else tangents).append(values(spec, 1.0))
    return parameters, inputs, tangents


def in_float64(graph: Graph) -> Graph:
    return retyped(graph, {torch.bfloat16: torch.float64, torch.float32: torch.float64})


@pytest.mark.parametrize("name", ["t5", "vit", "bert", "gemma2", "opt", "gpt_neox"])
def test_a_plan_gives_what_one_device_gives(name: str) -> None:
    """Results and every gradient on all ranks of a mesh, for the best plan and for one under random costs.

    In float64: a key's bias has no gradient but rounding, and T5, whose scores are not scaled, multiplies rounding up.
    """
    run = Planned(in_float64(family_graph(name)), "dp=2,tp=2")
    values = values_for(run.graph)
    wanted = run_graph(run.graph, *values)
    for choices in (run.priced(), run.at_random(0)):
        assert run.kinds(choices)["S"]
        found = run_plan(run.space, run.shape, choices, run.pricing.routes, *values)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-8)


# ---- defaults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs", "kwargs"),
    [
        ("bert", [(torch.int64, (4, 16))], {}),
        ("vit", [(torch.bfloat16, (64, 4, 16, 16))], {}),
        ("t5", [], {"input_ids": (4, 512), "decoder_input_ids": (4, 512)}),
    ],
)
def test_inputs_are_made_up(name: str, inputs: list[Any], kwargs: dict[str, Any]) -> None:
    """Token ids, images as the config has them, or token ids for encoder and decoder."""
    made = AutoParallel(family(name), "dp=2,tp=2", device="H100")
    assert [(x.dtype, tuple(x.shape)) for x in made.inputs] == inputs
    assert {key: tuple(x.shape) for key, x in made.kwargs.items()} == kwargs
    sized = AutoParallel(family(name), "dp=2,tp=2", device="H100", batch=6)
    assert {x.shape[0] for x in (*sized.inputs, *sized.kwargs.values())} == {6}


def test_images_have_no_sequence_length() -> None:
    with pytest.raises(UsageError, match="seq is the length of token ids, but the model takes images"):
        AutoParallel(family("vit"), "dp=2", device="H100", seq=8)


def test_positions_behind_the_padding_id_are_not_counted() -> None:
    """RoBERTa's table has two rows more than the longest sequence."""
    config = {**FAMILIES["bert"], "model_type": "roberta", "architectures": None, "pad_token_id": 1}
    made = AutoParallel(build_from_config({**config, "max_position_embeddings": 18}), "dp=2", device="H100")
    assert made.inputs[0].shape == (4, 16)


def test_a_model_without_a_loss_says_so() -> None:
    """A causal language model gets one; another model's comes from outside, or from labels among its inputs."""
    assert family_graph("llama").notes == ()
    assert family_graph("vit").notes == (
        "no loss in the graph: the gradients of its results come from outside; pass labels to plan the model's own",
    )
    assert family_graph("bert-base").notes == ("no loss in the graph: the gradients of its results come from outside",)


def test_a_config_is_built_as_what_it_is_for(tmp_path: Path) -> None:
    """The class in `architectures`; without it, or where transformers does not have it, what the kind is for."""
    for name, change, built in [
        ("bert", {"architectures": None}, "BertForMaskedLM"),
        ("bert", {"architectures": None, "is_decoder": True}, "BertLMHeadModel"),
        ("bert", {"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification"),
        ("bert", {"architectures": ["MyOwnBert"]}, "BertForMaskedLM"),
        ("bert", {"architectures": ["LlamaForCausalLM"]}, "BertForMaskedLM"),
        ("t5", {"architectures": None}, "T5ForConditionalGeneration"),
        ("vit", {"architectures": None}, "ViTForImageClassification"),
        ("gpt_neox", {}, "GPTNeoXForCausalLM"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**FAMILIES[name], **change}))
        model = build_from_config(tmp_path, 3)
        assert type(model).__name__ == built
        assert is_causal_lm(model) == built.endswith(("CausalLM", "BertLMHeadModel"))
    model = build_from_config(FAMILIES["t5"], 3)
    assert [len(stack.block) for stack in (model.encoder, model.decoder)] == [3, 3]


def test_a_bidirectional_model_gets_no_causal_loss() -> None:
    """A BERT with a language model's head attends both ways unless its config makes it a decoder."""
    config = {**FAMILIES["bert"], "architectures": ["BertLMHeadModel"]}
    assert not is_causal_lm(build_from_config(config))
    assert is_causal_lm(build_from_config({**config, "is_decoder": True}))


def test_a_pooler_of_few_sequences_is_told_how_to_leave_it_out() -> None:
    """It sees one token a sequence, so the batch alone has to fit; nothing else of the model is in the way."""
    with pytest.raises(UsageError) as caught:
        planned_with(family("bert-base"), BATCH)
    assert caught.value.at == "pooler.dense (aten._scaled_mm.default, backward)"
    assert caught.value.do == (
        "its rows come from dim 0 of input_ids, 4: the smallest from here is 16; or leave the layer out of the "
        "conversion; or build the model with add_pooling_layer=False"
    )
    bare = family("bert-base")
    with torch.device("meta"):
        model = type(bare)(bare.config, add_pooling_layer=False).to(torch.bfloat16)
    assert planned_with(model, BATCH).nodes


def planned_with(model: Any, batch: int) -> Any:
    inputs = (torch.empty(batch, SEQ, dtype=torch.int64, device="meta"),)
    return AutoParallel(model, "dp=2", inputs=inputs, recipe="rowwise", device="H100").optimize()
