"""Dropout keyed by global position: the mask is sound, every rank agrees on it, and capture numbers every call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from graph_samples import BATCH, SEQ, in_float32, small_config
from test_simulate_plan import Planned, largest_error, values_for
from torch import Tensor, nn

import autoparallel_fp8.capture.trace as capture_stage
from autoparallel_fp8.capture import capture
from autoparallel_fp8.capture.dropout import calls_per_block
from autoparallel_fp8.capture.simplify import simplify
from autoparallel_fp8.errors import CaptureError, RuleError
from autoparallel_fp8.expansion import expand
from autoparallel_fp8.graph import Graph, Node
from autoparallel_fp8.integrations.attention_dropout import build_notes
from autoparallel_fp8.integrations.hugging_face import build_from_config
from autoparallel_fp8.mesh import parse_mesh
from autoparallel_fp8.ops.dropout import draw_seed, dropout, dropout_formula, keep_mask, step_seed
from autoparallel_fp8.simulate import run_graph
from autoparallel_fp8.simulate_plan import run_plan

COUNT = 2**18
SEEDS = (0, 1, 2**31 + 5, 2**62 + 9)


def keep(p: float = 0.5, seed: int = 0, call: int = 0, start: int = 0, step: int = 1) -> Tensor:
    return keep_mask(torch.arange(COUNT) * step + start, p, torch.tensor(seed), call)


# ---- the mask ----


def lowbias32(x: Any) -> Any:
    """The mixer with the constants it is published with, in unsigned words that hold the product of two."""
    x = np.asarray(x, np.uint64)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    return x ^ (x >> np.uint64(16))


@pytest.mark.parametrize("start", [0, 2**32 - 9, 2**40 + 3])
@pytest.mark.parametrize(("seed", "call"), [(0, 0), (1, 2), (2**63 - 1, 100), (-5, 7)])
def test_the_mask_is_the_published_mixer(seed: int, call: int, start: int) -> None:
    """Two rounds of lowbias32 with keys of call and seed, in unsigned words: int64 loses nothing."""
    position = np.arange(start, start + 1000, dtype=np.int64)
    low, high = (np.asarray(x & 0xFFFFFFFF, np.uint64) for x in (position, position >> 32))
    first = lowbias32(np.uint64(seed & 0xFFFFFFFF) ^ lowbias32(call))
    second = lowbias32(np.uint64(seed >> 32 & 0xFFFFFFFF) ^ first)
    words = lowbias32(lowbias32(low ^ first) ^ high ^ second)
    for p in (0.1, 0.5, 0.999):
        found = keep_mask(torch.from_numpy(position), p, torch.tensor(seed), call)
        assert np.array_equal(found.numpy(), words >= round(p * 2**32))


PINNED = {(0, 0): "0xc4862ca", (1, 0): "0x52bae401", (0, 1): "0x28b10fc4", (2**40, 3): "0xc7df942f"}


def test_masks_stay_what_they_are() -> None:
    """A run that is taken up again, on another device or version, drops the same elements."""
    found = [int("".join("01"[k] for k in keep(seed=seed, call=call)[:32].tolist()), 2) for seed, call in PINNED]
    assert [hex(word) for word in found] == list(PINNED.values())


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_are_dropped_as_asked(p: float, seed: int) -> None:
    """Within four standard deviations, near position 0, far from it, and along a stride of a power of two."""
    for start, step in ((0, 1), (2**33, 1), (5, 4096)):
        dropped = COUNT - int(keep(p, seed, 4, start, step).sum())
        assert abs(dropped - COUNT * p) < 4 * (COUNT * p * (1 - p)) ** 0.5


def chi_square(bins: Tensor, num_bins: int) -> float:
    """Of how often each bin is hit, against all alike, in standard deviations from what chance gives."""
    hits = torch.bincount(bins.flatten(), minlength=num_bins).double()
    expected = bins.numel() / num_bins
    statistic = float(((hits - expected) ** 2 / expected).sum())
    return (statistic - (num_bins - 1)) / (2 * (num_bins - 1)) ** 0.5


def word_of(bits: Tensor) -> Tensor:
    """[..., n] of booleans as numbers below 2 ** n."""
    return (bits.long() << torch.arange(bits.shape[-1])).sum(-1)


@pytest.mark.parametrize("seed", SEEDS)
def test_neighbours_do_not_depend_on_each_other(seed: int) -> None:
    """All patterns of eight elements are equally likely: side by side, and above each other in rows of many lengths."""
    assert abs(chi_square(word_of(keep(seed=seed).view(-1, 8)), 256)) < 4
    for length in (64, 768, 1000, 4096):
        rows = keep(seed=seed)[: COUNT // (8 * length) * 8 * length].view(-1, 8, length)
        assert abs(chi_square(word_of(rows.transpose(1, 2)), 256)) < 4, length


@pytest.mark.parametrize("what", ["seed", "high seed", "call"])
def test_calls_and_seeds_do_not_depend_on_each_other(what: str) -> None:
    """All patterns of one element in eight steps or calls are equally likely, also a little further on in each."""
    of = {
        "seed": lambda k: keep(seed=k),
        "high seed": lambda k: keep(seed=k << 32),
        "call": lambda k: keep(seed=12345, call=k),
    }[what]
    masks = [of(k) for k in range(8)]
    for shift in (0, 1, 2):
        moved = torch.stack([mask.roll(shift * k) for k, mask in enumerate(masks)], -1)
        assert abs(chi_square(word_of(moved), 256)) < 4


def test_no_call_has_the_mask_of_another_in_a_different_order() -> None:
    """One round alone would: the first keys of two calls, exclusive-or'ed, would lead from one to the other."""
    between = int(lowbias32(3 ^ int(lowbias32(0))) ^ lowbias32(3 ^ int(lowbias32(1))))
    position = torch.arange(COUNT)
    a, b = (keep_mask(at, 0.5, torch.tensor(3), call) for at, call in ((position ^ between, 0), (position, 1)))
    assert abs(chi_square(word_of(torch.stack([a, b], -1)), 4)) < 4


def test_seeds_follow_torchs_generator() -> None:
    """The same after manual_seed, another one each time, over the whole range."""
    torch.manual_seed(1)
    first = [int(draw_seed()) for _ in range(8)]
    torch.manual_seed(1)
    assert [int(draw_seed()) for _ in range(8)] == first
    assert len(set(first)) == 8 and max(first) > 2**60
    assert int(draw_seed(torch.Generator().manual_seed(1))) == first[0]


# ---- the op ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_values_and_gradient(dtype: torch.dtype, p: float) -> None:
    """Kept elements are those of torch's fused dropout bit for bit; the gradient passes where the value did."""
    x = torch.randn(64, 48, dtype=dtype).requires_grad_()
    seed = torch.tensor(9)
    out = dropout(x, p, seed, 2)
    kept = keep_mask(torch.arange(x.numel()).view(x.shape), p, seed, 2)
    scaled = torch.ops.aten.native_dropout(x.detach(), 0.0, True)[0] * (1 / (1 - p))
    assert out.dtype == dtype and torch.equal(out, torch.where(kept, scaled, 0.0))
    grad = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(found, dropout(grad, p, seed, 2))


def test_nothing_and_everything_dropped() -> None:
    """p = 0 and p = 1 are F.dropout's, gradients too."""
    x = torch.randn(8, 6, requires_grad=True)
    for p in (0.0, 1.0):
        out, expected = dropout(x, p, torch.tensor(1), 0), F.dropout(x, p)
        assert torch.equal(out, expected)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)))


def test_the_memory_order_is_that_of_the_operand() -> None:
    """Positions count in row-major order whatever the order in memory."""
    x = torch.randn(4, 6, 8)
    for moved in (x.transpose(0, 2), x.transpose(0, 1), x):
        out = dropout(moved, 0.5, torch.tensor(3), 1)
        assert out.stride() == moved.stride()
        assert torch.equal(out, dropout(moved.contiguous(), 0.5, torch.tensor(3), 1))


def test_the_op_is_registered_in_full() -> None:
    """torch's own check of schema, fake kernel and autograd registration; the seed's stand-in cannot run."""
    torch.library.opcheck(dropout, (torch.randn(4, 6, requires_grad=True), 0.3, torch.tensor(1), 2))
    with pytest.raises(NotImplementedError, match="comes from whoever runs the graph"):
        step_seed()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_and_compiled_give_the_same_bits(dtype: torch.dtype) -> None:
    """CPU, CUDA, and CUDA compiled by Inductor, with the seed on either device."""
    x = torch.randn(256, 333, dtype=dtype)
    compiled = torch.compile(dropout_formula, fullgraph=True)
    for seed in map(torch.tensor, SEEDS):
        wanted = dropout(x, 0.1, seed, 3)
        for placed in (seed, seed.cuda()):
            assert torch.equal(dropout(x.cuda(), 0.1, placed, 3).cpu(), wanted)
            assert torch.equal(compiled(x.cuda(), 0.1, placed, 3).cpu(), wanted)


# ---- capture ----


def dropouts(graph: Graph, phase: str = "forward") -> list[tuple[str, float, int]]:
    """(module, p, call) of every dropout node."""
    named = [node for node in graph.nodes if node.op_name == "autoparallel_fp8.dropout.default"]
    return [(node.module, node.args[1], node.args[3]) for node in named if node.phase == phase]


class Forms(nn.Module):
    """Dropout in every form that capture knows, and calls that draw nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop, self.write = nn.Linear(8, 8), nn.Dropout(0.1), nn.Dropout(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.lin(x))
        y = x * 2
        self.write(y)
        y = F.dropout(y, p=0.3, training=True) + F.dropout(y, p=0.3, training=True)
        y = torch.dropout(F.dropout(y), 0.4, train=True)
        return F.dropout(F.dropout(y, 0.5, False), p=0.0) + x


def test_calls_become_the_op_each_with_its_number() -> None:
    """Numbers count calls as they run; backward has the same ones; nothing else of dropout is left."""
    torch.manual_seed(0)
    model, x = Forms(), torch.randn(16, 8)
    graph = capture(model, (x,))
    made = [("drop", 0.1, 0), ("write", 0.2, 1), ("", 0.3, 2), ("", 0.3, 3), ("", 0.5, 4), ("", 0.4, 5)]
    assert dropouts(graph) == made
    assert sorted(dropouts(graph, "backward"), key=lambda one: one[2]) == made
    assert {n.op_name for n in graph.nodes if n.kind == "op"} == {
        "autoparallel_fp8.dropout.default", "aten.t.default", "aten.mm.default", "aten.add.Tensor", "aten.mul.Tensor",
        "aten.sum.dim_IntList",
    }  # fmt: skip
    (seed,) = (node for node in graph.nodes if node.kind == "seed")
    assert (seed.name, seed.outputs[0].shape, seed.outputs[0].dtype) == ("dropout_seed", (), torch.int64)


def test_the_graph_is_the_model_with_these_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients of the model itself, its dropout calls drawing from the op."""
    torch.manual_seed(0)
    model, x = Forms(), torch.randn(16, 8)
    found = run_graph(capture(model, (x,)), dict(model.named_parameters()), (x,), seed=77, check=True)
    numbers = iter(range(6))

    def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True) -> Tensor:
        made = dropout(x, p, torch.tensor(77), next(numbers)) if p and training and train else x
        return x.copy_(made) if inplace else made

    monkeypatch.setattr(F, "dropout", drop)
    monkeypatch.setattr(torch, "dropout", drop)
    out = model(x)
    out.sum().backward()
    torch.testing.assert_close(found["output"]["output"], out)
    torch.testing.assert_close(found["gradient"], {name: p.grad for name, p in model.named_parameters()})


class Seen(nn.Module):
    """Dropout in place on a tensor that a view shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(8, 8), nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        flat = y.view(-1)
        self.drop(y)
        return flat * 2


def test_dropout_in_place_changes_views_too() -> None:
    """What shares the memory sees the new value; an input may not be changed."""
    model, x = Seen(), torch.ones(64, 8)
    found = run_graph(capture(model, (x,)), dict(model.named_parameters()), (x,))["output"]["output"]
    wanted = dropout(model.lin(x), 0.5, torch.tensor(0), 0).view(-1) * 2
    torch.testing.assert_close(found, wanted)
    with pytest.raises(CaptureError, match="forward changes its input in place\n  at: input"):
        capture(nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(8, 8)), (x,))


def test_no_dropout_outside_of_training() -> None:
    """In eval mode, and with p = 0, the graph is that of the model without it, and has no seed."""
    plain = capture(nn.Sequential(nn.Linear(8, 8)), (torch.empty(4, 8),))
    for model in (
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)).eval(),
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0)),
    ):
        assert capture(model, (torch.empty(4, 8),)).nodes == plain.nodes


@pytest.mark.parametrize("call", [F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout, torch.rand_like])
def test_other_random_ops_are_refused(call: Any) -> None:
    """Ranks could not agree on what they draw."""

    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x)
            return y + (call(y) if call is torch.rand_like else call(y, 0.5, True))

    graph = capture(Random(), (torch.empty(2, 4, 8),))
    with pytest.raises(RuleError, match=r"draws random numbers and has no rule.*\n.*\n  do: turn it off \(dropout=0\)"):
        expand(graph, parse_mesh("tp=2"), architecture="cpu")


T5 = {"model_type": "t5", "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("config", "field", "name"),
    [
        (small_config("gpt2"), "attn_pdrop", "GPT2Config"),
        (small_config("llama3-debug"), "attention_dropout", "LlamaConfig"),
        (T5, "dropout_rate", "T5Config"),
    ],
    ids=["gpt2", "llama", "t5"],
)
def test_attention_dropout_names_the_field_to_set(config: dict[str, Any], field: str, name: str) -> None:
    """A Hugging Face config has another name for it in every family, T5 one for all; in eval mode there is none."""
    shell: Any = build_from_config(config, 1)
    shell.config.update({field: 0.1})
    with torch.device("meta"):
        model = type(shell)(shell.config)
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    named = {"input_ids": tokens, "decoder_input_ids": tokens} if field == "dropout_rate" else {"input_ids": tokens}
    message = (
        "attention dropout is not planned: dropout_p is 0.1\n.*\n"
        rf"  do: build the model with {field}=0 in its {name}, or plan model.eval\(\)"
    )
    with pytest.raises(CaptureError, match=message):
        capture(model.train(), (), kwargs=named)
    assert not dropouts(capture(model.eval(), (), kwargs=named))


def test_attention_dropout_of_torchs_module_names_it() -> None:
    """The module and its argument, which forward reads anew."""
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.2, batch_first=True))
    x = torch.empty(2, 4, 32)
    with pytest.raises(CaptureError) as caught:
        capture(model.train(), (x,))
    assert str(caught.value) == (
        "attention dropout is not planned: dropout_p is 0.2\n  at: 0.self_attn\n  do: build the "
        "nn.MultiheadAttention with dropout=0 (model.0.self_attn.dropout = 0), or plan model.eval()"
    )
    model[0].self_attn.dropout = 0.0
    assert len(dropouts(capture(model, (x,)))) == 3


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (small_config("gpt2"), "attn_pdrop"),
        (small_config("llama3-debug"), "attention_dropout"),
        ({"model_type": "bert"}, "attention_probs_dropout_prob"),
        (T5, "dropout_rate"),
    ],
    ids=["gpt2", "llama", "bert", "t5"],
)
def test_a_model_from_a_config_has_no_attention_dropout(config: dict[str, Any], field: str) -> None:
    """A published config can be planned as it is: the plan notes what it left out, other dropout stays."""
    model: Any = build_from_config({**config, field: 0.125}, 1)
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    named = {"input_ids": tokens, "decoder_input_ids": tokens} if field == "dropout_rate" else {"input_ids": tokens}
    graph = capture(model.train(), (), kwargs=named)
    assert graph.notes[0] == "attention dropout 0.125 of the config is planned as 0"
    drops = {p for _, p, _ in dropouts(graph)}
    assert drops == {"bert": {0.1}, "t5": {0.125}}.get(config["model_type"], set())
    assert build_notes(build_from_config({**config, field: 0.0}, 1)) == ()


def gpt2(num_layers: int, share_blocks: bool = True) -> Graph:
    """The graph of a small GPT-2 in training, with dropout after the embedding and twice a block."""
    config = {**small_config("gpt2"), "resid_pdrop": 0.1, "embd_pdrop": 0.2}
    tokens = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta")
    return capture(build_from_config(config, num_layers).train(), (tokens,), share_blocks=share_blocks)


def test_numbers_are_the_same_whether_blocks_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node for node what a full trace gives: every call of the 8 blocks has its own number, forward and backward."""
    traced: list[int] = []

    def counted(graph: Graph) -> Graph:
        traced.append(len(graph.nodes))
        return simplify(graph)

    monkeypatch.setattr(capture_stage, "simplify", counted)
    shared, full = gpt2(8), gpt2(8, share_blocks=False)
    assert len(traced) == 2 and traced[0] < traced[1]
    assert shared == full
    assert [call for _, _, call in dropouts(full)] == list(range(17))
    assert sorted(dropouts(full, "backward")) == sorted(dropouts(full))


def test_blocks_that_count_unevenly_are_not_shared() -> None:
    """The number of calls in a block is what its nodes agree on."""

    def node(call: int) -> Node:
        op = torch.ops.autoparallel_fp8.dropout.default
        return Node("", "op", op, (None, 0.1, None, call), (), (), "forward")

    assert calls_per_block([(node(4), node(6)), (node(5), node(7))]) == 2
    assert calls_per_block([]) == 0
    assert calls_per_block([(node(4), node(6)), (node(5), node(6))]) is None


# ---- plans ----


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=4"])
def test_a_plan_drops_what_one_device_drops(mesh: str) -> None:
    """Loss and every gradient of a GPT-2 in training on all ranks; under another seed they are others."""
    planned = Planned(in_float32(gpt2(1)), mesh)
    values = values_for(planned.graph)
    wanted = {seed: run_graph(planned.graph, *values, seed=seed) for seed in (0, 1)}
    assert largest_error(wanted[1], wanted[0]) > 0.1
    for number in range(5):
        choices, seed = planned.priced() if number == 0 else planned.at_random(number), number % 2
        assert "S" in taken(planned, choices)
        found = run_plan(planned.space, planned.shape, choices, planned.pricing.routes, *values, seed=seed)
        assert largest_error(found, wanted[seed]) < 2e-5, f"choices {number}"


def taken(planned: Planned, choices: tuple[int, ...]) -> set[str]:
    """Kinds of placement chosen for results of dropout."""
    nodes = [i for i, n in enumerate(planned.graph.nodes) if n.op_name == "autoparallel_fp8.dropout.default"]
    return {p.kind for v in nodes for p in planned.space.kind(v).options[choices[v]].results[0]}


@pytest.mark.usefixtures("one_thread")
def test_partial_sums_pass_through_dropout() -> None:
    """Without a bias between, a plan reduces after dropout, in forward and backward."""
    linears = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
    model = nn.Sequential(linears[0], nn.Dropout(0.5), linears[1], nn.Dropout(0.1))
    x = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(0))
    planned = Planned(capture(model, (x,)), "dp=2,tp=2")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    wanted = run_graph(planned.graph, parameters, [x], seed=4)
    kinds: set[str] = set()
    for number in range(8):
        choices = planned.at_random(number)
        kinds |= taken(planned, choices)
        found = run_plan(planned.space, planned.shape, choices, planned.pricing.routes, parameters, [x], seed=4)
        assert largest_error(found, wanted) < 2e-5, f"choices {number}"
    assert kinds == {"R", "S", "P"}
