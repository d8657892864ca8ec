"""Mistakes in the library's arguments: each is an error of ours that says what, where and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoparallel_fp8 import AutoParallel, AutoParallelError, CaptureError, InfeasibleError, Plan, PlanError, UsageError
from autoparallel_fp8.capture import capture
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.ops.mx_linear import MXLinear

X = torch.empty(32, 64, device="meta")


class Net(nn.Module):
    """A linear whose forward is the function given."""

    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64, bias=False)
        self.register_buffer("seen", torch.zeros(64))
        self.act = act

    def forward(self, x: Tensor, option: Any = None) -> Any:
        return self.act(self, x)


def plain(net: Net, x: Tensor) -> Tensor:
    return net.lin(x)


def scaled_weight(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.lin.weight.mul_(0.9)
    return net.lin(x)


def scaled_data(net: Net, x: Tensor) -> Tensor:
    net.lin.weight.data.mul_(0.9)
    return net.lin(x)


def kept_mean(net: Net, x: Tensor) -> Tensor:
    net.seen.copy_(net.lin(x).mean(0))
    return net.lin(x)


def counted(net: Net, x: Tensor) -> None:
    net.seen.add_(1)


def planner() -> AutoParallel:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    return AutoParallel(model, "dp=2,tp=2", inputs=(X,), device="H100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": ("x",)}, "input 0 is a str, not a tensor\n  at: inputs"),
        ({"inputs": (X, np.zeros(3))}, "input 1 is a ndarray, not a tensor"),
        ({"inputs": (X, [X, object()])}, "input 1 holds a object, not a tensor"),
        ({"inputs": "text"}, "inputs is a str"),
        ({"inputs": X}, "inputs is a Tensor"),
        ({"inputs": (X,), "kwargs": [1]}, "kwargs is a list\n  at: kwargs"),
        ({"kwargs": [X]}, "kwargs is a list"),
        ({"inputs": (X,), "kwargs": {"option": np.zeros(3)}}, "keyword input 'option' is a ndarray"),
    ],
)
def test_inputs_that_cannot_be_planned_with(arguments: dict[str, Any], message: str) -> None:
    """Told when they are handed over, by position or name."""
    with pytest.raises(UsageError) as caught:
        AutoParallel(Net(plain), "dp=2", device="H100", **arguments)
    assert str(caught.value).startswith(message) and caught.value.do


@pytest.mark.parametrize("option", [None, 3, 2.5, True, [1, X], {"kind": "a"}])
def test_plain_values_stay_allowed(option: Any) -> None:
    """None, numbers and bools, in the tuple and by keyword; text by keyword."""
    for inputs, kwargs in (((X, option), {}), ((X,), {"option": option}), ((X,), {"option": "text"})):
        assert AutoParallel(Net(plain), "dp=2", inputs=inputs, kwargs=kwargs, device="H100").graph().outputs


@pytest.mark.parametrize("name", ["batch", "seq"])
def test_sizes_beside_example_inputs(name: str) -> None:
    """They would be ignored."""
    model = Net(plain)
    model.example_inputs = (X,)
    with pytest.raises(UsageError, match=f"but the model has example_inputs\n  at: {name}"):
        AutoParallel(model, "dp=2", device="H100", **{name: 4})


@pytest.mark.parametrize(
    ("returned", "shown"),
    [(None, "None"), ("loss", "a str"), (3, "a int"), ((), "a tuple"), ({"loss": None}, "a dict")],
)
def test_forward_without_a_tensor(returned: Any, shown: str) -> None:
    """There is nothing to plan."""
    with pytest.raises(CaptureError, match=f"forward returns no tensor, but {shown}\n  at: Net.forward\n  do: "):
        capture(Net(lambda net, x: returned), (X,))


def test_forward_with_an_effect_alone() -> None:
    """A buffer is written, nothing is returned."""
    with pytest.raises(CaptureError, match="forward returns no tensor, but None"):
        capture(Net(counted), (X,))


def test_none_among_tensors_is_fine() -> None:
    """What transformers returns where a cache is off."""
    graph = capture(Net(lambda net, x: (None, net.lin(x))), (X,))
    assert [output.target for output in graph.outputs if output.kind == "output"] == ["1"]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (scaled_weight, "forward changes its parameter in place\n  at: lin.weight\n  do: compute with a clone of it"),
        (scaled_data, "forward changes its parameter in place\n  at: lin.weight\n  do: compute with a clone of it"),
        (kept_mean, "forward changes its buffer in place\n  at: seen\n  do: write detached values into it"),
    ],
)
def test_changes_in_place_are_named(act: Callable[..., Any], message: str) -> None:
    """The parameter or buffer, and a cure."""
    with pytest.raises(CaptureError, match=message):
        capture(Net(act), (X,))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda p: p.pin(5, "R, R"), "5 is no name\n  at: pin"),
        (lambda p: p.pin("0.weight", 5), '5 is no placement\n  at: pin("0.weight")'),
        (lambda p: p.pin("0.weight", ["R", 5]), '5 is no placement\n  at: pin("0.weight")'),
        (lambda p: p.add_node_constraint(None, "R, R"), "None is no name\n  at: add_node_constraint"),
        (lambda p: p.add_node_constraint("mm", 5), '5 is no placement\n  at: add_node_constraint("mm")'),
        (lambda p: p.score({"0.weight": 5}), '5 is no placement\n  at: pin("0.weight")'),
        (lambda p: p.add_input_constraints("S(0), R"), "'S(0), R' is no list of placements\n  at: add_input_constr"),
        (lambda p: p.add_output_constraints("S(0), R"), "'S(0), R' is no list of placements\n  at: add_output_con"),
        (lambda p: p.add_input_constraints(None), "None is no list of placements"),
        (lambda p: p.add_input_constraints([3]), "3 is no placement\n  at: add_input_constraints, number 0"),
        (
            lambda p: p.add_parameter_memory_constraint("0", 1),
            "a parameter memory constraint from '0' to 1\n  at: add_p",
        ),
        (lambda p: p.add_parameter_memory_constraint(0, True), "a parameter memory constraint from 0 to True"),
        (lambda p: p.pin("0.*", "R").optimize(), "placement 'R' has 1 parts where the mesh has 2 axes\n  at: pin("),
        (
            lambda p: p.pin("0.weight", "R, X").optimize(),
            "'X' in 'R, X' is no placement\n  at: pin(\"0.weight\", \"R, X\")",
        ),
    ],
)
def test_constraints_of_the_wrong_form(ask: Callable[[AutoParallel], Any], message: str) -> None:
    """Names that are no text, placements that are none; the place is the call."""
    with pytest.raises(UsageError) as caught:
        ask(planner())
    assert str(caught.value).startswith(message) and caught.value.do


def test_a_glob_in_a_conflict_shows_pattern_and_parameter() -> None:
    """As the user wrote it, and what it was read as."""
    with pytest.raises(InfeasibleError) as caught:
        planner().pin("0.*", "R, R").pin("0.weight", "R, S(0)").optimize()
    assert 'pin("0.*", "R, R") on 0.weight, pin("0.weight", "R, S(0)")' in str(caught.value)


@pytest.fixture(scope="module")
def plan_data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(planner().optimize().to_json())
    return data


WRONG_FIELDS = [
    ("mesh", ["dp"], "mesh of the plan is a tuple that does not read as Mapping[str, int]"),
    ("mesh", {"dp": "2"}, "mesh of the plan"),
    ("step_time_us", 3, "step_time_us of the plan is a int"),
    ("step_time_us", {}, "step_time_us of the plan lacks compute, exposed_comm"),
    ("memory_bytes", {"total": 1}, "memory_bytes of the plan lacks parameters"),
    ("recipe", 3, "recipe of the plan is a int"),
    ("gap", "small", "gap of the plan is a str that does not read as float"),
    ("notes", "note", "notes of the plan is a str"),
    ("parameters", {"w": 3}, "parameters of the plan is no mapping of mappings"),
    ("parameters", None, "parameters of the plan is no mapping of mappings"),
    ("parameters", {"w": {"shape": [1]}}, "the plan does not have the fields"),
    ("nodes", 3, "nodes of the plan is no list of mappings"),
    ("model", None, "model of the plan is a NoneType that does not read as str"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_FIELDS)
def test_a_plan_file_with_wrong_types(plan_data: dict[str, Any], name: str, value: Any, message: str) -> None:
    """The field is named; so is one within a parameter."""
    with pytest.raises(PlanError) as caught:
        Plan.from_data({**plan_data, name: value}, "plan.json")
    assert str(caught.value).startswith(message) and caught.value.at == "plan.json" and caught.value.do


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"placements": ["S(0)", "S(1)"]},
            r"parameters\['0.weight'\] of the plan says S\(0\), S\(1\), and its node says ",
        ),
        ({"placements": ["S(9)", "R"]}, r"parameters\['0.weight'\] of the plan says S\(9\), R, and its node says "),
        ({"local_shape": [1, 1]}, r"parameters\['0.weight'\] of the plan is \[1, 1\] on a rank, and its node says "),
        (None, "parameters of the plan lacks 0.weight, which a node holds"),
    ],
)
def test_a_parameter_that_was_edited(plan_data: dict[str, Any], change: dict[str, Any] | None, message: str) -> None:
    """What runs stands in `nodes`; where `parameters` says otherwise, neither is believed."""
    parameters = dict(plan_data["parameters"])
    parameters["0.weight"] = {**parameters["0.weight"], **(change or {})}
    if change is None:
        del parameters["0.weight"]
    with pytest.raises(PlanError, match=message) as caught:
        Plan.from_data({**plan_data, "parameters": parameters}, "plan.json")
    assert caught.value.do == "the file was edited: plan again, and ask for a layout with pin(name, placement)"


@pytest.mark.parametrize(
    ("name", "value"), [("objective_us", 1.0), ("mesh", {"dp": 4}), ("recipe", "rowwise"), ("notes", ["mine"])]
)
def test_a_file_that_was_changed_since(plan_data: dict[str, Any], name: str, value: Any) -> None:
    """Said at once, and kept with the plan; another order or spaces are no change."""
    assert Plan.from_data(dict(reversed(plan_data.items()))).notes == tuple(plan_data["notes"])
    with pytest.warns(UserWarning, match="the plan file was changed after it was saved"):
        plan = Plan.from_data({**plan_data, name: value}, "plan.json")
    assert plan.notes[-1].startswith("the plan file was changed after it was saved")
    assert Plan.from_data(json.loads(plan.to_json())) == plan


def test_a_file_that_cannot_be_read(tmp_path: Path, plan_data: dict[str, Any]) -> None:
    """No file, half a file: what to do is said."""
    half = tmp_path / "half.json"
    half.write_text(json.dumps(plan_data)[:1000])
    for path, message in (
        (tmp_path / "absent.json", "cannot read the plan: "),
        (half, "the file is no JSON, or cut off"),
    ):
        with pytest.raises(PlanError, match=message) as caught:
            Plan.load(path)
        assert caught.value.do


def test_a_wrong_type_within_a_parameter(plan_data: dict[str, Any]) -> None:
    """Told with the parameter's name."""
    parameter = {**plan_data["parameters"]["0.weight"], "shape": 64}
    with pytest.raises(PlanError, match=r"parameters\['0.weight'\].shape of the plan is a int"):
        Plan.from_data({**plan_data, "parameters": {"0.weight": parameter}})


def test_a_right_plan_file_is_read(plan_data: dict[str, Any], tmp_path: Path) -> None:
    """What is written is read, and written again."""
    plan = Plan.from_data(plan_data)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan and str(plan)


@pytest.mark.parametrize("path", [None, 3])
def test_no_path(plan_data: dict[str, Any], path: Any) -> None:
    """Neither to load nor to save."""
    for act in (Plan.load, Plan.from_data(plan_data).save):
        with pytest.raises(UsageError, match=r"the path is a .*\n  at: path\n  do: "):
            act(path)


def test_an_error_of_ours_in_a_factory_stays_itself() -> None:
    """It has its own place and cure."""
    with pytest.raises(AutoParallelError, match="no preset is called 'absent'"):
        build(lambda: build("absent"))


@pytest.mark.parametrize("placements", [3, {5: "R"}, None])
def test_score_takes_names_and_placements(placements: object) -> None:
    planner = AutoParallel(nn.Linear(8, 8), "dp=2", inputs=(torch.empty(4, 8),), device="H100")
    with pytest.raises(UsageError, match="score"):
        planner.score(placements)  # type: ignore[arg-type]


# ---- sizes, dtypes and devices that a recipe does not take --------------------------------------------------------


class Two(nn.Module):
    """A layer that sees every token, and one that sees one token a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.every, self.pooler = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.every(x)
        return y, self.pooler(y[:, 0])


@pytest.mark.parametrize(
    ("model", "shape", "at", "rows"),
    [
        (lambda: nn.Linear(64, 64), (8, 64), "the model itself", "dim 0 of input, 8: the smallest from here is 16;"),
        (
            lambda: nn.Sequential(nn.Linear(64, 64)),
            (3, 10, 64),
            "0",
            "dims 0 x 1 of input, 3 x 10: the smallest from here is 3 x 16 (48 tokens);",
        ),
        (Two, (4, 32, 64), "pooler", "dim 0 of x, 4: the smallest from here is 16;"),
    ],
)
def test_rows_that_a_kernel_refuses_are_traced_to_the_input(
    model: Callable[[], nn.Module], shape: tuple[int, ...], at: str, rows: str
) -> None:
    """The layer, the input's dims that are its rows, and sizes that fit, with which it plans; features are no rows."""
    x = torch.empty(shape, device="meta")
    with pytest.raises(UsageError) as caught:
        AutoParallel(model(), "dp=2", inputs=(x,), recipe="rowwise", device="H100").optimize()
    assert caught.value.at == f"{at} (aten._scaled_mm.default, backward)"
    assert caught.value.do == f"its rows come from {rows} or leave the layer out of the conversion"
    legal = {(8, 64): (16, 64), (3, 10, 64): (3, 16, 64), (4, 32, 64): (16, 32, 64)}[shape]
    x = torch.empty(legal, device="meta")
    assert AutoParallel(model(), "dp=2", inputs=(x,), recipe="rowwise", device="H100").optimize().nodes


def test_mxfp8_names_the_model_whose_dtype_it_does_not_cast() -> None:
    """And what to call; under mixed precision the compute dtype counts."""
    model = build("llama3-debug", num_layers=1, dtype=torch.float16)
    with pytest.raises(UsageError) as caught:
        AutoParallel(model, "dp=2", recipe="mxfp8", device="B200", seq=64).graph()
    assert str(caught.value) == (
        "MXFP8 is cast from float32 or bfloat16, and the linears of the LlamaForCausalLM are float16\n"
        "  at: model.layers.0.self_attn.q_proj\n"
        "  do: plan model.to(torch.bfloat16), or mixed_precision with param_dtype=torch.bfloat16"
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert AutoParallel(model, "dp=2", recipe="mxfp8", device="B200", seq=64, mixed_precision=policy).graph().nodes


def test_a_converted_model_without_a_kernel_is_told_of_emulation() -> None:
    """MXFP8 weights of torchao on an H100."""
    model = nn.Sequential(MXLinear(64, 64, bias=False)).to(torch.bfloat16)
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(UsageError) as caught:
        AutoParallel(model, "dp=2", inputs=(x,), device="H100").optimize()
    message = 'h100 (sm90) has no kernel for recipe "mxfp8", which the model was converted to, as by torchao\n  at: 0'
    assert str(caught.value).startswith(message) and "with emulate=True (--emulate)" in str(caught.value.do)
    assert AutoParallel(model, "dp=2", inputs=(x,), device="H100", emulate=True).optimize().status == "optimal"


def test_a_recipe_that_converts_nothing_groups_layers_by_reason() -> None:
    """Some names, the others counted."""
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(40)), nn.Linear(12, 16))
    with pytest.raises(UsageError) as caught:
        AutoParallel(model, "dp=2", inputs=(torch.empty(16, 10),), recipe="rowwise", device="H100").graph()
    assert caught.value.message == (
        "recipe 'rowwise' converts nothing: 0, 1, 2 and 37 more (in_features 10 is not a multiple of 16); "
        "40 (in_features 12 is not a multiple of 16)"
    )


# ---- token ids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": [[1, 2]]}, "inputs[0] is a list, not a tensor of token ids\n  at: inputs\n  do: pass integers"),
        ({"kwargs": {"input_ids": [1]}}, "kwargs['input_ids'] is a list, not a tensor of token ids\n  at: kwargs"),
        ({"kwargs": {"input_ids": torch.zeros(4)}}, "input_ids is torch.float32 [4], not integers [batch, seq]"),
    ],
)
def test_token_ids_are_a_tensor_of_integers(arguments: dict[str, Any], message: str) -> None:
    """Told before the model is traced."""
    with pytest.raises(UsageError) as caught:
        AutoParallel(build("llama3-debug", num_layers=1), "dp=2", device="H100", **arguments).graph()
    assert str(caught.value).startswith(message)


def test_token_ids_by_keyword_have_a_loss_too() -> None:
    """The same graph as by position; none where it is not wanted."""
    model, ids = build("llama3-debug", num_layers=1), torch.zeros(4, 16, dtype=torch.int64)
    by_position = capture(model, (ids,))
    assert capture(model, (), kwargs={"input_ids": ids}) == by_position
    assert [o.target for o in by_position.outputs if o.kind == "output"] == ["loss"]
    silent = capture(model, (), kwargs={"input_ids": ids}, loss=None)
    assert [o.target for o in silent.outputs if o.kind == "output"] == ["logits"]


# ---- what is said, and where --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (AttributeError("'Config' object has no attribute 'size'"), "'Config' object has no attribute 'size'"),
        (ValueError("a 'quoted' word"), "a 'quoted' word"),
        (KeyError("size"), "size"),
    ],
)
def test_quotes_of_a_users_error_stay(error: Exception, shown: str) -> None:
    """Only those around the whole text go."""
    kind, text = type(error), error.args[0]

    def raises(net: Net, x: Tensor) -> Tensor:
        raise kind(text)

    with pytest.raises(CaptureError) as caught:
        capture(Net(raises), (X,))
    assert caught.value.message == f"the model cannot be traced: {kind.__name__}: {shown}"


@pytest.mark.parametrize("ask", [AutoParallel.optimize, lambda p: p.score({}), AutoParallel.space])
def test_the_warning_of_a_missing_rule_points_at_the_users_line(ask: Callable[[AutoParallel], Any]) -> None:
    """Not into the library, whichever call made the plan."""
    asked = AutoParallel(Net(lambda net, x: torch.triu(net.lin(x))), "dp=2", inputs=(X,), device="H100")

    def users_line() -> None:
        ask(asked)

    with pytest.warns(UserWarning, match=r"no rule for aten.triu.default: planned replicated") as caught:
        users_line()
    (line,) = {(w.filename, w.lineno) for w in caught}
    first = users_line.__code__.co_firstlineno
    is_lambda = ask.__name__ == "<lambda>"
    assert line == (__file__, ask.__code__.co_firstlineno if is_lambda else first + 1)


def test_notes_name_the_format_that_a_recipe_converts_to() -> None:
    """MXFP8 is not float8's recipes."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 48, bias=False)).to(torch.bfloat16)
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    for recipe, note in (("mxfp8", "note: not converted to MXFP8: 1 (out_features 48"), ("rowwise", None)):
        text = str(AutoParallel(model, "dp=2", inputs=(x,), recipe=recipe, device="B200").optimize())
        assert (note in text) if note else ("not converted" not in text)
