"""A plan from a file is made live again as it was, or says what became of it; a live one goes to another batch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from autoparallel_fp8.cost_models import load_device
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoparallel_fp8 import AutoParallel, Plan, PlanError, Topology, api
from autoparallel_fp8.cli import main
from autoparallel_fp8.input_text import describe, describe_inputs, parse_inputs
from autoparallel_fp8.models.presets import build, preset_config
from autoparallel_fp8.plan_argument import plan_in
from autoparallel_fp8.restore import restore, with_inputs

pytestmark = pytest.mark.usefixtures("one_thread")

FP32_MASTERS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def llama(num_layers: int = 1, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return build("llama3-debug", num_layers=num_layers, dtype=dtype)


def planned(mesh: str = "dp=2,tp=2", model: nn.Module | None = None, **options: Any) -> Plan:
    options = {"device": "H100", "batch": 8, "seq": 2048, **options}
    return AutoParallel(model or llama(), mesh, **options).optimize()


def from_file(plan: Plan, folder: Path) -> Plan:
    plan.save(folder / "plan.json")
    return Plan.load(folder / "plan.json")


def no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    def solved(*args: Any) -> Any:
        raise AssertionError("something was solved")

    monkeypatch.setattr(api, "solve_step", solved)


def tokens(batch: int, seq: int = 2048) -> Tensor:
    return torch.empty(batch, seq, dtype=torch.int64, device="meta")


class TestSameGraph:
    @pytest.mark.parametrize(
        ("mesh", "options"),
        [
            ("dp=4", {}),
            ("dp=2,tp=2", {}),
            ("dp=2,tp=2", {"recipe": "tensorwise", "recompute": "selective"}),
            ("dp=2,tp=2", {"recipe": "rowwise", "scale_scope": "global"}),
            ("dp=2,tp=2", {"recipe": "mxfp8", "device": "B200"}),
            ("tp=4", {"recipe": "mxfp8", "emulate": True, "loss": None, "optimizer": 4.0, "memory_limit": "8 GiB"}),
            ("dp=2,tp=2", {"mixed_precision": FP32_MASTERS, "strict": True, "topology": Topology(gpus_per_node=4)}),
        ],
    )
    def test_every_choice_comes_back(
        self, mesh: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Objective, collectives and bytes as in the file, with no solver; the same choices."""
        dtype = torch.float32 if "mixed_precision" in options else torch.bfloat16
        plan = planned(mesh, llama(dtype=dtype), **options)
        loaded = from_file(plan, tmp_path)
        no_solver(monkeypatch)
        restored = restore(loaded, llama(dtype=dtype))
        assert restored.to_json() == plan.to_json()
        assert plan.live is not None and restored.live is not None
        assert restored.live.choices == plan.live.choices

    def test_a_plan_that_is_not_optimal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is restored is the file's plan, not the best one."""
        planner = AutoParallel(llama(), "dp=2,tp=2", device="H100", recipe="rowwise", batch=8, seq=2048)
        plan = planner.score({"*.mlp.*": "S(0), S(1)", "*.self_attn.*": "R, S(0)"})
        loaded = from_file(plan, tmp_path)
        no_solver(monkeypatch)
        restored = restore(loaded, llama())
        assert restored.to_json() == plan.to_json()
        assert restored.live is not None and plan.live is not None and restored.live.choices == plan.live.choices

    def test_a_copy_that_is_not_the_cheapest(self, tmp_path: Path) -> None:
        """As in a plan of a solver that ran out of time: it is where the file's collectives put it."""
        planner = AutoParallel(llama(), "dp=2,tp=2", device="H100", batch=8, seq=2048)
        live, overlap = planner.optimize().live, planner.overlap()
        assert live is not None
        choices, moved = list(live.choices), 0
        for v, variable in enumerate(live.shape.variables):
            for option in range(live.shape.num_options(v)) if variable.role == "copy" else ():
                other = (*choices[:v], option, *choices[v + 1 :])
                if overlap.step_us(tuple(choices)) + 1 < overlap.step_us(other) < math.inf:
                    choices[v], moved = option, moved + 1
                    break
            if moved == 5:
                break
        plan = planner.plan_of(tuple(choices), overlap)
        restored = restore(from_file(plan, tmp_path), llama())
        assert restored.live is not None and restored.live.choices == tuple(choices) and moved == 5
        assert restored.to_json() == plan.to_json()

    def test_it_verifies_and_explains_as_before(self, tmp_path: Path) -> None:
        """With the model; where the step waits for communication, no alternative can be less worse than before."""

        def perceptron() -> nn.Module:
            return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

        planner = AutoParallel(perceptron(), "dp=2,tp=2", inputs=(torch.empty(64, 64),), device="H100")
        plan = planner.add_parameter_memory_constraint().optimize()
        assert plan.bound_weight < 1
        loaded = from_file(plan, tmp_path)
        assert loaded.verify(perceptron()).is_ok
        explained = [p.explain("2.weight", perceptron()).alternatives for p in (loaded, plan)]
        least = [{a.placements: a.regret_us[0] for a in alternatives} for alternatives in explained]
        assert least[0] == pytest.approx(least[1], abs=1e-6) and max(least[0].values()) > 1

    @pytest.mark.parametrize(("call", "says"), [("verify", "verify(model)"), ("explain", "explain(name, model)")])
    def test_without_a_model_the_error_says_how(self, call: str, says: str, tmp_path: Path) -> None:
        loaded = from_file(planned(), tmp_path)
        with pytest.raises(PlanError) as caught:
            getattr(loaded, call)(*["lm_head.weight"] * (call == "explain"))
        assert f"pass the model it was made for, plan.{says}" in str(caught.value)

    def test_constraints_are_asked_again(self, tmp_path: Path) -> None:
        """So that `explain` forbids what they forbid."""
        planner = AutoParallel(llama(), "dp=2,tp=2", device="H100", batch=8, seq=2048)
        planner.pin("*.mlp.*", "S(0), R").add_node_constraint("model.layers.0.add", "S(0), R")
        planner.add_input_constraints(["S(0), R", None]).add_parameter_memory_constraint(0.1, 1.0)
        restored = restore(from_file(planner.optimize(), tmp_path), llama())
        assert restored.live is not None and restored.live.planner.constraints == planner.constraints
        text = str(restored.explain("model.layers.0.mlp.up_proj.weight"))
        assert 'forbidden by pin("*.mlp.*", "S(0), R")' in text

    def test_other_prices_are_said(self, tmp_path: Path) -> None:
        """The layouts stay, times are new, and the file's bound is not claimed for them."""
        loaded = from_file(planned(), tmp_path)
        slower = replace(load_device("H100"), bandwidth_bytes_per_s=1e12)
        restored = restore(loaded, llama(), device=slower)
        assert restored.parameters == loaded.parameters and restored.nodes != loaded.nodes
        assert restored.objective_us > loaded.objective_us and restored.status == "feasible"
        assert 0 < restored.lower_bound_us < restored.objective_us
        assert f"where the file says {loaded.objective_us:.6g} us" in restored.notes[-1]


class TestAnotherGraph:
    def test_a_deeper_model_takes_the_last_layers_layouts(self, tmp_path: Path) -> None:
        """The rest is planned again, and one note says so."""
        planner = AutoParallel(llama(2), "dp=2,tp=2", device="H100", batch=32, seq=2048)
        planner.pin("model.layers.0.*_proj.weight", "R, S(1)").pin("model.layers.1.*_proj.weight", "R, S(0)")
        plan = planner.optimize()
        deeper = restore(from_file(plan, tmp_path), llama(3))
        for name, parameter in plan.parameters.items():
            assert deeper.parameters[name].placements == parameter.placements
            like = name.replace("layers.1.", "layers.2.")
            assert deeper.parameters[like].placements == parameter.placements
        note = "made for another graph (21 parameters, here 30): 30 of 30 parameters lie as in the file"
        assert [n for n in deeper.notes if n.startswith(note)] == [deeper.notes[-1]]
        assert deeper.settings["constraints"] is None and deeper.live is not None

    def test_a_shorter_model(self, tmp_path: Path) -> None:
        plan = planned(model=llama(2))
        shorter = restore(from_file(plan, tmp_path), llama(1))
        assert {n: p.placements for n, p in shorter.parameters.items()} == {
            name: plan.parameters[name].placements for name in shorter.parameters
        }

    def test_another_torch_and_another_batch_are_named(self, tmp_path: Path) -> None:
        loaded = replace(from_file(planned(), tmp_path), torch="2.9.1", graph="0" * 16)
        found = restore(loaded, llama(), inputs=(tokens(16),))
        assert found.notes[-1].startswith("made for another graph (torch 2.9.1, here ")
        assert "inputs int64 [8, 2048], here int64 [16, 2048])" in found.notes[-1]
        assert {n: p.placements for n, p in found.parameters.items()} == {
            n: p.placements for n, p in loaded.parameters.items()
        }

    def test_verify_warns_that_it_is_another_plan(self, tmp_path: Path) -> None:
        loaded = from_file(planned(), tmp_path)
        with pytest.warns(UserWarning, match="made for another graph"):
            assert loaded.verify(llama(2)).is_ok

    def test_options_that_are_gone_are_planned_again(self, tmp_path: Path) -> None:
        """As where a rule changed, or somebody edited an op's layouts: none is guessed."""
        loaded = from_file(planned(), tmp_path)
        at = next(i for i, node in enumerate(loaded.nodes) if node.op == "aten.mm.default")
        nodes = list(loaded.nodes)
        nodes[at] = replace(nodes[at], output=("P(max), P(max)",))
        found = restore(replace(loaded, nodes=tuple(nodes)), llama())
        name = re.escape(loaded.nodes[at].name)
        wanted = (
            rf"the file's layouts are no options here \({name} .* -> \[P\(max\), P\(max\)\]\): rules are others than"
        )
        assert re.match(wanted, found.notes[-1])

    @pytest.mark.parametrize(
        ("other", "says"),
        [
            (lambda: Act(torch.tanh, 1e-6, width=96), r"up.weight float32 \[64, 64\], here float32 \[96, 64\]"),
            (lambda: Act(torch.relu, 1e-6), r"tanh aten.tanh.default, here relu aten.relu.default"),
            (lambda: Act(torch.tanh, 0.5), r"the same ops on other values: a number such as an epsilon"),
        ],
    )
    def test_what_differs_is_said(self, other: Callable[[], nn.Module], says: str, tmp_path: Path) -> None:
        """As far as a file holds it: shapes, dtypes and ops."""
        x = torch.empty(8, 64, device="meta")
        loaded = from_file(AutoParallel(Act(torch.tanh, 1e-6), "dp=2", inputs=(x,), device="H100").optimize(), tmp_path)
        assert re.match(rf"made for another graph \(.*{says}", restore(loaded, other()).notes[-1])

    def test_figures_that_were_edited(self, tmp_path: Path) -> None:
        """They are made anew, and no other price is blamed for it."""
        loaded = from_file(planned(), tmp_path)
        found = restore(replace(loaded, memory_bytes={**loaded.memory_bytes, "activations": 7}), llama())
        assert found.notes[-1].startswith("memory_bytes of the file are not what its layouts give, and are made anew")
        assert found.memory_bytes == loaded.memory_bytes | {"activations": found.memory_bytes["activations"]}

    def test_a_layout_that_does_not_divide_is_planned_again(self, tmp_path: Path) -> None:
        """Parameters of another width, by name."""

        def two(width: int) -> nn.Module:
            return nn.Sequential(nn.Linear(64, width, bias=False), nn.ReLU(), nn.Linear(width, 64, bias=False))

        planner = AutoParallel(two(256), "tp=4", inputs=(torch.empty(32, 64),), device="H100")
        loaded = from_file(planner.pin("0.weight", "S(0)").pin("2.weight", "S(0)").optimize(), tmp_path)
        found = restore(loaded, two(254))
        assert "1 of 2 parameters lie as in the file" in found.notes[-1]
        assert found.parameters["2.weight"].placements == ("S(0)",)


class Act(nn.Module):
    """A linear with an activation and a number."""

    def __init__(self, act: Any, eps: float, width: int = 64) -> None:
        super().__init__()
        self.up, self.act, self.eps = nn.Linear(64, width, bias=False), act, eps

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.act(self.up(x) + self.eps)
        return made


class TestErrors:
    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, tmp_path_factory: pytest.TempPathFactory) -> Plan:
        return from_file(planned(), tmp_path_factory.mktemp("plan"))

    def test_another_model(self, loaded: Plan) -> None:
        with pytest.raises(
            PlanError, match=r"the model lacks 12 of the plan's 12 parameters: model.embed_tokens.weight, .*\.\.\."
        ):
            restore(loaded, nn.Linear(8, 8))

    def test_another_mesh(self, loaded: Plan) -> None:
        with pytest.raises(PlanError, match="the plan is for the mesh dp=2,tp=2, not for"):
            restore(loaded, llama(), mesh="dp=4")

    def test_an_unknown_device(self, loaded: Plan) -> None:
        message = 'the plan is for the device "my-chip", of which there is no profile here'
        with pytest.raises(PlanError, match=message):
            restore(replace(loaded, device="my-chip"), llama())
        with pytest.raises(PlanError, match="the plan is for the device h100, not for h200"):
            restore(loaded, llama(), device="H200")

    def test_settings_that_do_not_read(self, loaded: Plan) -> None:
        settings = {**loaded.settings, "mixed_precision": {"param_dtype": "bfloat17"}}
        with pytest.raises(PlanError, match=r"settings of the plan do not read: .*bfloat17"):
            restore(replace(loaded, settings=settings), llama())

    @pytest.mark.parametrize("constraints", [["lm_head.weight"], {"parameters": ["lm_head.weight"]}, {"budget": [1]}])
    def test_constraints_that_do_not_read(self, constraints: Any, loaded: Plan) -> None:
        with pytest.raises(PlanError, match="constraints of the plan do not read: "):
            restore(replace(loaded, settings={**loaded.settings, "constraints": constraints}), llama())

    def test_inputs_that_cannot_be_made_again(self, loaded: Plan) -> None:
        with pytest.raises(PlanError, match=r"says 'DynamicCache' of past, which cannot be made again"):
            restore(replace(loaded, inputs={**loaded.inputs, "past": "DynamicCache"}), llama())


class TestAnotherBatch:
    @pytest.mark.parametrize(("recipe", "device"), [(None, "H100"), ("rowwise", "H100"), ("mxfp8", "B200")])
    def test_layouts_are_the_same_and_numbers_right(
        self, recipe: str | None, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every op, copy and output; nothing is solved."""
        plan = planned(recipe=recipe, device=device)
        no_solver(monkeypatch)
        larger = with_inputs(plan, (tokens(16),))
        assert [(n.inputs, n.output) for n in larger.nodes] == [(n.inputs, n.output) for n in plan.nodes]
        moved = [(c.kind, c.axis, c.tensor, c.reader, c.source, c.target) for c in plan.collectives]
        assert [(c.kind, c.axis, c.tensor, c.reader, c.source, c.target) for c in larger.collectives] == moved
        assert larger.inputs == {"inputs[0]": "int64 [16, 2048]"} and larger.step_time_us["total"] > plan.objective_us
        assert larger.status == "feasible" and larger.lower_bound_us < larger.objective_us
        assert "planned for inputs[0] int64 [8, 2048]" in larger.notes[-1]
        assert recipe == "mxfp8" or larger.verify().is_ok  # emulated blocks take long
        assert with_inputs(larger, (tokens(8),)).objective_us == pytest.approx(plan.objective_us)

    def test_numbers_in_the_graph_follow(self) -> None:
        """A mean's divisor is the new batch's."""

        class Mean(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(64, 64)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x).pow(2).mean()

        plan = AutoParallel(Mean(), "dp=2", inputs=(torch.empty(8, 64),), device="H100").optimize()
        larger = with_inputs(plan, (torch.empty(32, 64),))
        assert plan.live is not None and larger.live is not None
        args = [[n.args for n in p.live.space.graph.nodes if 2048 in n.args or 512 in n.args] for p in (plan, larger)]
        assert args[0] and len(args[0]) == len(args[1]) and args[0] != args[1]
        assert larger.verify().is_ok

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            (6, "dim 0 of input_ids is 6, which does not divide over dp=4"),
            (1, "dim 0 of input_ids is 1, which does not split as the plan's 8 does"),
        ],
    )
    def test_a_batch_that_does_not_divide(self, batch: int, message: str) -> None:
        """The first tensor and its dim are named."""
        with pytest.raises(PlanError, match=message):
            with_inputs(planned("dp=4"), (tokens(batch),))

    def test_another_program(self) -> None:
        """A model that does something else at another size."""

        class Either(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(64, 64)

            def forward(self, x: Tensor) -> Tensor:
                y = self.inner(x)
                return y.relu() if x.shape[0] > 16 else y

        plan = AutoParallel(Either(), "dp=2", inputs=(torch.empty(8, 64),), device="H100").optimize()
        with pytest.raises(PlanError, match="the model is another program at these inputs: "):
            with_inputs(plan, (torch.empty(32, 64),))

    def test_above_the_memory_limit(self) -> None:
        """It is said and not refused: the limit was a wish for planning."""
        plan = planned("dp=2", memory_limit="1 GiB", batch=2)
        assert "the memory limit is exceeded at these inputs" in with_inputs(plan, (tokens(512),)).notes

    def test_a_plan_from_a_file_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(PlanError, match=r"restore\(plan, model\)"):
            with_inputs(from_file(planned("dp=2"), tmp_path), (tokens(8),))


class TestInputText:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (torch.empty(16, 8), "float32 [16, 8]"),
            (torch.empty((), dtype=torch.int64), "int64 []"),
            (torch.empty(4, 8).t(), "float32 [8, 4] stride [1, 8]"),
            (None, "None"),
            (True, "True"),
            (-0.5, "-0.5"),
            ("int64 [2]", "'int64 [2]'"),
            ("it's", '"it\'s"'),
            ((torch.empty(2),), "(float32 [2],)"),
            ([3, {"mask": torch.empty(2, dtype=torch.bool), "mode": None}], "[3, {'mask': bool [2], 'mode': None}]"),
        ],
    )
    def test_text_and_back(self, value: Any, text: str) -> None:
        assert describe(value) == text
        (again,), _ = parse_inputs({"inputs[0]": text})
        assert describe(again) == text and type(again) is type(value)

    def test_positions_and_names(self) -> None:
        """Keywords in order of their names."""
        described = describe_inputs((1, None), {"b": 2, "a": False})
        assert list(described) == ["inputs[0]", "inputs[1]", "a", "b"]
        assert parse_inputs(described) == ((1, None), {"a": False, "b": 2})

    def test_a_model_with_options_is_restored(self, tmp_path: Path) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(64, 64)

            def forward(self, x: Tensor, mask: Tensor | None, *, scale: float, negate: bool) -> Tensor:
                y = self.inner(x) * scale
                return -y if negate else y

        plan = AutoParallel(
            Scaled(), "dp=2", inputs=(torch.empty(8, 64), None), kwargs={"scale": 0.5, "negate": True}, device="H100"
        ).optimize()
        restored = restore(from_file(plan, tmp_path), Scaled())
        assert restored.live is not None and restored.to_json() == plan.to_json()


class TestCommandLine:
    """`verify` and `explain` take the file that `plan --json` wrote."""

    PLAN = ("llama3-debug", "--layers", "1", "--mesh", "dp=2,tp=2", "--device", "H100", "--batch", "8", "--seq", "2048")

    @pytest.fixture(scope="class")
    @classmethod
    def path(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        path = str(tmp_path_factory.mktemp("plan") / "plan.json")
        assert main(["plan", *cls.PLAN, "--pin", "lm_head.weight=R, S(0)", "--json", path]) == 0
        return path

    def test_verify(self, path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """The file's plan, which is not solved again; options that say the same may stand beside it."""
        no_solver(monkeypatch)
        assert main(["verify", path, "--mesh", "dp=2,tp=2", "--batch", "8", "--pin", "lm_head.weight = R, S(0)"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("all ") and "4 ranks in one process" in out and err == ""

    def test_explain(self, path: str, capsys: pytest.CaptureFixture[str]) -> None:
        """As from the model, pins included."""
        assert main(["explain", path, "--parameter", "lm_head.weight", "--quiet"]) == 0
        found = capsys.readouterr().out
        assert main(["explain", *self.PLAN, "--pin", "lm_head.weight=R, S(0)", "--parameter", "lm_head.weight"]) == 0
        assert capsys.readouterr().out == found and 'forbidden by pin("lm_head.weight", "R, S(0)")' in found

    def test_a_parameter_that_is_not_there(self, path: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", path, "--parameter", "lm_head"]) == 2
        assert "the model has no parameter 'lm_head'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--mesh", "tp=4"], "--mesh tp=4 contradicts the plan file, which says dp=2,tp=2"),
            (["--layers", "2"], "--layers 2 contradicts the plan file, which says 1"),
            (["--device", "H200"], "--device h200 contradicts the plan file, which says h100"),
            (["--recipe", "rowwise"], "--recipe rowwise contradicts the plan file, which does not say it"),
            (["--batch", "16"], "--batch 16 contradicts the plan file, which says 8"),
            (["--seq", "64"], "--seq 64 contradicts the plan file, which says 2048"),
            (["--memory-limit", "1 GB"], "--memory-limit 1000000000 contradicts the plan file, which says 8"),
            (["--scale-scope", "global"], "--scale-scope global contradicts the plan file, which says local"),
            (["--mixed-precision"], "--mixed-precision contradicts the plan file, which does not say it"),
            (["--no-loss"], "--no-loss contradicts the plan file, which does not say it"),
            (["--pin", "lm_head.weight=R, R"], "--pin lm_head.weight=R, R contradicts the plan file"),
        ],
    )
    def test_options_that_contradict(
        self, options: list[str], message: str, path: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["verify", path, *options]) == 2
        out, err = capsys.readouterr()
        assert message in err and out == ""

    def test_what_is_no_plan_file(self, path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """A config is a model whatever its name; a plan is none, and one from Python tells no model."""
        config = tmp_path / "plan.json"
        config.write_text(json.dumps({**preset_config("llama3-debug"), "version": 1}))
        assert plan_in(str(config)) is None and plan_in("llama3-debug") is None and plan_in(str(tmp_path)) is None
        assert main(["plan", path]) == 2
        assert "is a plan, not a model" in capsys.readouterr().err
        loaded = Plan.load(path)
        del loaded.settings["built_from"]  # type: ignore[attr-defined]
        loaded.save(config)
        assert main(["verify", str(config)]) == 1
        assert "does not say how to build its model: it was made from Python" in capsys.readouterr().err
        config.write_text(json.dumps({**json.loads(loaded.to_json()), "version": 99}))
        assert main(["verify", str(config)]) == 1
        assert "plan version 99" in capsys.readouterr().err

    def test_a_file_that_is_half_a_plan(self, path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """It is told as a plan, and what is neither plan nor config as that."""
        text, file = Path(path).read_text(), tmp_path / "some.json"
        data = json.loads(text)
        cases = [
            (text[: len(text) // 2], 1, "the file is no JSON, or cut off: "),
            (json.dumps({k: v for k, v in data.items() if k != "version"}), 1, "the plan lacks its version"),
            (json.dumps({k: v for k, v in data.items() if k != "nodes"}), 1, "the plan lacks nodes"),
            ("[]", 2, f"{file} holds no JSON object"),
            ("", 2, f"{file} is empty"),
        ]
        for content, code, says in cases:
            file.write_text(content)
            assert main(["verify", str(file)]) == code
            told = capsys.readouterr().err
            assert told.startswith(f"error: {says}") and "\n  do: " in told

    def test_another_plan_is_said(self, path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """As a note beside the answer."""
        other = str(tmp_path / "plan.json")
        replace(Plan.load(path), graph="0" * 16).save(other)
        assert main(["verify", other]) == 0
        assert capsys.readouterr().err.startswith("note: made for another graph (the same ops on other values: ")
