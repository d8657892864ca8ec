"""The form of a plan that is written by hand: what it says, where it puts parameters, and that it trains the same."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dtensor_ranks import failures_on_ranks
from test_cli import SMALL, run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from autoparallel_fp8 import AutoParallel, Plan
from autoparallel_fp8.models.presets import build, preset_config

LAYERS, BATCH, SEQ = 2, 8, 32
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
ELEMENTS = 1e-4  # of the norm: float32 sums in another order


# ---- plans that people write by hand ---------------------------------------------------------------------------------


def of_layers(names: Mapping[str, str]) -> dict[str, str]:
    return {f"model.layers.{i}.{name}": layout for i in range(LAYERS) for name, layout in names.items()}


def tensor_parallel(stored: str, product: str = "mm") -> dict[str, str]:
    """Megatron's split over tp, its sequence parallelism, batches over dp; parameters lie so over dp.

    Args:
        stored: placement over dp.
        product: name of the GEMMs in layers.
    """
    return {
        "model.embed_tokens.weight": f"{stored}, S(0)",
        "lm_head.weight": f"{stored}, S(0)",
        "*norm.weight": f"{stored}, R",
        **of_layers({f"{name}.weight": f"{stored}, S(0)" for name in COLUMNS}),
        **of_layers({f"{name}.weight": f"{stored}, S(1)" for name in ROWS}),
        **of_layers({f"{name}.{product}": "S(0), S(1)" for name in COLUMNS}),
        **of_layers({f"{name}.{product}": "S(0), P(sum)" for name in ROWS}),
        **of_layers({f"{name}.mul_2": "S(0), S(1)" for name in NORMS}),
        **of_layers(dict.fromkeys(("add", "add_2", "self_attn.attention"), "S(0), S(1)")),
        "model.embed_tokens.embedding": "S(0), P(sum)",
        **dict.fromkeys(("model.norm.mul_2", "lm_head.mm", "_to_copy"), "S(0), S(1)"),
    }


def data_parallel(tokens: str, stored: Mapping[str, str]) -> dict[str, str]:
    """Nothing but tokens is split in the products."""
    products = [*(f"{name}.mm" for name in (*COLUMNS, *ROWS)), "self_attn.attention"]
    norms = {f"{name}.mul_2": tokens for name in NORMS}
    rest = dict.fromkeys(("model.embed_tokens.embedding", "model.norm.mul_2", "lm_head.mm", "_to_copy"), tokens)
    return {**stored, **of_layers({**dict.fromkeys(products, tokens), **norms}), **rest}


HYBRID = {  # attention repeated over dp, one weight on another dim, small ones whole, the head over one axis
    "*self_attn*weight": "R, S(0)",
    "*gate_proj.weight": "S(0), S(0)",
    "*up_proj.weight": "S(0), S(0)",
    "*down_proj.weight": "S(1), S(1)",
    "*norm.weight": "R, R",
    "model.embed_tokens.weight": "S(1), S(1)",
    "lm_head.weight": "S(0), R",
}
OUTSIDE = {  # a column and a row with whole linears between them; the embedding by features
    **tensor_parallel("S(0)"),
    "model.embed_tokens.weight": "S(0), S(1)",
    "model.embed_tokens.embedding": "S(0), S(2)",
    **of_layers({"self_attn.k_proj.weight": "S(0), R", "self_attn.k_proj.mm": "S(0), R"}),
}


@cache
def planner(mesh: str, recipe: str | None = None) -> AutoParallel:
    model = build("llama3-debug", num_layers=LAYERS)
    return AutoParallel(model, mesh, batch=BATCH, seq=SEQ, device="H100", recipe=recipe)


PLANS: dict[str, Callable[[], Plan]] = {
    "tensor": lambda: planner("dp=2,tp=2").score(tensor_parallel("R")),
    "tensor in fsdp": lambda: planner("dp=2,tp=2").score(tensor_parallel("S(0)")),
    "fsdp": lambda: planner("dp=4").score(data_parallel("S(0)", {"*.weight": "S(0)"})),
    "hybrid": lambda: planner("dp=2,tp=2").score(data_parallel("S(0), S(0)", HYBRID)),
    "outside": lambda: planner("dp=2,tp=2").score(OUTSIDE),
    "chosen": lambda: planner("dp=2,tp=2").optimize(),
    "recomputed": lambda: with_settings(plan_of("tensor in fsdp"), recompute="full"),
    "selective": lambda: with_settings(plan_of("tensor"), recompute="selective"),
    "tensorwise": lambda: planner("dp=2,tp=2", "tensorwise").score(tensor_parallel("S(0)", "_scaled_mm")),
}


@cache
def plan_of(name: str) -> Plan:
    """Made when a test asks for it."""
    return PLANS[name]()


def with_settings(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, settings={**plan.settings, **changes})


def head_of(text: str) -> str:
    """The comments before the code, in one line a sentence."""
    lines = [line.removeprefix("#") for line in text.split("\n\n")[0].splitlines()]
    return re.sub(r"\n {3,}(?! *\S+: )", " ", "\n".join(lines))


def noted(text: str) -> dict[str, tuple[str, str]]:
    """Parameter -> its placement in the plan and here, of those that the head says lie otherwise."""
    found = {}
    for pattern, there, here in re.findall(r"^ {3}(\S+): (.+) -> (.+)$", head_of(text), re.MULTILINE):
        for name in expanded(pattern):
            found[name] = there, here
    return found


def expanded(pattern: str) -> Iterator[str]:
    match = re.search(r"\{([\d,-]+)\}", pattern)
    for part in match[1].split(",") if match else ():
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield pattern.replace(match[0], str(number))
    if not match:
        yield pattern


def module_of(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "parallelized", "exec"), names)
    return names


# ---- the text --------------------------------------------------------------------------------------------------------


def test_the_text_is_code_that_only_the_plans_data_decides(tmp_path: Path) -> None:
    """It compiles, a plan read from a file has the same, lines are short, and no name is imported for nothing."""
    for name in PLANS:
        plan = plan_of(name)
        text = plan.to_parallelize()
        assert callable(module_of(text)["parallelize"]), name
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json").to_parallelize() == text
        assert max(map(len, text.splitlines())) <= 120
        tree = list(ast.walk(ast.parse(text)))
        imported = {
            alias.name for node in tree if isinstance(node, ast.ImportFrom | ast.Import) for alias in node.names
        }
        assert imported == imported & {node.id for node in tree if isinstance(node, ast.Name)}, name


@pytest.mark.parametrize("name", ["fsdp", "tensor", "tensor in fsdp"])
def test_what_people_write_comes_back_as_they_write_it(name: str) -> None:
    """FSDP2 over one axis, and Megatron's tensor and sequence parallelism: no parameter lies otherwise."""
    text = plan_of(name).to_parallelize()
    assert "Every parameter lies as in the plan." in text and not noted(text)
    calls = {"fsdp": (3 + LAYERS, 0), "tensor": (0, 3 + LAYERS), "tensor in fsdp": (3 + LAYERS, 0)}
    loop = LAYERS - 1  # one call in a loop
    assert (text.count(" fully_shard("), text.count(" replicate(")) == tuple(max(n - loop, 0) for n in calls[name])
    if name != "fsdp":
        assert text.count("SequenceParallel()") == 3 and "loss_parallel()" in head_of(text)
        assert text.count("= ColwiseParallel(") == 6 and text.count("= RowwiseParallel(") == 3


def test_every_parameter_that_lies_otherwise_is_named() -> None:
    """Whole ones that are split with their group, axes in another order, a head on one axis alone."""
    found = noted(plan_of("hybrid").to_parallelize())
    orders = "(dim 0 by tp then dp)", "(dim 0 by dp then tp)"
    assert found["model.layers.1.input_layernorm.weight"] == ("R, R", f"S(0), S(0) {orders[1]}")
    assert found["model.layers.0.mlp.up_proj.weight"] == tuple(f"S(0), S(0) {order}" for order in orders)
    assert not any("self_attn" in name for name in found)
    assert found["lm_head.weight"] == ("S(0), R", f"S(0), S(0) {orders[1]}")
    here = "S(1), S(1) (dim 1 by dp then tp)"  # the dim is the plan's
    assert found["model.embed_tokens.weight"][1] == found["model.layers.1.mlp.down_proj.weight"][1] == here


def test_columns_and_rows_outside_a_block_stand_alone() -> None:
    """A whole linear among the columns: heads would not fit together, so each gathers or cuts for itself."""
    text = plan_of("outside").to_parallelize()
    assert 'self_attn.q_proj"] = ColwiseParallel(output_layouts=Replicate())' in text
    assert re.search(r'self_attn.o_proj"\] = RowwiseParallel\(\s*input_layouts=Replicate\(\)', text)
    assert 'mlp.gate_proj"] = ColwiseParallel()' in text
    assert "q_proj, model.layers.{0-1}.self_attn.v_proj: split over tp outside a block" in head_of(text)


def test_a_block_passes_heads_alone() -> None:
    """Attention that runs whole, or split otherwise than over heads, takes no local columns; an MLP has none."""
    plan = plan_of("tensor")
    nodes = (replace(n, inputs=("S(0), R",) * 3) if n.name.endswith("self_attn.attention") else n for n in plan.nodes)
    text = replace(plan, nodes=tuple(nodes)).to_parallelize()
    assert text.count("ColwiseParallel(output_layouts=Replicate())") == 3
    assert 'mlp.gate_proj"] = ColwiseParallel()' in text


def with_reasons(plan: Plan, reasons: Mapping[str, str]) -> Plan:
    """The plan with another `why` of parameters whose name ends so."""
    changed = {}
    for name, parameter in plan.parameters.items():
        why = next((why for end, why in reasons.items() if name.endswith(end)), parameter.why)
        changed[name] = replace(parameter, why=why)
    return replace(plan, parameters=changed)


def test_float8_gathers_are_all_or_nothing() -> None:
    """Most weights decide, the others are named; and a recipe that torchao gathers in bf16 says so of all."""
    low, high = "gathered in float8_e4m3fn over dp (fwd, bwd)", "gathered in bfloat16 over dp (fwd)"
    ends = ("_proj.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight")
    base = with_reasons(plan_of("tensorwise"), dict.fromkeys(ends, low))
    assert "enable_fsdp_float8_all_gather=True" in base.to_parallelize()
    assert "in float8 here" not in head_of(base.to_parallelize())
    mixed = with_reasons(base, {"q_proj.weight": high}).to_parallelize()
    assert "q_proj.weight: gathered in float8 here, in more in the plan" in head_of(mixed)
    assert "q_proj.weight: kept for backward in the plan" in head_of(mixed)
    few = with_reasons(base, dict.fromkeys((f"{name}.weight" for name in COLUMNS), high))
    assert "enable_fsdp_float8_all_gather" not in few.to_parallelize()
    assert "o_proj.weight, model.layers.{0-1}.mlp.down_proj.weight: gathered in float8 in the plan, in more here" in (
        head_of(few.to_parallelize())
    )
    rowwise = head_of(replace(base, recipe="rowwise").to_parallelize())
    assert "gathered in float8 in the plan, in more here (torchao: tensorwise scales alone)" in rowwise


def test_precision_and_recomputation() -> None:
    """`MixedPrecisionPolicy` as it was given; layers in checkpoints, which keep products where the plan does."""
    settings = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "cast_forward_inputs": False}
    plan = plan_of("fsdp")
    text = with_settings(plan, mixed_precision=settings).to_parallelize()
    words = "param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False"
    assert f"policy = MixedPrecisionPolicy({words})" in text and text.count("mp_policy=policy") == 4
    assert 'wrap(model, f"model.layers.{i}")' in plan_of("recomputed").to_parallelize()
    kept = module_of(plan_of("selective").to_parallelize())["KEPT"]
    assert torch.ops.aten.mm.default in kept and torch.ops.aten._scaled_dot_product_flash_attention.default in kept
    float8 = module_of(with_settings(plan_of("tensorwise"), recompute="selective").to_parallelize())["KEPT"]
    assert torch.ops.aten._scaled_mm.default in float8


def test_the_batch_and_the_tokens_that_the_form_asks_for() -> None:
    """Sequences split in the plan are not here, so that more of them are needed."""
    plan = replace(plan_of("hybrid"), inputs={"inputs[0]": "int64 [6, 32]"})
    assert "use a multiple of 4 sequences; the plan had 6" in head_of(plan.to_parallelize())
    nodes = [
        replace(n, output=tuple(re.sub(r"^S\(0\), S\(0\)$", "S(0), S(1)", o) for o in n.output)) for n in plan.nodes
    ]
    split = replace(plan, nodes=tuple(nodes)).to_parallelize()
    assert "The plan splits sequences over tp" in head_of(split) and "sequences" not in head_of(
        plan_of("fsdp").to_parallelize()
    )


def test_a_scalar_parameter_is_left_out_of_the_groups() -> None:
    """`fully_shard` refuses it; the head says who reduces its gradient."""
    plan = plan_of("fsdp")
    scalar = replace(plan.parameters["model.norm.weight"], shape=(), placements=("R",), split={}, local_shape=())
    text = replace(plan, parameters={**plan.parameters, "model.gate": scalar}).to_parallelize()
    assert text.count("ignored_params=scalars") == 4 and "('model.gate',)" in text
    assert "model.gate: fully_shard takes no scalars; reduce their gradients over dp" in head_of(text)


def test_names_of_a_model_do_not_end_a_comment() -> None:
    """What stands in a plan goes into comments and strings, never into code."""
    plan = replace(
        plan_of("tensorwise"), model='x"""\nraise SystemExit', skipped={"lm_head": 'no\nraise SystemExit("x")'}
    )
    module_of(plan.to_parallelize())


# ---- conversion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "marker"), [("tensorwise", "Float8Linear"), ("mxfp8", "MXFP8")])
def test_the_same_linears_are_converted(recipe: str, marker: str) -> None:
    """All but the head, by torchao's own functions."""
    plan = plan_of("tensorwise")
    plan = with_settings(replace(plan, recipe=recipe), emulate=recipe == "mxfp8")
    model = module_of(plan.to_parallelize())["convert"](made())
    found = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and marker in f"{type(module).__name__} {type(module.weight.data).__name__}"
    }
    linears = {name.removesuffix(".weight") for name in plan.parameters if name.endswith("_proj.weight")}
    assert found == linears and set(plan.skipped) == {"lm_head"}


# ---- on ranks --------------------------------------------------------------------------------------------------------


def made() -> nn.Module:
    """The small Llama, with gains that differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**preset_config("llama3-debug"), "num_hidden_layers": LAYERS}))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def step(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The mean loss, after its backward pass."""
    logits = model(input_ids=tokens, use_cache=False).logits
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        loss.backward()
    return whole(loss.detach())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_plans(folder: str, names: list[str]) -> list[str]:
    """Of each plan in the folder: parameters lie as the head says, loss and gradients are the unsharded model's."""
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, 2256, (2, BATCH, SEQ)).unbind()
    reference = made()
    expected = step(reference, tokens, labels)
    failures = []
    for name in names:
        plan = Plan.load(f"{folder}/{name}.json")
        text = plan.to_parallelize()
        module = module_of(text)
        mesh = module["make_mesh"]("cpu")
        place = dict(zip(plan.mesh, mesh.get_coordinate(), strict=True))
        model = module["parallelize"](made(), mesh)
        failures += [f"{name}: {sentence}" for sentence in misplaced(plan, text, model, reference, place)]
        axes = [axis for axis in plan.mesh if not (axis == "tp" and "def tensor_parallel" in text)]
        mine = [cut(t, {"0": axes}, plan.mesh, place) for t in (tokens, labels)]
        loss = step(model, *mine).clone()
        dist.all_reduce(loss)
        if not torch.allclose(loss / dist.get_world_size(), expected, rtol=1e-5):
            failures.append(f"{name}: loss {loss / dist.get_world_size()} instead of {expected}")
        for parameter, made_one in named(model).items():
            want = named(reference)[parameter].grad
            error = (whole(made_one.grad) - want).norm() / want.norm()
            failures += [] if error < ELEMENTS else [f"{name}: gradient of {parameter} is {error:.1e} off"]
    return failures


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}


def misplaced(plan: Plan, text: str, model: nn.Module, reference: nn.Module, place: Mapping[str, int]) -> Iterator[str]:
    """Parameters of which this rank does not hold the part that the head, or else the plan, says."""
    said = noted(text)
    found = named(model)
    for name, parameter in plan.parameters.items():
        split: Mapping[str, Any] = parameter.split
        if name in said:
            split = split_of(said[name][1], list(plan.mesh))
        part = cut(named(reference)[name], split, plan.mesh, place)
        held = found[name].to_local() if isinstance(found[name], DTensor) else found[name]
        if split and not isinstance(found[name], DTensor):
            yield f"{name} is no DTensor"
        if held.shape != part.shape or not torch.equal(held, part):
            yield f"{name} is not split by {split}"


def split_of(text: str, axes: list[str]) -> dict[str, list[str]]:
    """dim -> axes, major to minor, of a placement as the head has it."""
    orders = {dim: axes_text.split(" then ") for dim, axes_text in re.findall(r"dim (\d) by ([\w ]+)", text)}
    found: dict[str, list[str]] = {}
    for axis, placement in zip(axes, text.partition(" (")[0].split(", "), strict=True):
        if placement != "R":
            found.setdefault(placement[2:-1], []).append(axis)
    return {**found, **orders}


def cut(tensor: Tensor, split: Mapping[str, Any], sizes: Mapping[str, int], place: Mapping[str, int]) -> Tensor:
    for dim, axes in split.items():
        for axis in axes:
            tensor = tensor.chunk(sizes[axis], int(dim))[place[axis]]
    return tensor


def test_the_text_trains_as_the_unsharded_model(tmp_path: Path) -> None:
    """On four ranks: loss and every gradient, and every part of every parameter."""
    names = [name for name in PLANS if plan_of(name).recipe is None]
    for name in names:
        plan_of(name).save(tmp_path / f"{name}.json")
    assert not failures_on_ranks(check_plans, 4, tmp_path, str(tmp_path), names)


# ---- the command line ------------------------------------------------------------------------------------------------


def test_the_command_writes_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """To a file beside the table, or to standard output alone; not two texts to one place."""
    code, out, err = run(capsys, "plan", *SMALL, "--parallelize", str(tmp_path / "by_hand.py"))
    assert (code, err) == (0, "") and "memory a device" in out
    text = (tmp_path / "by_hand.py").read_text()
    assert "parallelize" in module_of(text)
    json_file = tmp_path / "plan.json"
    code, out, _ = run(capsys, "plan", *SMALL, "--parallelize", "-", "--json", str(json_file))
    assert (code, out) == (0, text) and json.loads(json_file.read_text())["status"] == "optimal"
    code, out, err = run(capsys, "plan", *SMALL, "--parallelize", "-", "--json", "-")
    assert code == 2 and out == "" and "two texts would go to standard output" in err
    code, _, err = run(capsys, "plan", *SMALL, "--parallelize", str(tmp_path / "none" / "by_hand.py"))
    assert code == 2 and "there is no folder" in err
