"""MXFP8 in whole plans: run on every rank against one device, and what its casts, GEMMs and gathers cost."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from autoparallel_fp8.cost_models import Pricing, load_device
from autoparallel_fp8.cost_models.collectives import collective_us
from autoparallel_fp8.cost_models.compute import gemm_us, memory_us, mx_mm_us
from autoparallel_fp8.cost_models.fusion import fuse
from autoparallel_fp8.cost_models.links import Topology, group_link
from graph_samples import in_float32, small_config
from mx_samples import elements, scales, uneven
from split_ops import OnRanks, Sample, kind_of, problems
from test_simulate_plan import Planned, largest_error, values_for
from torch import Tensor, nn
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from autoparallel_fp8 import AutoParallel, CostError, UsageError
from autoparallel_fp8.capture import capture
from autoparallel_fp8.expansion import expand
from autoparallel_fp8.graph import Graph, Node, TensorSpec
from autoparallel_fp8.integrations.hugging_face import build_from_config
from autoparallel_fp8.layout import P, R, split
from autoparallel_fp8.mesh import parse_mesh
from autoparallel_fp8.ops.mx_linear import MXLinear
from autoparallel_fp8.ops.to_mx import from_mx
from autoparallel_fp8.redistribute import steps
from autoparallel_fp8.shards import laid_out, run_step, same_bits, shard, unshard
from autoparallel_fp8.simulate import run_graph

ops = torch.ops.autoparallel_fp8
BF16, F32, E4M3, E8M0 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu
BATCH, SEQ = 4, 32
EMULATED = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED)

pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(preset: str) -> nn.Module:
    """One block with at least two blocks of 32 in every dim that a mesh axis may split."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    return build_from_config({**small_config(preset), **sizes}, 1)


@cache
def mx_graph(preset: str) -> Graph:
    tokens = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta")
    return capture(model_of(preset), (tokens,), recipe="mxfp8")


class OnB200(Planned):
    """Priced for a device that has the kernel."""

    def __init__(self, graph: Graph, mesh: str) -> None:
        super().__init__(graph, mesh)
        self.pricing = Pricing(self.space, self.shape, load_device("B200"))


def nodes_of(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if op in node.op_name]


def linear_planner(
    mesh: str, device: str = "B200", sizes: tuple[int, int, int] = (128, 1024, 512), **options: object
) -> AutoParallel:
    """x[m, k] through Linear(k, n) in MXFP8."""
    m, k, n = sizes
    with torch.device("meta"):
        linear = nn.Linear(k, n, bias=False, dtype=BF16)
    x = torch.empty(m, k, dtype=BF16, device="meta")
    return AutoParallel(nn.Sequential(linear), mesh, inputs=(x,), recipe="mxfp8", device=device, **options)


# ---- the graph -----------------------------------------------------------------------------------------------------


def test_a_block_casts_each_tensor_once_along_each_dim() -> None:
    """q, k and v read one cast of their input, gate and up another; 21 GEMMs share 36 casts."""
    graph = mx_graph("llama3-debug")
    assert (len(nodes_of(graph, "mx_mm")), len(nodes_of(graph, "to_mx"))) == (21, 36)
    assert graph.skipped == (("lm_head", "output head"),)
    assert not nodes_of(graph, "_scaled_mm") and len(nodes_of(graph, "aten.mm")) == 3  # the head's


class _Stack(nn.Module):
    """Equal blocks, one after the other."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


def test_deep_models_are_captured_as_shallow_ones() -> None:
    """Blocks that were not traced are those that would have been."""
    model, x = _Stack(8), torch.empty(32, 32)
    graphs = [capture(model, (x,), recipe="mxfp8", share_blocks=share) for share in (True, False)]
    assert graphs[0] == graphs[1] and len(nodes_of(graphs[0], "mx_mm")) == 8 * 3 - 1  # x needs no gradient


# ---- whole plans ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "mesh", "num_seeds"),
    [
        ("llama3-debug", "tp=2", 3),
        ("llama3-debug", "dp=2,tp=2", 3),
        ("llama3-debug", "dp=2,tp=3", 2),
        ("qwen3-8b", "dp=4", 2),
    ],
)
def test_a_plan_gives_what_one_device_gives(preset: str, mesh: str, num_seeds: int) -> None:
    """Loss and every gradient, to the rounding of single elements; casts and GEMMs are split in every way."""
    planned = OnB200(in_float32(mx_graph(preset)), mesh)
    wanted = run_graph(planned.graph, *values_for(planned.graph), check=True)
    choices = planned.priced()
    assert largest_error(planned.run(choices), wanted) < 1e-2
    placed = set()
    for seed in range(num_seeds):
        choices = planned.at_random(seed)
        assert largest_error(planned.run(choices, seed), wanted) < 1e-2, f"seed {seed}"
        for v, variable in enumerate(planned.shape.variables):
            node = planned.graph.nodes[variable.node]
            if variable.role == "node" and "mx_mm" in node.op_name:
                placed |= {p.kind for slot in planned.shape.sources[v] for p in slot[choices[v]]}
    assert placed == {"R", "S", "P"}


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_every_cast_and_gemm_of_a_model_as_it_is_called_there(mesh: str) -> None:
    """All options that the graph's own factors allow, heads and sequences beside blocks, in its memory orders."""
    space = expand(in_float32(mx_graph("llama3-debug")), parse_mesh(mesh), architecture="cpu")
    kinds = [kind for kind in space.kinds if kind.call.op in (ops.to_mx.default, ops.mx_mm.default)]
    assert len(kinds) > 10
    wrong = []
    for kind in kinds:
        values = iter(made_up(kind.call.tensors))
        args = tuple(next(values) if isinstance(arg, TensorSpec) else arg for arg in kind.call.args)
        wrong += problems(Sample(kind.call.op, args), kind, space.mesh.sizes, 16)
    assert not wrong, "\n".join(wrong[:5])


def made_up(specs: tuple[TensorSpec, ...]) -> list[Tensor]:
    """Tensors of these specs: whole numbers in float8, powers of two in float8_e8m0fnu, else of every size."""
    made = {E4M3: elements, E8M0: scales}
    return [laid_out(made.get(spec.dtype, uneven)(*spec.shape).to(spec.dtype), spec.stride) for spec in specs]


@pytest.mark.parametrize("mode", list(ScaleCalculationMode)[:2])
def test_torchaos_emulated_layers_plan(mode: ScaleCalculationMode) -> None:
    """A model with torchao's own MXFP8Linear, emulated: casts and dequantisation as plain ops, each with a rule."""
    torch.manual_seed(0)
    make = {"kernel_preference": KernelPreference.EMULATED, "scale_calculation_mode": mode, "bias": False}
    model = nn.Sequential(MXFP8Linear(64, 96, **make), nn.ReLU(), MXFP8Linear(96, 64, **make))
    x = torch.randn(4, 32, 64)
    planned = Planned(capture(model, (x,)), "dp=2,tp=2")
    assert planned.space.replicated_ops == ()
    parameters, grad = dict(model.state_dict()), torch.randn(4, 32, 64)
    wanted = run_graph(planned.graph, parameters, [x], [grad])
    y = model(x)
    y.backward(grad)
    torch.testing.assert_close(wanted["output"]["output"], y)
    torch.testing.assert_close(wanted["gradient"]["0.weight"], model[0].weight.grad)
    for seed in range(3):
        choices = planned.at_random(seed)
        assert {"S", "P"} <= set(planned.kinds(choices))
        assert largest_error(_run(planned, choices, parameters, x, grad), wanted) < 1e-2, f"seed {seed}"


def _run(planned: Planned, choices: tuple[int, ...], parameters: dict[str, Tensor], x: Tensor, grad: Tensor):
    from autoparallel_fp8.simulate_plan import run_plan

    return run_plan(planned.space, planned.shape, choices, planned.pricing.routes, parameters, [x], [grad])


def test_weights_that_torchao_wrapped_are_seen() -> None:
    """`quantize_(model, MXFP8TrainingOpConfig(...))` plans as the layers it stands for, not in bfloat16."""
    x = torch.empty(4, 32, 64, device="meta")
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 64, bias=False))
        layers = [
            MXFP8Linear(*sizes, bias=False, kernel_preference=KernelPreference.EMULATED)
            for sizes in ((64, 96), (96, 64))
        ]
    quantize_(plain, EMULATED, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    wanted = capture(nn.Sequential(layers[0], nn.ReLU(), layers[1]), (x,))
    assert str(capture(plain, (x,))) == str(wanted)  # as text, since NaN is not equal to NaN


@pytest.mark.parametrize("wgrad_with_hp", [False, True])
def test_layers_on_torchaos_kernels_plan_on_any_machine(wgrad_with_hp: bool) -> None:
    """MXFP8Linear and wrapped weights that do not ask for emulation become the same layers of ours."""
    x = torch.empty(4, 32, 64, device="meta")
    with torch.device("meta"):
        layer = MXFP8Linear(64, 96, wgrad_with_hp=wgrad_with_hp, scale_calculation_mode=ScaleCalculationMode.FLOOR)
        ours = MXLinear(64, 96, wgrad_with_hp=wgrad_with_hp, scaling_mode="floor")
        wrapped = nn.Linear(64, 96)
    config = MXFP8TrainingOpConfig(wgrad_with_hp=wgrad_with_hp, scale_calculation_mode=ScaleCalculationMode.FLOOR)
    graphs = [capture(nn.Sequential(model), (x,)) for model in (ours, layer, quantize_(wrapped, config) or wrapped)]
    assert graphs[0] == graphs[1] == graphs[2]
    assert len(nodes_of(graphs[0], "mx_mm")) == 2 - wgrad_with_hp and len(nodes_of(graphs[0], ".mm")) == wgrad_with_hp
    assert type(layer) is MXFP8Linear and type(wrapped) is nn.Linear  # the model is only read


def test_a_wrapped_weight_that_is_no_linears() -> None:
    """Its products cannot be seen: refused, not planned in full precision."""
    conv = nn.Sequential(nn.Conv1d(4, 4, 3))
    quantize_(conv, EMULATED, filter_fn=lambda module, name: isinstance(module, nn.Conv1d))
    with pytest.raises(UsageError, match=r"weight of a Conv1d is a MXFP8TrainingWeightWrapperTensor.*\n  at: 0"):
        capture(conv, (torch.empty(4, 4, 8),))


# ---- the contracted dim split (pytorch/pytorch#191992) -------------------------------------------------------------


def test_a_split_k_is_an_option_and_adds_up() -> None:
    """x[128, 1024] and w[512, 1024] both S(1): parts of the sum, and each rank's blocks are those of the whole."""
    x, weight = (torch.randn(n, 1024, generator=torch.Generator().manual_seed(n)) for n in (128, 512))
    data_x, scale_x = ops.to_mx(x, E4M3, 32, 1, "rceil")
    data_w, scale_w = (t.t() for t in ops.to_mx(weight, E4M3, 32, 1, "rceil"))
    sample = Sample(ops.mx_mm.default, (data_x, data_w, scale_x, scale_w, F32))
    on_ranks = OnRanks(sample, kind_of(sample, (2,)), (2,))
    (option,) = [o for o in on_ranks.kind.options if o.operands[0] == (split(1),)]
    assert option.operands == ((split(1),), (split(0),), (split(1),), (split(0),)) and option.results == ((P,),)
    for rank, part in enumerate(x.chunk(2, 1)):
        data, scale = ops.to_mx(part, E4M3, 32, 1, "rceil")
        assert same_bits(data, on_ranks.shards(0, option.operands[0])[rank])
        assert same_bits(scale, on_ranks.shards(2, option.operands[2])[rank])
    made = on_ranks.run(option, [on_ranks.shards(k, layout) for k, layout in enumerate(option.operands)])
    wanted = from_mx(data_x, scale_x, 1, F32) @ from_mx(data_w, scale_w, 0, F32)
    torch.testing.assert_close(made[0][0] + made[1][0], wanted)


def test_a_plan_splits_k() -> None:
    """Input and weight pinned to S(1): casts and GEMM stay split, the product is P(sum), nothing is gathered."""
    plan = linear_planner("tp=2").add_input_constraints(["S(1)"]).pin("0.weight", "S(1)").optimize()
    forward = {node.name: node for node in plan.nodes if "backward" not in node.name}
    assert forward["0.mx_mm"].output == ("P(sum)",)
    assert forward["0.to_mx"].output == ("S(1)", "S(1)") and forward["0.to_mx_2"].output == ("S(0)", "S(0)")
    assert forward["0.mx_mm"].local_shapes[-1] == (128, 512)
    assert not [c for c in plan.collectives if c.kind == "all_gather" and c.dtype.startswith("float8")]


def test_a_split_that_would_cut_a_block_is_no_option() -> None:
    """64 of k in two blocks: two ranks take one each, four cannot."""
    sample = Sample(ops.to_mx.default, (uneven(12, 64), E4M3, 32, 1, "rceil"))
    ways = {count: [o.results[0] for o in kind_of(sample, (count,)).options] for count in (2, 4)}
    assert (split(1),) in ways[2] and ways[4] == [(R,), (split(0),)]
    summed = Sample(ops.mx_mm.default, (torch.zeros(8, 64).to(E4M3), torch.zeros(16, 64).to(E4M3).t(), *_ones(8, 16)))
    assert [o.results[0] for o in kind_of(summed, (4,)).options] == [(R,), (split(0),), (split(1),)]


def _ones(m: int, n: int) -> tuple[Tensor, Tensor, torch.dtype]:
    codes = torch.full((m, 2), 127, dtype=torch.uint8), torch.full((n, 2), 127, dtype=torch.uint8)
    return codes[0].view(E8M0), codes[1].view(E8M0).t(), F32


# ---- bytes and times -----------------------------------------------------------------------------------------------


def test_a_gather_moves_a_byte_an_element_and_one_a_block() -> None:
    """Data and scale of a cast weight: 1.031 bytes an element priced, and bytes are what moves."""
    weight = uneven(512, 1024)
    moved = 0
    for whole in ops.to_mx(weight, E4M3, 32, 1, "rceil"):
        spec = TensorSpec(tuple(whole.shape), tuple(whole.stride()), whole.dtype)
        factors = tuple((size,) for size in spec.shape)
        (gather,) = [s for s in steps(spec, factors, (split(0),), (2,), ((0, 0),)) if s.target == (R,)]
        assert (gather.kind, gather.reduction) == ("all_gather", "")
        moved += gather.num_bytes
        whole_again = run_step(shard(whole, factors, (split(0),), (2,)), gather, spec, factors, (2,))
        assert all(same_bits(local, whole) for local in whole_again)
        assert same_bits(unshard(whole_again, factors, (R,), (2,), spec.shape), whole)
    assert moved == 512 * 1024 * 33 // 32


def test_fsdp_gathers_weights_after_the_cast() -> None:
    """Weights split over dp and tokens too: what is gathered is cast data and its scales, once for each GEMM."""
    planner = linear_planner("dp=2", sizes=(16384, 8192, 8192)).add_input_constraints(["S(0)"])
    plan = planner.pin("0.weight", "S(0)").add_node_constraint("0.mx_mm", "S(0)").optimize()
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    assert {c.dtype: c.bytes for c in gathers} == {"float8_e4m3fn": 8192**2, "float8_e8m0fnu": 8192**2 // 32}
    space = planner.space()
    link = group_link(space.mesh, ("dp",), load_device("B200"), Topology())
    assert all(c.us == pytest.approx(collective_us("all_gather", c.bytes, link), rel=0.3) for c in gathers)


def specs_of(m: int, k: int, n: int) -> tuple[TensorSpec, ...]:
    """Operands of an MX GEMM."""
    blocks = k // 32
    scales = TensorSpec((m, blocks), (blocks, 1), E8M0), TensorSpec((blocks, n), (1, blocks), E8M0)
    return TensorSpec((m, k), (k, 1), E4M3), TensorSpec((k, n), (1, k), E4M3), *scales


def test_a_gemm_runs_at_the_mx_rate_after_its_scales_are_swizzled() -> None:
    """[8192, 8192] x [8192, 8192] on a B200: 64 x 64 tiles over 148 units, 4500 TFLOP/s at 0.69 of peak."""
    device, operands = load_device("B200"), specs_of(8192, 8192, 8192)
    gemm = 2 * 8192**3 / (4500e12 * 0.69) * 1e6 * (1 + (28 / (4096 / 148) - 1) / 2)
    swizzle = 2 * (2.0 + 2 * 8192 * 256 / (8.0e12 * 0.87) * 1e6)  # two launches; 2 MiB of scales read and written each
    assert mx_mm_us(operands, device) == pytest.approx(gemm + swizzle)
    assert swizzle < 0.02 * gemm


def test_emulated_it_dequantises_and_multiplies_in_bfloat16() -> None:
    """On an H100: a byte read and two written for each element, then a bfloat16 GEMM."""
    device, operands = load_device("H100"), specs_of(4096, 4096, 4096)
    wide = [TensorSpec(spec.shape, spec.stride, BF16) for spec in operands[:2]]
    dequantise = 2 * (device.launch_us + memory_us(3 * 4096 * 4096, device))
    assert mx_mm_us(operands, device, emulated=True) == pytest.approx(dequantise + gemm_us(*wide, None, device))
    with pytest.raises(CostError, match='no kernel for recipe "mxfp8"'):
        mx_mm_us(operands, device)


def test_a_cast_along_rows_fuses_and_one_along_columns_reads_again() -> None:
    """Silu is cast in the kernel that makes it, its gradient along tokens in a second one that reads it again."""
    with torch.device("meta"):
        first, second = (MXLinear(64, 64, bias=False, dtype=BF16) for _ in range(2))
    graph = capture(nn.Sequential(first, nn.SiLU(), second), (torch.empty(128, 64, dtype=BF16, device="meta"),))
    traffic = dict(zip((node.name for node in graph.nodes), fuse(graph).traffic, strict=True))
    fused, turned = traffic["2.to_mx"], traffic["0.backward.to_mx"]
    assert (fused.reads, fused.writes, fused.starts_kernel) == ((), (0, 1), False)
    assert graph.nodes[next(_named(graph, "0.backward.to_mx").reads()).node].op is torch.ops.aten.t.default
    assert (turned.reads, turned.writes, turned.starts_kernel) == (((0, 2.0),), (0, 1), True)
    assert traffic["1.backward.silu_backward"].writes == (0,)
    assert not fused.is_own_kernel and not turned.is_own_kernel


def _named(graph: Graph, name: str) -> Node:
    (node,) = (node for node in graph.nodes if node.name == name)
    return node


# ---- the library's front door --------------------------------------------------------------------------------------


def test_devices_without_the_kernel() -> None:
    """Are refused with those that have it, or planned as emulated."""
    with pytest.raises(UsageError, match=r'h100 \(sm90\) has no kernel for recipe "mxfp8"\n.*\n  do: .*b200'):
        linear_planner("tp=2", "H100")
    emulated = linear_planner("tp=2", "H100", emulate=True).optimize()
    assert "h100 has no kernel for mxfp8: emulated in bfloat16" in str(emulated)
    assert emulated.recipe == "mxfp8" and '"mxfp8"' in emulated.to_json()
    assert linear_planner("tp=2").optimize().step_time_us["compute"] < emulated.step_time_us["compute"]


def test_tokens_that_are_no_whole_blocks() -> None:
    """Name the layer and the next legal sequence."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=BF16))
    x = torch.empty(3, 10, 64, dtype=BF16, device="meta")
    with pytest.raises(UsageError) as caught:
        AutoParallel(model, "dp=3", inputs=(x,), recipe="mxfp8", device="B200").optimize()
    assert str(caught.value) == (
        "30 tokens are not a multiple of 32: MXFP8 casts the gradient of a weight along tokens\n  at: 0\n"
        "  do: give a batch x sequence of a multiple of 32 tokens: the smallest from here is 3 x 32 (96 tokens)"
    )


def test_options_that_the_kernel_refuses_say_why() -> None:
    """N = 48 over two ranks leaves 24 on an MI350X, which wants 32."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 96, bias=False, dtype=BF16))
    graph = capture(model, (torch.empty(128, 64, dtype=BF16, device="meta"),), recipe="mxfp8")
    space = expand(graph, parse_mesh("tp=2"), architecture="gfx950")
    sentences = {r.sentence for kind in space.kinds for r in kind.refused}
    assert sentences == {
        "mat2 local [64, 48]: 48 is not a multiple of 32",
        "mat1 local [48, 128]: 48 is not a multiple of 32",
    }
    assert not any(kind.refused for kind in expand(graph, parse_mesh("tp=2"), architecture="sm100").kinds)
