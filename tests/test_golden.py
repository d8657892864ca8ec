"""Solver regression: the plans of small models, but for the list of ops. `--refresh-golden` rewrites them."""

import json
from pathlib import Path

import pytest

from autoparallel_fp8 import AutoParallel, Plan
from autoparallel_fp8.models.presets import build

FOLDER = Path(__file__).parent / "golden"
CASES = [
    ("llama3-debug", None, "dp=4"),
    ("llama3-debug", None, "dp=2,tp=2"),
    ("llama3-debug", "tensorwise", "dp=4"),
    ("llama3-debug", "tensorwise", "dp=2,tp=2"),
    ("llama3-debug", "rowwise", "dp=4"),
    ("llama3-debug", "rowwise", "dp=2,tp=2"),
    ("llama3-debug", "rowwise_with_gw_hp", "dp=2,tp=2"),
    ("llama3-8b", "tensorwise", "dp=8,tp=8"),
    ("qwen3-8b", "rowwise", "dp=2,tp=4"),
    ("gpt2", None, "dp=2,tp=2"),
]


def make(model: str, recipe: str | None, mesh: str) -> Plan:
    return AutoParallel(build(model, num_layers=1), mesh, recipe=recipe, device="H100", name=model).optimize()


@pytest.mark.parametrize(("model", "recipe", "mesh"), CASES)
def test_plan_is_the_golden_one(model: str, recipe: str | None, mesh: str, refresh_golden: bool) -> None:
    """Proven optimal, no op without a rule, and not a byte differs from the file in tests/golden."""
    plan = make(model, recipe, mesh)
    assert plan.status == "optimal" and plan.gap <= 1e-6
    assert plan.replicated_ops == ()
    data = json.loads(plan.to_json())
    for key in ("nodes", "torch", "gap", "lower_bound_us", "digest"):  # the digest is of the others too
        del data[key]
    text = json.dumps(data, indent=1) + "\n"
    path = FOLDER / f"{model}_{recipe or 'bf16'}_{mesh.replace('=', '').replace(',', '_')}.json"
    if refresh_golden:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_same_inputs_give_the_same_bytes() -> None:
    """Nothing depends on a set's order, on time or on what was planned before."""
    first = make("llama3-debug", "tensorwise", "dp=2,tp=2").to_json()
    make("gpt2", None, "dp=2")
    assert make("llama3-debug", "tensorwise", "dp=2,tp=2").to_json() == first


def test_a_plan_file_reads_back(tmp_path: Path) -> None:
    plan = make("llama3-debug", "rowwise", "dp=2,tp=2")
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.to_json() == plan.to_json()
    assert str(again) == str(plan)


def test_a_plan_scores_as_itself() -> None:
    """A plan's parameters pinned in the same problem give the same plan; in a deeper model, a plan like it."""
    plan = make("llama3-debug", "rowwise", "dp=2,tp=2")
    planner = AutoParallel(build("llama3-debug", num_layers=1), "dp=2,tp=2", recipe="rowwise", device="H100")
    assert planner.score(plan).objective_us == pytest.approx(plan.objective_us)
    deeper = AutoParallel(build("llama3-debug", num_layers=2), "dp=2,tp=2", recipe="rowwise", device="H100").score(plan)
    assert {name: p.placements for name, p in deeper.parameters.items() if name in plan.parameters} == {
        name: p.placements for name, p in plan.parameters.items()
    }


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_data_parallel_float8_reduces_no_activation_amax(recipe: str) -> None:
    """Each rank scales its own tokens; with one scale for all ranks the maxima of every layer are reduced."""

    def reduced(scope: str) -> list[str]:
        model = build("llama3-debug", num_layers=1)
        planner = AutoParallel(model, "dp=4", recipe=recipe, device="H100", scale_scope=scope)
        planner.add_input_constraints(["S(0)", "S(0)"])
        planner.add_node_constraint("model.layers.0.add", "S(0)")
        plan = planner.optimize()
        return [c.tensor for c in plan.collectives if "P(max)" in c.source and not c.hidden and "proj" in c.tensor]

    assert reduced("local") == []
    if recipe == "rowwise":
        assert reduced("global") != []


class TestFloat8Point:
    """What float8 is for: one byte an element on the wire, casts on the shard, no amax on data-parallel activations."""

    @pytest.fixture(scope="class")
    @classmethod
    def plan(cls) -> Plan:
        return make("llama3-8b", "tensorwise", "dp=8,tp=8")

    def test_weights_are_gathered_in_float8(self, plan: Plan) -> None:
        gathers = [c for c in plan.collectives if c.kind == "all_gather" and ".mlp." in c.tensor and c.hidden]
        assert gathers and {c.dtype for c in gathers} == {"float8_e4m3fn"}
        cast = next(n for n in plan.nodes if n.name == gathers[0].tensor)
        assert cast.output[0] == gathers[0].source and "S" in cast.output[0]  # cast where the shard is
        assert "1 byte an element" in str(plan)

    def test_no_activation_amax_is_reduced(self, plan: Plan) -> None:
        weights = {
            c.tensor for c in plan.collectives if c.kind == "all_reduce" and c.bytes <= 16 and "proj" in c.tensor
        }
        derived = {name.rpartition(".")[0] for name in weights}
        reduced = [c for c in plan.collectives if c.kind == "all_reduce" and c.bytes <= 16 and not c.hidden]
        assert derived and all("proj" not in c.tensor for c in reduced)

    def test_no_float8_value_is_partial(self, plan: Plan) -> None:
        assert not any("P(sum)" in c.source for c in plan.collectives if c.dtype.startswith("float8"))
