"""The plans people write by hand: what is held of each, that the chosen one is never slower, and how it prints."""

import itertools

import pytest
import torch
from test_golden import CASES
from torch import nn

from autoparallel_fp8 import AutoParallel, Plan
from autoparallel_fp8.by_hand import plans_by_hand, roles_of
from autoparallel_fp8.cli import main
from autoparallel_fp8.compare import Comparison, differences
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.plan_reading import read_plan

NAMES = ["DDP", "FSDP", "HSDP", "TP + SP", "FSDP x TP"]


def perceptron(features: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(64, features, bias=False), nn.ReLU(), nn.Linear(features, 64, bias=False))


def small(mesh: str = "dp=2,tp=2", features: int = 256, **settings: object) -> AutoParallel:
    inputs = (torch.empty(32, 64, device="meta"),)
    return AutoParallel(perceptron(features), mesh, inputs=inputs, device="H100", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "recipe", "mesh"), CASES)
def test_the_chosen_plan_is_never_slower(model: str, recipe: str | None, mesh: str) -> None:
    """Over the golden set; every style of a Llama can be written where the batch divides."""
    planner = AutoParallel(build(model, num_layers=1), mesh, recipe=recipe, device="H100", name=model)
    plan = planner.optimize()
    found = planner.compare(plan)
    assert found.chosen is plan and [one.name for one in found.others] == NAMES
    made = [one.plan for one in found.others if one.plan is not None]
    assert made
    assert all(plan.objective_us <= other.objective_us * (1 + 1e-6) for other in made)
    for one in found.others:
        assert one.plan is not None or "one axis" in one.why or "does not split" in one.why, one


class TestLlama:
    """Two axes, a batch that divides: all five."""

    @pytest.fixture(scope="class")
    @classmethod
    def planner(cls) -> AutoParallel:
        return AutoParallel(build("llama3-debug", num_layers=1), "dp=2,tp=2", batch=8, device="H100")

    @pytest.fixture(scope="class")
    @classmethod
    def comparison(cls, planner: AutoParallel) -> Comparison:
        return planner.compare()

    @pytest.fixture(scope="class")
    @classmethod
    def plans(cls, comparison: Comparison) -> dict[str, Plan]:
        return {one.name: one.plan for one in comparison.others if one.plan is not None}

    def test_columns_and_rows_follow_from_the_graph(self, planner: AutoParallel) -> None:
        roles = roles_of(planner.graph(), read_plan(planner.optimize()))
        rows = {name.rpartition(".")[2] for name, role in roles.items() if role == "row"}
        assert rows == {"o_proj", "down_proj"}
        assert {name.rpartition(".")[2] for name in roles} - rows == {
            "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("name", "up", "down", "norm"),
        [
            ("DDP", "R, R", "R, R", "R, R"),
            ("FSDP", "S(0), S(0)", "S(0), S(0)", "S(0), S(0)"),
            ("HSDP", "R, S(0)", "R, S(0)", "R, S(0)"),
            ("TP + SP", "R, S(0)", "R, S(1)", "R, R"),
            ("FSDP x TP", "S(0), S(0)", "S(0), S(1)", "S(0), R"),
        ],
    )
    def test_where_parameters_lie(self, plans: dict[str, Plan], name: str, up: str, down: str, norm: str) -> None:
        layer = "model.layers.0"
        parts = ("mlp.up_proj", "mlp.down_proj", "input_layernorm")
        found = [", ".join(plans[name].parameters[f"{layer}.{part}.weight"].placements) for part in parts]
        assert found == [up, down, norm]

    def test_data_parallel_plans_move_no_activations_in_the_layers(self, plans: dict[str, Plan]) -> None:
        """DDP reduces gradients and nothing else there; FSDP gathers parameters and reduces gradients."""
        for name, kinds in (("DDP", {"all_reduce"}), ("FSDP", {"all_gather", "reduce_scatter", "all_reduce"})):
            moved = [c for c in plans[name].collectives if "layers.0" in c.tensor]
            assert {c.kind for c in moved} <= kinds and all(c.hidden for c in moved), name

    def test_tensor_parallel_gathers_and_scatters_tokens(self, plans: dict[str, Plan]) -> None:
        moved = {(c.kind, c.axis) for c in plans["TP + SP"].collectives if "layers.0" in c.tensor and not c.hidden}
        assert {("all_gather", "tp"), ("reduce_scatter", "tp")} <= moved

    def test_it_prints_within_eighty_columns(self, comparison: Comparison) -> None:
        lines = str(comparison).splitlines()
        assert lines[0].split() == ["plan", "step", "compute", "exposed", "hidden", "memory", "slower", "by"]
        assert [line.split("  ")[0] for line in lines[2:8]] == ["chosen", *NAMES]
        assert max(map(len, lines)) <= 80

    def test_differences_are_those_of_the_collectives(self, comparison: Comparison, plans: dict[str, Plan]) -> None:
        found = differences(comparison.chosen, plans["FSDP"])
        assert found and all(abs(a.us) >= abs(b.us) for a, b in itertools.pairwise(found))
        assert differences(comparison.chosen, comparison.chosen) == ()


def test_a_plan_that_does_not_fit_says_what_it_needs() -> None:
    """DDP holds every parameter whole; at a limit below that it is priced all the same."""
    ddp = small("dp=4").compare().others[0]
    assert ddp.plan is not None and not ddp.needs
    limit = ddp.plan.memory_bytes["total"] - 10_000
    comparison = small("dp=4", memory_limit=limit).compare()
    over = comparison.others[0]
    assert over.plan is not None and limit < over.needs <= ddp.plan.memory_bytes["total"]
    assert comparison.chosen.memory_bytes["total"] <= limit
    assert "note: DDP: does not fit: needs" in str(comparison)


def test_wishes_hold_for_the_others_too() -> None:
    """A pin that a style contradicts leaves it out, with the pin's name."""
    planner = small()
    planner.pin("0.weight", "S(1), S(1)")
    others = {one.name: one for one in planner.compare().others}
    assert others["FSDP"].plan is None and 'pin("0.weight"' in others["FSDP"].why


def test_what_does_not_divide_stays_whole() -> None:
    others = {one.name: one for one in small(features=66).compare().others}
    fsdp = others["FSDP"]
    assert fsdp.plan is not None and fsdp.whole == ("0.weight",)
    assert fsdp.plan.parameters["0.weight"].placements == ("R", "R")


def test_a_model_without_linears_in_a_row_has_no_tensor_parallel_plan() -> None:
    model = nn.Linear(64, 64, bias=False)
    planner = AutoParallel(model, "dp=2,tp=2", inputs=(torch.empty(32, 64, device="meta"),), device="H100")
    written = {one.name: one for one in plans_by_hand(planner.space(), read_plan(planner.optimize()))}
    assert written["TP + SP"].constraints is None and "no linear" in written["TP + SP"].why


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama3-debug", "--layers", "1", "--mesh", "dp=2,tp=2", "--quiet", "--compare"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "chosen" in out and "FSDP x TP" in out and "where the difference lies" in out
    assert main([*command, "--json", "-"]) == 2
    assert "two texts" in capsys.readouterr().err
