"""Mistakes in the library's arguments: each is an error of ours that says what, where and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoparallel_fp8 import AutoParallel, AutoParallelError, CaptureError, InfeasibleError, Plan, PlanError, UsageError
from autoparallel_fp8.capture import capture
from autoparallel_fp8.models.presets import build

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
    ("parameters", {"w": 3}, "the plan does not have the fields"),
    ("nodes", 3, "the plan does not have the fields"),
    ("model", None, "model of the plan is a NoneType that does not read as str"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_FIELDS)
def test_a_plan_file_with_wrong_types(plan_data: dict[str, Any], name: str, value: Any, message: str) -> None:
    """The field is named; so is one within a parameter."""
    with pytest.raises(PlanError) as caught:
        Plan.from_data({**plan_data, name: value}, "plan.json")
    assert str(caught.value).startswith(message) and caught.value.at == "plan.json"


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
