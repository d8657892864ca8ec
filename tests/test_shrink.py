"""A plan on smaller tensors is the same plan: layouts stay legal, and it gives what the unsharded graph gives."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel_fp8 import AutoParallel
from autoparallel_fp8.expansion import Space
from autoparallel_fp8.graph import ABSENT, Ref
from autoparallel_fp8.items import last_uses
from autoparallel_fp8.layout import local_factors
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.program import makes_of, program, reads_of
from autoparallel_fp8.redistribute import Routes
from autoparallel_fp8.reference import run_reference
from autoparallel_fp8.shrink import shrink
from autoparallel_fp8.simulate import run_graph
from autoparallel_fp8.simulate_plan import run_plan
from autoparallel_fp8.verify import made_up_values

pytestmark = pytest.mark.usefixtures("one_thread")
RECIPES = [None, "tensorwise", "rowwise", "rowwise_with_gw_hp"]


class Planned:
    """The best plan of the debug Llama with one layer, and the same on smaller tensors."""

    def __init__(self, recipe: str | None, mesh: str, scale_scope: str = "local") -> None:
        planner = AutoParallel(
            build("llama3-debug", num_layers=1), mesh, recipe=recipe, device="H100", scale_scope=scale_scope
        )
        self.prepared = planner._prepare()
        self.choices = planner._solve(self.prepared, planner.constraints).solution.choices
        self.small: Space = shrink(self.prepared.space, self.prepared.shape, self.choices, keep=16)

    def routes(self, ref: Ref) -> Routes:
        small = self.small
        spec, factors, reach = small.graph.spec(ref), small.factors[ref], small.reach[ref]
        return Routes(spec, factors, reach, small.mesh.sizes, lambda step, _: 1.0 + step.num_bytes)

    def run(self) -> dict[str, dict[str, Tensor]]:
        return run_plan(
            self.small, self.prepared.shape, self.choices, self.routes, *made_up_values(self.small.graph, 0)
        )


def errors(found: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]) -> dict[str, float]:
    """Norm of the difference over the norm, of every result and gradient."""
    return {
        f"{kind} {name}": float(
            (found[kind][name].double() - whole.double()).norm() / whole.double().norm().clamp_min(1e-9)
        )
        for kind, named in wanted.items()
        for name, whole in named.items()
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_small_plan_gives_what_one_device_gives_with_its_scale_scopes(recipe: str | None) -> None:
    """What is left is the rounding of bfloat16 sums in another order, and what it does to the next cast."""
    planned = Planned(recipe, "dp=2,tp=2")
    wanted = run_reference(planned.small, planned.choices, *made_up_values(planned.small.graph, 0))
    found = errors(planned.run(), wanted)
    assert max(found.values()) < 0.02, found


@pytest.mark.parametrize(("recipe", "most"), [(None, 0.0), ("tensorwise", 1e-3)])
def test_without_own_scales_the_reference_is_the_graph_itself(recipe: str | None, most: float) -> None:
    """Bit for bit where no formula stands in for a kernel."""
    planned = Planned(recipe, "dp=2,tp=2", "global")
    values = made_up_values(planned.small.graph, 0)
    found = run_reference(planned.small, planned.choices, *values)
    assert max(errors(found, run_graph(planned.small.graph, *values)).values()) <= most


def test_sizes_shrink_and_layouts_stay_legal() -> None:
    """Every layout that the plan puts a value in fits the smaller factors; parts stay multiples of 16."""
    planned = Planned("tensorwise", "dp=2,tp=4")
    shape, space, small = planned.prepared.shape, planned.prepared.space, planned.small
    count = {
        name: sum(prod(n.outputs[0].shape) for n in s.graph.nodes) for name, s in (("whole", space), ("small", small))
    }
    assert count["small"] < count["whole"] / 50
    for link in shape.links:
        layout = shape.targets[link.target][link.target_slot][planned.choices[link.target]]
        assert local_factors(small.factors[link.ref], layout, small.mesh.sizes) is not None
    for old, new in zip(space.kind_of, small.kind_of, strict=True):
        assert small.kinds[new].options == space.kinds[old].options
    sizes = [n.outputs[0].shape for n in small.graph.nodes if n.kind == "parameter" and len(n.outputs[0].shape) == 2]
    assert all(size % 16 == 0 for pair in sizes for size in pair)


def test_a_program_reads_nothing_before_it_is_made_and_keeps_nothing_for_good() -> None:
    """Every value is given or made before it is read; every value but the ends is let go after its last use."""
    planned = Planned(None, "dp=2,tp=2")
    written = program(planned.small, planned.prepared.shape, planned.choices, planned.routes)
    there = {key for _, key in written.given}
    unused_after = last_uses(written.instructions, written.ends.values())
    for instruction, unused in zip(written.instructions, unused_after, strict=True):
        assert there.issuperset(reads_of(instruction))
        there |= set(makes_of(instruction))
        there -= set(unused)
    assert there <= set(written.ends.values()) | {key for _, key in written.given}
    assert there >= set(written.ends.values())


def shrunk(model: nn.Module, inputs: tuple[Tensor, ...], mesh: str, pins: dict[str, str], **more: Any) -> Space:
    """The best plan of a model with these pins, on smaller tensors."""
    planner = AutoParallel(model, mesh, inputs=inputs, device="H100", **more)
    for name, placement in pins.items():
        planner.pin(name, placement)
    prepared = planner._prepare()
    choices = planner._solve(prepared, planner.constraints).solution.choices
    return shrink(prepared.space, prepared.shape, choices, keep=2)


class Positions(nn.Module):
    """Adds an embedding of positions that forward counts, then a norm whose input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(32, 64)
        self.position.weight.requires_grad_(False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.position(torch.arange(x.shape[1], device=x.device)))


def test_positions_that_ops_count_stay_in_the_table_and_absent_results_have_no_size() -> None:
    """The table keeps its rows however long the sequence stays; a gradient that nobody needs is left out of it all."""
    inputs = (torch.empty(4, 32, 64, device="meta"),)
    small = shrunk(Positions(), inputs, "dp=2", {"position.weight": "S(1)"})
    assert ABSENT in [spec for node in small.graph.nodes for spec in node.outputs]
    (table,) = (n for n in small.graph.nodes if n.target == "position.weight")
    assert table.outputs[0].shape[0] == 32
    run_graph(small.graph, *made_up_values(small.graph, 0), check=True)


class Sequence(nn.Module):
    """Works on [seq, batch, hidden]: blocks of 32 tokens are no whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.transpose(0, 1))


def test_blocks_across_factors_keep_their_size() -> None:
    """Tokens are sequence x batch, 16 x 6, and blocks of scales 3 x 32 of them: neither shrinks where both are."""
    inputs = (torch.empty(6, 16, 64, dtype=torch.bfloat16, device="meta"),)
    small = shrunk(Sequence(), inputs, "dp=2", {}, recipe="mxfp8", emulate=True)
    run_graph(small.graph, *made_up_values(small.graph, 0), check=True)
