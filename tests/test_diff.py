"""The difference of two plans: what is in it, how it prints, and what the command line says of files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autoparallel_fp8 import AutoParallel, Plan, UsageError
from autoparallel_fp8.cli import main
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.plan_diff import diff


@pytest.fixture(scope="module")
def planner() -> AutoParallel:
    return AutoParallel(build("llama3-debug", num_layers=2), "dp=2,tp=2", device="H100")


@pytest.fixture(scope="module")
def plan(planner: AutoParallel) -> Plan:
    return planner.optimize()


@pytest.fixture(scope="module")
def pinned(planner: AutoParallel) -> Plan:
    return planner.score({"model.layers.*.mlp.up_proj.weight": "R, S(0)"})


def test_a_plan_is_the_same_as_itself_and_as_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    for other in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert not plan.diff(other)
    assert str(plan.diff(plan)) == "the plans are the same"


def test_what_a_pin_changes_is_listed(plan: Plan, pinned: Plan) -> None:
    found = plan.diff(pinned)
    assert found
    assert [(c.name, c.second) for c in found.settings if c.name.startswith("pin")] == [
        ("pin model.layers.*.mlp.up_proj.weight", "R, S(0)")
    ]
    assert {c.name for c in found.parameters} >= {f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)}
    assert found.step_time_us["total"] == (plan.step_time_us["total"], pinned.step_time_us["total"])
    assert found.memory_bytes["total"] == (plan.memory_bytes["total"], pinned.memory_bytes["total"])
    change = sum(t.second.us - t.first.us for t in found.collectives)
    assert change == pytest.approx(sum(c.us for c in pinned.collectives) - sum(c.us for c in plan.collectives))
    assert not any(change.name.endswith("proj.weight") for change in found.ops)  # parameters stand by themselves


def test_it_prints_equal_layers_in_one_line(plan: Plan, pinned: Plan) -> None:
    lines = str(plan.diff(pinned)).splitlines()
    assert any(line.split() == ["model.layers.{0-1}.mlp.up_proj.weight", "R,", "R", "R,", "S(0)"] for line in lines)
    assert any("of 21 parameters lie otherwise" in line for line in lines)
    tables = [
        line for line in lines if line.startswith(("setting", "step time", "memory", "parameter  ", "collective"))
    ]
    assert len(tables) == 5 and max(map(len, lines)) <= 120


def test_backwards_it_is_the_other_way_round(plan: Plan, pinned: Plan) -> None:
    there, back = plan.diff(pinned), pinned.diff(plan)
    assert [(c.name, c.second, c.first) for c in there.parameters] == [
        (c.name, c.first, c.second) for c in back.parameters
    ]
    assert {(t.kind, t.axis, t.dtype, t.second) for t in there.collectives} == {
        (t.kind, t.axis, t.dtype, t.first) for t in back.collectives
    }


def test_plans_of_other_meshes_and_depths_say_what_is_compared(plan: Plan) -> None:
    other = AutoParallel(build("llama3-debug", num_layers=1), "dp=4", device="H100").optimize()
    found = plan.diff(other)
    assert not found.parameters and not found.ops and found.step_time_us
    assert any("other axes, (dp, tp) and (dp)" in note for note in found.notes)
    assert any("only in the first" in note for note in found.notes)
    assert ("mesh", "dp=2, tp=2", "dp=4") in [(c.name, c.first, c.second) for c in found.settings]


def test_another_depth_on_the_same_mesh_compares_what_both_have(plan: Plan) -> None:
    shallow = AutoParallel(build("llama3-debug", num_layers=1), "dp=2,tp=2", device="H100").optimize()
    gone = [c for c in plan.diff(shallow).parameters if "layers.1." in c.name]
    assert len(gone) == 9 and all(c.second == "" and c.first for c in gone)


def test_rounding_of_a_file_is_no_difference(plan: Plan) -> None:
    times = {part: us * (1 + 1e-9) for part, us in plan.step_time_us.items()}
    assert not diff(plan, replace(plan, step_time_us=times))
    assert diff(plan, replace(plan, step_time_us={**times, "total": times["total"] * 1.001}))


def test_only_plans_and_files_are_compared(plan: Plan) -> None:
    with pytest.raises(UsageError, match="the other plan is a int"):
        plan.diff(3)  # type: ignore[arg-type]


class TestCommand:
    """`autoparallel-fp8 diff A B`: exit codes as diff's."""

    @pytest.fixture(scope="class")
    @classmethod
    def files(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
        folder = tmp_path_factory.mktemp("plans")
        model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 64, bias=False))
        planner = AutoParallel(model, "dp=4", inputs=(torch.empty(32, 64, device="meta"),), device="H100")
        planner.optimize().save(folder / "a.json")
        planner.score({"0.weight": "S(0)"}).save(folder / "b.json")
        return str(folder / "a.json"), str(folder / "b.json")

    def test_same_and_different(self, files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["diff", files[0], files[0]]) == 0
        assert capsys.readouterr().out == "the plans are the same\n"
        assert main(["diff", *files]) == 1
        assert "0.weight" in capsys.readouterr().out

    def test_json(self, files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["diff", "--json", *files]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["is_same"] is False and found["parameters"][0]["name"] == "0.weight"

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            (None, "cannot read the plan"),
            ("no json", "the file is no JSON"),
            ('{"model_type": "llama"}', "the file holds no plan"),
            ('{"version": 99}', "plan version 99, but this library reads version 1"),
            ('{"version": 1}', "the plan lacks"),
        ],
    )
    def test_no_plan(
        self, text: str | None, says: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wrong = tmp_path / "wrong.json"
        if text is not None:
            wrong.write_text(text)
        for pair in ((files[0], str(wrong)), (str(wrong), files[0])):
            assert main(["diff", *pair]) == 2
            out, err = capsys.readouterr()
            assert out == "" and err.startswith(f"error: {says}") and str(wrong) in err
