"""What is said of alternatives: intervals hold the exact regrets, files keep them, texts fold equal layers."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from autoparallel_fp8 import AutoParallel, Plan, PlanError
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.report.explain import format_overview


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))


def planner(mesh: str = "dp=2,tp=2", limit: int | None = None) -> AutoParallel:
    inputs = (torch.empty(32, 64, device="meta"),)
    return AutoParallel(perceptron(), mesh, inputs=inputs, device="H100", memory_limit=limit)


class TestIntervals:
    """Of every parameter at once, against a solve with the placement pinned."""

    @pytest.mark.parametrize("limit", [None, 330_000, 200_000])
    @pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
    def test_they_hold_the_exact_regrets(self, mesh: str, limit: int | None) -> None:
        """With a memory limit that does not bind, one that binds, and one near the least possible."""
        one = planner(mesh, limit)
        plan = one.optimize()
        for name, alternatives in plan.explain().alternatives.items():
            for a in alternatives:
                try:
                    exact = one.score({name: a.placements}).objective_us - plan.objective_us
                except Exception as error:
                    assert "memory" in str(error) and a.regret_us[1] == math.inf, (name, a)
                    continue
                assert a.regret_us[0] - 1e-3 <= exact <= a.regret_us[1] + 1e-3, (name, a, exact)

    def test_what_does_not_fit_is_proven_and_said(self) -> None:
        """A whole first weight takes 360,448 bytes with all that goes with it."""
        found = planner("dp=4", 330_000).optimize().explain().alternatives["0.weight"]
        notes = {a.placements: a.note for a in found if a.regret_us == (math.inf, math.inf)}
        assert notes == {"R": "no plan has it within the memory limit"}

    def test_one_layer_of_a_llama_in_float8(self) -> None:
        """Exact where asked for one, within the interval where asked for all; nearly all intervals are points."""
        model = build("llama3-debug", num_layers=1)
        plan = AutoParallel(model, "dp=2,tp=2", recipe="rowwise", device="H100").optimize()
        overview = plan.explain()
        widths = [a.regret_us[1] - a.regret_us[0] for found in overview.alternatives.values() for a in found]
        assert sum(width <= 1e-6 * plan.objective_us for width in widths) >= 0.9 * len(widths)
        for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
            exact = {a.placements: a for a in plan.explain(name).alternatives}
            for a in overview.alternatives[name]:
                low, high = a.regret_us
                assert (
                    low - 1e-3 <= exact[a.placements].regret_us[1] and exact[a.placements].regret_us[0] <= high + 1e-3
                )

    def test_what_a_wish_forbids_is_said(self) -> None:
        asked = planner().pin("0.weight", "R, S(0)").optimize().explain()
        notes = {a.placements: a.note for a in asked.alternatives["0.weight"] if not a.chosen}
        assert notes and all('forbidden by pin("0.weight", "R, S(0)")' in note for note in notes.values())
        assert all(not a.note for a in asked.alternatives["2.weight"])


class TestFile:
    """`plan.save(path, regrets=True)`."""

    def test_a_file_keeps_them_and_tells_them_without_the_model(self, tmp_path: Path) -> None:
        plan = planner().optimize()
        plan.save(tmp_path / "plan.json", regrets=True)
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded.alternatives == plan.with_regrets().alternatives
        assert loaded.to_json() == (tmp_path / "plan.json").read_text()
        assert len(format_overview(loaded.explain()).splitlines()) == 4
        others = loaded.alternatives["0.weight"]
        assert plan.parameters["0.weight"].placements not in {a.placements for a in others}
        assert all(a.regret_us is not None and 0.0 <= a.regret_us[0] <= a.regret_us[1] for a in others)

    def test_same_inputs_same_bytes(self) -> None:
        first, second = (planner().optimize().with_regrets().to_json() for _ in range(2))
        assert first == second

    def test_without_them_nothing_of_them_is_written(self) -> None:
        assert '"alternatives"' not in planner().optimize().to_json()

    @pytest.mark.parametrize("wrong", ["[1.0]", "[null, 1.0]", '"much"', "[1.0, 2.0, 3.0]"])
    def test_a_wrong_one_is_an_error_of_the_file(self, wrong: str, tmp_path: Path) -> None:
        plan = planner().optimize().with_regrets()
        text = plan.to_json()
        start = text.index('"regret_us": ') + len('"regret_us": ')
        end = text.index("]", start) + 1
        (tmp_path / "plan.json").write_text(text[:start] + wrong + text[end:])
        with pytest.raises(PlanError, match=r"alternatives\[0\].regret_us"):
            Plan.load(tmp_path / "plan.json")


def test_the_overview_has_a_line_for_equal_layers() -> None:
    plan = AutoParallel(build("llama3-debug", num_layers=2), "dp=2", device="H100").optimize()
    lines = str(plan.explain()).splitlines()
    assert lines[0].split() == ["parameter", "placement", "(dp)", "next", "best", "slower", "by", "alternatives"]
    assert sum("mlp.up_proj.weight" in line for line in lines) == 1
    assert any("model.layers.{0-1}.mlp.up_proj.weight" in line and " us" in line for line in lines)


def test_a_solve_never_says_less_than_the_interval() -> None:
    """Of one parameter, low and high are at least as close as where all are asked about."""
    plan = planner("dp=2,tp=2").optimize()
    overview = plan.explain()
    for name in ("0.weight", "2.weight"):
        asked = {a.placements: a.regret_us for a in plan.explain(name).alternatives}
        for a in overview.alternatives[name]:
            low, high = asked[a.placements]
            assert low >= a.regret_us[0] - 1e-3 and high <= a.regret_us[1] + 1e-3
