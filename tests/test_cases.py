"""Small inputs behind public reports on planners of this kind, each standing for its whole kind."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel_fp8 import AutoParallel, CaptureError, InfeasibleError, Plan, UsageError, reach, simulate_plan
from autoparallel_fp8.apply import schedule_of
from autoparallel_fp8.capture import capture
from autoparallel_fp8.graph import Graph
from autoparallel_fp8.in_memory import exchange
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.ops.stand_ins import stand_in
from autoparallel_fp8.rank import Calls
from autoparallel_fp8.reread import reread
from autoparallel_fp8.simulate_plan import run_plan

BF16 = torch.bfloat16


def mlp(*sizes: int, bias: bool = False) -> nn.Sequential:
    """Linears of these sizes with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def planner(model: nn.Module, mesh: str, *shape: int, dtype: torch.dtype = torch.float32) -> AutoParallel:
    return AutoParallel(model, mesh, inputs=(torch.empty(*shape, dtype=dtype, device="meta"),), device="H100")


def share(plan: Plan, name: str) -> float:
    parameter = plan.parameters[name]
    return math.prod(parameter.local_shape) / math.prod(parameter.shape)


def runs(plan: Plan) -> bool:
    """Whether the lowered program sends what the plan says, and gives the unsharded model's numbers on all ranks."""
    live = plan.live
    assert live is not None
    sizes = live.space.mesh.sizes
    calls = Calls(live.space, live.choices, (0,) * len(sizes), stand_in, device="meta")
    reread(schedule_of(live), calls, plan.collectives, names=live.space.mesh.names)
    return plan.verify().is_ok


class TestSmallBatchOnThreeAxes:
    """A batch of 2 on mesh (2, 2, 2): meta-pytorch/autoparallel#22, #320, #73."""

    def test_batch_is_split_on_at_most_one_axis_and_parameters_fully(self) -> None:
        plan = planner(mlp(64, 256, 64), "a=2,b=2,c=2", 2, 64, 64).add_parameter_memory_constraint().optimize()
        assert plan.status == "optimal"
        assert {share(plan, name) for name in plan.parameters} == {1 / 8}
        (tokens,) = [node for node in plan.nodes if node.op == "input"]
        assert tokens.output[0].split(", ").count("S(0)") <= 1
        assert runs(plan)

    def test_an_input_that_does_not_split_is_refused_with_dim_and_axis(self) -> None:
        asked = planner(mlp(64, 256, 64), "a=2,b=2,c=2", 2, 64, 64).add_input_constraints(["S(0), S(0), R"])
        with pytest.raises(UsageError, match=r"dim 0 of size 2 does not split 4 ways over axis a"):
            asked.optimize()

    def test_one_device_needs_no_communication(self) -> None:
        plan = planner(mlp(64, 256, 64), "a=1", 2, 64, 64).optimize()
        assert plan.collectives == ()
        assert all(p.placements == ("R",) for p in plan.parameters.values())
        assert runs(plan)


def test_an_indivisible_bias_gets_its_own_best() -> None:
    """#394: bias[10] on mesh (4, 2) holds 5 of 10; every other parameter exactly 1/8."""
    plan = planner(mlp(64, 10, 64, bias=True), "a=4,b=2", 32, 64).add_parameter_memory_constraint(high=1 / 8).optimize()
    shares = {name: share(plan, name) for name in plan.parameters}
    assert shares == {"0.weight": 1 / 8, "0.bias": 1 / 2, "2.weight": 1 / 8, "2.bias": 1 / 8}
    assert runs(plan)


class TestPinAgainstBudget:
    """A pin and a budget for one weight, in either order: #475, #400."""

    def test_order_does_not_matter(self) -> None:
        first = planner(mlp(64, 256, 64), "a=8", 32, 64).pin("0.weight", "R").add_parameter_memory_constraint()
        second = planner(mlp(64, 256, 64), "a=8", 32, 64).add_parameter_memory_constraint().pin("0.weight", "R")
        plans = first.optimize(), second.optimize()
        assert plans[0].to_json() == plans[1].to_json()
        assert plans[0].parameters["0.weight"].placements == ("R",)
        assert share(plans[0], "2.weight") == 1 / 8
        assert runs(plans[0])

    def test_a_pin_taken_back_leaves_no_trace(self) -> None:
        asked = planner(mlp(64, 256, 64), "a=8", 32, 64).add_parameter_memory_constraint()
        before = asked.optimize().to_json()
        assert asked.pin("0.weight", "R").optimize().to_json() != before
        assert asked.pin("0.weight", None).optimize().to_json() == before

    def test_none_leaves_an_input_free(self) -> None:
        asked = planner(mlp(64, 256, 64), "a=8", 32, 64)
        assert asked.add_input_constraints([None]).optimize().objective_us == asked.optimize().objective_us

    def test_conflicting_pins_are_both_named(self) -> None:
        asked = planner(mlp(64, 256, 64), "a=8", 32, 64).pin("0.weight", "R").pin("0.*", "S(0)")
        with pytest.raises(InfeasibleError, match=r'pin\("0.weight", "R"\), pin\("0.\*", "S\(0\)"\) on 0.weight'):
            asked.optimize()


class TestStrides:
    """Memory order survives splits: #37, #42, #269."""

    def test_a_column_major_operand_stays_so_when_either_dim_is_split(self) -> None:
        class Transposed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.empty(32, 64))

            def forward(self, a: torch.Tensor) -> torch.Tensor:
                return a @ self.weight.t()

        asked = planner(Transposed(), "a=4", 16, 64)
        space = asked.space()
        number = next(i for i, n in enumerate(space.graph.nodes) if n.op_name == "aten.mm.default")
        kind = space.kind(number)
        from autoparallel_fp8.products import local_specs

        strides = set()
        for option in kind.options:
            b = local_specs(kind.call.tensors, kind.operand_factors, option.operands, space.mesh.sizes)[1]
            assert b.stride == (1, b.shape[0])
            strides.add(b.shape)
        assert strides == {(64, 32), (16, 32), (64, 8)}

    def test_layer_norm_of_a_permuted_tensor_plans(self) -> None:
        class Permuted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.norm(x.permute(0, 2, 1))

        asked = planner(Permuted(), "a=4", 4, 8, 16)
        plan = asked.optimize()
        assert plan.status == "optimal" and plan.replicated_ops == ()
        graph = asked.graph()
        (result,) = [o for o in graph.outputs if o.kind == "output"]
        assert graph.spec(result.ref).stride == (128, 8, 1)
        assert runs(plan)


@pytest.fixture(scope="module")
def debug_plan() -> Plan:
    """The debug Llama with every linear in float8, output layer too, on tp=4."""
    from torchao.float8 import convert_to_float8_training

    model = convert_to_float8_training(build("llama3-debug", num_layers=1))
    return AutoParallel(model, "tp=4", batch=4, seq=256, device="H100").optimize()


class TestFloat8:
    """Alignment and memory order of float8 GEMMs: pytorch/torchtitan#1378 and its kind."""

    def test_the_output_layer_at_tp_4_is_refused_with_its_sentence(self, debug_plan: Plan) -> None:
        refused = debug_plan.explain("lm_head.weight").refused
        assert "mat2 local [256, 564]: 564 is not a multiple of 16" in {sentence for _, sentence in refused}
        assert debug_plan.status == "optimal"
        assert debug_plan.replicated_ops == ()
        assert runs(debug_plan)

    def test_other_splits_of_the_output_layer_stay(self, debug_plan: Plan) -> None:
        found = {a.placements: a.regret_us[1] for a in debug_plan.explain("lm_head.weight").alternatives}
        assert set(found) == {"R", "S(0)", "S(1)"}
        assert all(math.isfinite(regret) for regret in found.values())

    @pytest.mark.parametrize(
        ("sizes", "tp", "sentence"),
        [
            ((256, 576), 4, None),
            ((256, 576), 8, "mat2 local [256, 72]: 72 is not a multiple of 16"),
            ((48, 64), 2, "mat2 local [24, 64]: 24 is not a multiple of 16"),
        ],
    )
    def test_alignment_is_local(self, sizes: tuple[int, int], tp: int, sentence: str | None) -> None:
        from torchao.float8 import convert_to_float8_training

        model = convert_to_float8_training(mlp(*sizes).to(BF16))
        plan = planner(model, f"tp={tp}", 64, sizes[0], dtype=BF16).optimize()
        assert runs(plan)
        sentences = {sentence for _, sentence in plan.explain("0.weight").refused}
        if sentence is None:
            assert not any("[256, 144]" in s for s in sentences)
        else:
            assert sentence in sentences

    def test_an_unaligned_layer_is_an_error_that_names_it(self) -> None:
        from torchao.float8 import convert_to_float8_training

        model = convert_to_float8_training(mlp(256, 564).to(BF16))
        with pytest.raises(UsageError, match=r"564 is not a multiple of 16") as caught:
            planner(model, "tp=4", 64, 256, dtype=BF16).optimize()
        assert "0" in str(caught.value.at)
        assert "pad" in str(caught.value.do) and "bf16" in str(caught.value.do)


class TestFloat8Gather:
    """pytorch/torchtitan#3123: a weight split over two ranks is quantised first and gathered as one byte an element."""

    def planner(self, size: int, tokens: int) -> AutoParallel:
        model = mlp(size, size).to(BF16)
        inputs = (torch.empty(tokens, size, dtype=BF16, device="meta"),)
        asked = AutoParallel(model, "dp=2", inputs=inputs, recipe="tensorwise", device="H100")
        return asked.pin("0.weight", "S(0)").add_input_constraints(["S(0)"])

    def casts_of_weight(self, asked: AutoParallel) -> list[str]:
        nodes = asked.graph().nodes
        return [n.name for n in nodes if n.from_parameters and n.outputs[0].dtype == torch.float8_e4m3fn]

    def test_the_plan_says_so(self) -> None:
        plan = self.planner(4096, 16384).optimize()
        gather, amax = (
            [c for c in plan.collectives if c.kind == kind and c.tensor != "0.weight"]
            for kind in ("all_gather", "all_reduce")
        )
        assert [(c.dtype, c.bytes) for c in gather] == [("float8_e4m3fn", 4096 * 4096)]
        assert [(c.source, c.bytes) for c in amax] == [("P(max)", 2)]
        assert "gathered in float8_e4m3fn over dp" in str(plan)
        assert runs(plan)

    def test_the_gather_that_runs_moves_one_byte_an_element(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So small a weight is planned to be gathered in bf16, whose one collective is cheaper than two: here asked."""
        asked = self.planner(256, 16384)
        asked.add_node_constraint(self.casts_of_weight(asked)[0], "S(0)")
        prepared = asked._prepare()
        choices = asked._solve(prepared, asked.constraints).solution.choices
        moved: list[tuple[str, torch.dtype, int]] = []

        def spied(kind: str, reduction: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
            moved.append((kind, given[0].dtype, sum(x.nbytes for x in given)))
            return exchange(kind, reduction, given)

        monkeypatch.setattr(simulate_plan, "exchange", spied)
        weight, x = torch.randn(256, 256).to(BF16), torch.randn(16384, 256).to(BF16)
        run_plan(prepared.space, prepared.shape, choices, prepared.pricing.routes, {"0.weight": weight}, [x])
        assert moved.count(("all_gather", torch.uint8, 256 * 256)) == 1
        assert [kind for kind, _, size in moved if size == 2 * BF16.itemsize] == ["all_reduce"]
        assert not any(kind == "all_gather" and dtype == BF16 for kind, dtype, _ in moved)


class Masked(nn.Module):
    """A parameter that is read by an op without a rule alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.l = nn.Linear(256, size, bias=False)
        self.e = nn.Parameter(torch.empty(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x) @ torch.triu(self.e)


@pytest.mark.filterwarnings("ignore:no rule for aten.triu.default")
class TestOpWithoutARule:
    """An op that is planned replicated does not keep the parameter it reads whole."""

    def planner(self) -> AutoParallel:
        with torch.device("meta"):
            return planner(Masked(4096), "dp=4", 4096, 256)

    def test_the_parameter_is_stored_split_and_gathered_before(self) -> None:
        plan = self.planner().optimize()
        assert plan.parameters["e"].placements in (("S(0)",), ("S(1)",)) and share(plan, "e") == 1 / 4
        assert "gathered in float32 over dp" in plan.parameters["e"].why
        reads = {node.inputs for node in plan.nodes if node.op == "aten.triu.default"}
        assert plan.replicated_ops == ("aten.triu.default",) and reads == {("R",)}

    @pytest.mark.parametrize("placement", ["R", "S(0)", "S(1)"])
    def test_every_pin_of_it_works(self, placement: str) -> None:
        plan = self.planner().pin("e", placement).optimize()
        assert plan.status == "optimal" and plan.parameters["e"].placements == (placement,)

    def test_no_plan_is_told_with_the_op_that_does_not_go_along(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As it was when gradients were split only where a rule splits them: not a word of memory, which is enough."""
        leaders = reach._leaders

        def without_gradients(graph: Graph, *rest: Any) -> Any:
            outputs = tuple(output for output in graph.outputs if output.kind != "gradient")
            return leaders(replace(graph, outputs=outputs), *rest)

        monkeypatch.setattr(reach, "_leaders", without_gradients)
        cause = r"op backward\.triu\w* \(aten\.triu\.default, backward\) has no layout that goes with it"
        found = [a for a in self.planner().optimize().explain("e").alternatives if not a.chosen]
        assert [a.placements for a in found] == ["S(0)", "S(1)"]
        assert all(re.fullmatch(f"no plan has it: {cause}", a.note) for a in found)
        with pytest.raises(InfeasibleError, match=rf'^no plan has pin\("e", "S\(0\)"\): {cause}\n'):
            self.planner().pin("e", "S(0)").optimize()


def test_memory_is_named_only_where_it_is_in_the_way() -> None:
    """A weight that fits split alone; and one that a pin of the GEMM's result does not let be."""
    asked = planner(mlp(1024, 1024), "a=8", 32, 1024)
    found = asked.optimize().explain("0.weight").alternatives
    assert not any("memory" in a.note for a in found)
    small = AutoParallel(mlp(1024, 1024), "a=8", inputs=asked.inputs, device="H100", memory_limit="6 MiB")
    notes = {a.placements: a.note for a in small.optimize().explain("0.weight").alternatives}
    assert notes["R"] == "no plan has it within the memory limit"


class Keywords(nn.Module):
    """forward(tokens, *, mask=None, pos): meta-pytorch/autoparallel#486, #413, #418."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.linear = nn.Embedding(100, 64), nn.Embedding(16, 64), nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor, *, mask: torch.Tensor | None = None, pos: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(pos)
        return self.linear(x if mask is None else x * mask.unsqueeze(-1))


class TestKeywords:
    """Keyword arguments in any order, None among them, and wrong ones."""

    IDS = torch.empty(8, 16, dtype=torch.int64, device="meta")

    def planner(self, **keywords: Any) -> AutoParallel:
        return AutoParallel(Keywords(), "dp=4", inputs=(self.IDS,), kwargs=keywords, device="H100")

    def test_none_takes_no_placement(self) -> None:
        plan = self.planner(mask=None, pos=self.IDS).add_input_constraints(["S(0)", None]).optimize()
        assert [node.name for node in plan.nodes if node.op == "input"] == ["tokens", "pos"]
        assert runs(plan)

    def test_keywords_in_another_order_give_the_same_plan(self) -> None:
        plans = [
            self.planner(**keywords).optimize().to_json()
            for keywords in ({"mask": None, "pos": self.IDS}, {"pos": self.IDS, "mask": None})
        ]
        assert plans[0] == plans[1]

    @pytest.mark.parametrize(
        ("keywords", "message"),
        [
            ({}, r"do not fit the model's forward: missing a required argument: 'pos'"),
            ({"pos": IDS.float()}, r"to have one of the following scalar types: Long, Int"),
        ],
    )
    def test_wrong_arity_and_dtype_are_told(self, keywords: dict[str, Any], message: str) -> None:
        with pytest.raises((UsageError, CaptureError), match=message):
            self.planner(**keywords).optimize()


class SharedNorm(nn.Module):
    """Attention and MLP behind one LayerNorm: #18, #409, #422."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = mlp(64, 128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("copies", [1, 4, 8])
def test_repeated_blocks_that_share_a_norm(copies: int) -> None:
    """The graph, and so the plan, is the same whether blocks are traced once or each; it is optimal at any depth."""
    model = nn.Sequential(*(SharedNorm() for _ in range(copies)))
    x = torch.empty(16, 32, 64, device="meta")
    assert capture(model, (x,)) == capture(model, (x,), share_blocks=False)
    plan = planner(model, "dp=2,tp=4", 16, 32, 64).optimize()
    assert plan.status == "optimal" and runs(plan)


def test_an_axis_of_one_device_takes_any_split() -> None:
    """A script that splits the batch over dp runs on one device too; the plan says R."""
    plan = planner(mlp(64, 64), "dp=1", 32, 64).add_input_constraints(["S(0)"]).pin("0.weight", "S(1)").optimize()
    assert plan.parameters["0.weight"].placements == ("R",)
