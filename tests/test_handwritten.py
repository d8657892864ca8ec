"""The plan people write by hand, tensor and sequence parallel inside data parallel, can be pinned and scored."""

import pytest

from autoparallel_fp8 import AutoParallel, Plan
from autoparallel_fp8.models.presets import build

COLUMNS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
ROWS = ["self_attn.o_proj", "mlp.down_proj"]
TP_SP = {
    **{f"model.layers.*.{name}.weight": "R, S(0)" for name in COLUMNS},
    **{f"model.layers.*.{name}.weight": "R, S(1)" for name in ROWS},
    **{
        f"model.layers.0.{name}": "S(0), S(1)" for name in ("add", "add_2")
    },  # the residual: batch over dp, sequence over tp
    "model.layers.0.self_attn.attention": "S(0), S(1)",  # heads over tp
}


@pytest.fixture(scope="module")
def planner() -> AutoParallel:
    return AutoParallel(build("llama3-8b", num_layers=1), "dp=2,tp=8", batch=4, seq=2048, device="H100")


@pytest.fixture(scope="module")
def by_hand(planner: AutoParallel) -> Plan:
    return planner.score(TP_SP)


def test_it_is_feasible_and_moves_what_one_expects(by_hand: Plan) -> None:
    """Tokens are gathered over tp before column-parallel linears and reduce-scattered after row-parallel ones."""
    moved = {(c.kind, c.axis, c.tensor.split(".")[-1]) for c in by_hand.collectives if "layers.0" in c.tensor}
    kinds = {(kind, axis) for kind, axis, _ in moved}
    assert {("all_gather", "tp"), ("reduce_scatter", "tp")} <= kinds
    residual = next(node for node in by_hand.nodes if node.name == "model.layers.0.add")
    assert residual.output == ("S(0), S(1)",) and residual.local_shapes == ((2, 256, 4096),)


def test_the_chosen_plan_is_never_slower(planner: AutoParallel, by_hand: Plan) -> None:
    chosen = planner.optimize()
    assert chosen.status == by_hand.status == "optimal"
    assert chosen.objective_us <= by_hand.objective_us * (1 + 1e-9)
