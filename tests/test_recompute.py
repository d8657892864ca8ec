"""Recomputation: the same numbers from fewer kept bytes, in the graph and in whole plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from autoparallel_fp8.cost_models.fusion import fuse
from autoparallel_fp8.rules import HEAVY_OPS
from family_models import family_graph
from graph_samples import captured
from test_capture import Nested, held, nested_call, small, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoparallel_fp8 import AutoParallel, InfeasibleError, Plan
from autoparallel_fp8.capture import capture
from autoparallel_fp8.capture.recompute import MODES, first_equals, recompute, saves_more
from autoparallel_fp8.graph import Graph, Node
from autoparallel_fp8.models.presets import build
from autoparallel_fp8.settings import parse_bytes
from autoparallel_fp8.simulate import run_graph

AGAIN = ("selective", "full")


def kept_bytes(graph: Graph) -> int:
    return sum(graph.spec(ref).num_bytes for ref in fuse(graph).kept)


def kept_names(graph: Graph) -> list[str]:
    return [graph.nodes[ref.node].name for ref in fuse(graph).kept]


def copies(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if ".recompute." in node.name]


def heavy(nodes: list[Node]) -> list[str]:
    return [node.name for node in nodes if node.op in HEAVY_OPS]


# ---- the graph ----


class Dropped(nn.Module):
    """Two layers with dropout, which count their calls and divide by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counted() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.5)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x) / self.get_buffer("count").clone())
        self.get_buffer("count").add_(1)
        return x + self.drop(self.down(self.drop(y)))


Case = tuple[Graph, dict[str, Tensor], tuple[Tensor, ...]]
"""A graph, its parameters and buffers, and a call."""


def language_model(kind: str, recipe: str | None = None) -> Case:
    model = small(kind) if recipe is None else small(kind).to(torch.bfloat16)
    call = (tokens(2, 16), tokens(2, 16))
    return capture(model, call, recipe=recipe), held(model), call


def dropped() -> Case:
    torch.manual_seed(0)
    model, x = Dropped(), torch.randn(32, 16)
    return capture(model, (x,)), held(model), (x,)


def normed() -> Case:
    torch.manual_seed(0)
    model, (x, more) = Nested(), nested_call()
    plain = {f"layers.{i}.plain": vars(model.get_submodule(f"layers.{i}"))["plain"] for i in (0, 1)}
    return capture(model, (x,), kwargs=more), {**held(model), **plain}, (x, more["pos"], more["options"]["k"])


MODELS: dict[str, Callable[[], Case]] = {
    "llama": lambda: language_model("llama"),
    "gpt2": lambda: language_model("gpt2"),
    "tensorwise": lambda: language_model("llama", "tensorwise"),
    "rowwise": lambda: language_model("llama", "rowwise"),
    "dropout": dropped,
    "batch norm": normed,
}


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_stay_the_same_bit_for_bit(name: str) -> None:
    """The changed graph, run op by op, against the one it was made of; forward is as it was, and names are unique."""
    graph, values, call = MODELS[name]()
    tangents = [torch.randn(node.outputs[0].shape) for node in graph.nodes if node.kind == "tangent"]
    wanted = run_graph(graph, values, call, tangents, seed=5)
    for mode in AGAIN:
        changed = recompute(graph, mode)
        assert copies(changed) and recompute(graph, mode) == changed
        assert len({node.name for node in changed.nodes}) == len(changed.nodes)
        forward = [node for node in changed.nodes if node.phase == "forward"]
        assert forward == [node for node in graph.nodes if node.phase == "forward"]
        assert {node.name.replace(".recompute", "") for node in copies(changed)} <= {node.name for node in forward}
        found = run_graph(changed, values, call, tangents, seed=5, check=True)
        for kind, results in wanted.items():
            assert found[kind].keys() == results.keys()
            for target, value in results.items():
                assert torch.equal(found[kind][target], value), (mode, target)


def test_none_changes_nothing() -> None:
    graph = captured("llama3-debug", None)
    assert recompute(graph, "none") is graph


FAMILIES = ("gemma2", "bert", "t5", "vit")
SAMPLES: dict[str, Callable[[], Graph]] = {
    **{str(r): lambda r=r: captured("llama3-debug", r) for r in (None, "tensorwise", "rowwise", "rowwise_with_gw_hp")},
    **{name: lambda name=name: family_graph(name) for name in FAMILIES},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_each_mode_keeps_no_more_than_the_one_before(name: str) -> None:
    """Bytes on one device that would run the whole model; of transformers each mode keeps less."""
    graph = SAMPLES[name]()
    none, selective, full = (kept_bytes(recompute(graph, mode)) for mode in MODES)
    assert none > selective > full


def test_full_keeps_what_layers_are_called_with() -> None:
    """And what stands outside of them: here the last norm, the head and the loss."""
    graph, _, _ = language_model("llama")
    names = kept_names(recompute(graph, "full"))
    assert [name for name in names if "layers." in name] == ["model.layers.0.add_2", "model.layers.1.add_2"]
    outside = [name for name in kept_names(graph) if "layers." not in name]
    assert [name for name in names if "layers." not in name] == outside


def test_selective_keeps_results_of_heavy_ops() -> None:
    """Each is run once; the last GEMM of a layer is not even kept, since only the next layer reads it."""
    graph, _, _ = language_model("llama")
    changed = recompute(graph, "selective")
    inside = [name for name in kept_names(changed) if "layers.0." in name]
    parts = ["self_attn.q_proj.mm", "self_attn.k_proj.mm", "self_attn.v_proj.mm", "self_attn.attention"]
    parts += ["self_attn.attention", "self_attn.o_proj.mm", "mlp.gate_proj.mm", "mlp.up_proj.mm", "add_2"]
    assert inside == [f"model.layers.0.{part}" for part in parts]
    assert copies(changed) and not heavy(copies(changed))


def test_full_runs_all_but_the_last_gemm_of_a_layer_again() -> None:
    """Six GEMMs and attention, for twenty-one and its backward: the fraction that the time of a step grows by."""
    graph, _, _ = language_model("llama")
    again = [name.replace(".recompute", "") for name in heavy(copies(recompute(graph, "full")))]
    once = heavy([node for node in graph.nodes if node.phase == "forward" and node.layer])
    assert sorted(again) == sorted(name for name in once if "down_proj" not in name)
    assert len(once) == 16


def test_copies_run_where_their_layer_begins_in_backward() -> None:
    """Not before backward of the next layer is done: one layer's values are there at a time."""
    graph, _, _ = language_model("llama")
    changed = recompute(graph, "full")
    again = {id(node) for node in copies(changed)}
    places: dict[tuple[str, bool], list[int]] = {}
    for i, node in enumerate(changed.nodes):
        if node.phase == "backward" and node.layer:
            places.setdefault((node.layer, id(node) in again), []).append(i)
    first, second = "model.layers.0", "model.layers.1"
    assert max(places[second, False]) < min(places[first, True])
    for layer in (first, second):
        assert max(places[layer, True]) < places[layer, False][10]


def test_layers_are_treated_alike() -> None:
    """Copies of one layer are those of any other, number for number."""
    graph = capture(small("llama", 3), (tokens(2, 16),))
    for mode in AGAIN:
        again = copies(recompute(graph, mode))
        names = [[node.name for node in again if node.layer == f"model.layers.{k}"] for k in (0, 1, 2)]
        assert [name.replace("layers.0", "layers.1") for name in names[0]] == names[1]
        assert [name.replace("layers.1", "layers.2") for name in names[1]] == names[2]


def test_a_weight_is_cast_once_in_backward() -> None:
    """Copies read the cast that backward makes for itself anyway, which then runs before them."""
    model, call = build("llama3-debug", num_layers=1), (torch.empty(2, 64, dtype=torch.int64),)
    graph = capture(model, call, recipe="tensorwise")
    changed = recompute(graph, "full")

    def casts(graph: Graph) -> list[str]:
        weights = [n for n in graph.nodes if n.phase == "backward" and n.kind == "op" and n.from_parameters]
        return sorted(n.name for n in weights if n.outputs[0].dtype == torch.float8_e4m3fn and "_to_copy" in n.name)

    assert casts(graph) == casts(changed) != []
    firsts = first_equals(changed)
    mine = [i for i, n in enumerate(changed.nodes) if n.phase == "backward" and n.from_parameters]
    assert len({firsts[i] for i in mine}) == len(mine)


def test_maxima_are_found_once() -> None:
    """Float8 data made again has the scale that forward found, for all ranks."""
    for mode in AGAIN:
        again = copies(recompute(captured("llama3-debug", "tensorwise"), mode))
        assert not [node for node in again if "max" in node.op_name]
        assert [node for node in again if node.outputs[0].dtype == torch.float8_e4m3fn]


def test_what_reads_a_changed_buffer_is_kept() -> None:
    """Backward would see the buffer as forward left it."""
    graph, _, _ = dropped()
    assert any(name.startswith("layers.0.div") for name in kept_names(recompute(graph, "full")))
    assert not [node for node in copies(recompute(graph, "full")) if node.op is torch.ops.aten.div.Tensor]


def random_op() -> Graph:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16)])
            self.noise = nn.ModuleList([Noise()])

        def forward(self, x: Tensor) -> Tensor:
            return self.noise[0](torch.tanh(self.layers[0](x)))

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (torch.rand_like(x) + 1) * 2

    return capture(Noisy(), (torch.empty(8, 16),))


def test_random_numbers_are_not_drawn_again() -> None:
    """A second draw would give others."""
    changed = recompute(random_op(), "full")
    drawn = [node for node in changed.nodes if node.kind == "op" and "rand" in node.op_name]
    assert [node.phase for node in drawn] == ["forward"]


def stack(*layers: nn.Module) -> Graph:
    return capture(nn.Sequential(*layers), (torch.empty(32, 16),))


class Pooled(nn.Module):
    """Keeps four numbers a row, which are made of 256."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(16, 256, bias=False).requires_grad_(False), nn.Linear(4, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.wide(x).view(-1, 4, 64).mean(-1))


def test_a_value_stays_where_more_would_be_kept_to_make_it_again() -> None:
    """The mean is kept, not the product that it is of; run again from the layer's input, neither is."""
    graph = stack(nn.Linear(16, 16), Pooled(), nn.Linear(16, 16))
    assert kept_names(graph) == kept_names(recompute(graph, "selective"))
    assert "1.mean" in kept_names(graph)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Linear(16, 16), "the model has no layers, numbered modules such as layers.0"),
        (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), "no layer keeps a value"),
        (nn.Sequential(nn.Linear(16, 16), nn.GELU()).requires_grad_(False), "no layer keeps a value"),
    ],
    ids=["no layers", "layers of one op", "no backward"],
)
def test_where_nothing_changes_a_note_says_so(model: nn.Module, why: str) -> None:
    """Where there are no layers, nothing that they keep inside, or no backward."""
    graph = capture(model, (torch.empty(8, 16),))
    for mode in AGAIN:
        changed = recompute(graph, mode)
        assert (changed.nodes, changed.outputs) == (graph.nodes, graph.outputs)
        assert len(changed.notes) == 1 and changed.notes[0].startswith(f'recompute="{mode}" changes nothing: {why}')
    assert saves_more(graph) == ()


def test_what_would_save_more() -> None:
    graph = captured("llama3-debug", None)
    assert [saves_more(recompute(graph, mode)) for mode in MODES] == [AGAIN, ("full",), ()]


class Checkpointed(nn.Module):
    """Nine layers, behind torch.utils.checkpoint or not."""

    def __init__(self, is_wrapped: bool) -> None:
        super().__init__()
        self.layers, self.is_wrapped = nn.ModuleList(nn.Linear(16, 16) for _ in range(9)), is_wrapped

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_wrapped else layer(x)
        return x


def test_a_models_own_checkpointing_is_left_out_with_a_note() -> None:
    """The graph is that of the model without it."""
    wrapped, plain = (capture(Checkpointed(is_wrapped), (torch.empty(8, 16),)) for is_wrapped in (True, False))
    assert (wrapped.nodes, wrapped.outputs) == (plain.nodes, plain.outputs)
    assert not plain.notes
    (note,) = wrapped.notes
    assert note == "activation checkpointing in the model is left out: recompute= says what backward makes again"


# ---- plans ----


def planned(mode: str, recipe: str | None = None, **more: Any) -> Plan:
    model = build("llama3-debug", num_layers=1)
    return AutoParallel(model, "dp=2,tp=2", recipe=recipe, device="H100", recompute=mode, **more).optimize()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
@pytest.mark.parametrize("mode", AGAIN)
def test_a_plan_gives_the_unsharded_models_numbers(mode: str, recipe: str | None) -> None:
    """On every rank; the plan records what it was asked and says what it did."""
    plan = planned(mode, recipe)
    assert plan.verify().is_ok, str(plan.verify())
    assert plan.settings["recompute"] == mode
    assert any(f'recompute="{mode}": ' in note and "of 1 layer run again" in note for note in plan.notes)


def test_time_grows_and_memory_falls_by_what_is_made_again() -> None:
    """Every copy of a heavy op costs what the op costs in forward."""
    plans = {mode: planned(mode) for mode in MODES}
    compute = {mode: plan.step_time_us["compute"] for mode, plan in plans.items()}
    assert compute["none"] < compute["selective"] < compute["full"]
    none, selective, full = (plans[mode].memory_bytes["activations"] for mode in MODES)
    assert none > selective > full
    us = {node.name: node.compute_us for node in plans["full"].nodes}
    again = [name for name in us if ".recompute." in name and name.endswith((".mm", ".attention"))]
    assert len(again) == 7
    assert all(us[name] == pytest.approx(us[name.replace(".recompute", "")]) for name in again)


def test_own_scales_reach_the_copies() -> None:
    """A GEMM that runs again takes each rank's own scale, as it did in forward: no maximum is reduced for it."""
    plan = planned("full", "tensorwise")
    gemms = [node for node in plan.nodes if node.name.endswith(".recompute._scaled_mm")]
    assert len(gemms) == 6 and all("Frozen" in node.inputs[0] and "Own" in node.inputs[2] for node in gemms)


def test_a_limit_that_full_alone_satisfies() -> None:
    """The others' errors name what would keep less, and the smallest memory without it."""
    more = {"batch": 16, "seq": 64, "time_limit": 6}
    with pytest.raises(InfeasibleError, match="add devices to the mesh, or drop pins") as least:
        planned("full", **more, memory_limit="1 MiB")
    limit = parse_bytes(least.value.message.rpartition("needs ")[2], 0)
    assert planned("full", **more, memory_limit=limit).memory_bytes["total"] <= limit
    with pytest.raises(InfeasibleError, match=r"the smallest needs .*\n.*\n  do: .*, set recompute='full', or drop"):
        planned("selective", **more, memory_limit=limit)
    with pytest.raises(InfeasibleError, match="set recompute='selective' or 'full', or drop pins"):
        planned("none", **more, memory_limit=limit)
