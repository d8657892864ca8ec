"""What a rank is given of a model: cut from its values, or initialised so that the mesh does not show in them."""

from __future__ import annotations

import doctest
import importlib
import itertools
from collections.abc import Callable
from functools import partial
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoparallel_fp8 import materialize as module
from autoparallel_fp8.errors import ApplyError
from autoparallel_fp8.layout import Layout, R, local_factors, split, universe
from autoparallel_fp8.materialize import Init, Place, local_part, materialize
from autoparallel_fp8.parts import coordinates
from autoparallel_fp8.shards import same_bits, shard, unshard

MESHES = [(1,), (2,), (2, 2)]


class Tied(nn.Module):
    """An embedding and a head with one weight, norms with buffers, attention whose inner linear an outer one fills."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 16)
        self.head.weight = self.embedding.weight


class Scaled(nn.Module):
    """A linear, and a weight of its own that no function of the module fills."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4, bias=False)
        self.scale = nn.Parameter(torch.full((8,), 3.0))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def layout_of(tensor: Tensor, sizes: tuple[int, ...]) -> Layout:
    """Every axis on the first dim that divides, the others whole: plain, strided and replicated parts."""
    factors = tuple((size,) if size > 1 else () for size in tensor.shape)
    for d in range(tensor.ndim):
        if factors[d] and local_factors(factors, (split(d),) * len(sizes), sizes):
            return (split(d),) * len(sizes)
    return (R,) * len(sizes)


def place_in(model: nn.Module, sizes: tuple[int, ...], name: str) -> Place:
    tensor = getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
    factors = tuple((size,) if size > 1 else () for size in tensor.shape)
    return Place(factors, layout_of(tensor, sizes), tensor.dtype)


def materialized(
    model: nn.Module, sizes: tuple[int, ...], seed: int = 0, init: Init | None = None
) -> dict[str, Tensor]:
    """The parts of all ranks, joined; the joining holds replicas against each other."""
    place = partial(place_in, model, sizes)
    ranks = [materialize(model, place, sizes, c, device="cpu", seed=seed, init=init) for c in coordinates(sizes)]
    found = {}
    for name in ranks[0]:
        at = place(name)
        shape = tuple(getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]).shape)
        found[name] = unshard([rank[name] for rank in ranks], at.factors, at.layout, sizes, shape)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


# ---- parts of tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_part_is_what_shard_cuts_and_owns_its_memory(dtype: torch.dtype) -> None:
    """Any layout, any memory order; the whole tensor may be freed."""
    shape, factors, sizes = (12, 1, 8), ((3, 4), (), (8,)), (2, 2)
    splits = ((0, 0), (0, 1), (2, 0))
    for order in itertools.permutations(range(3)):
        stored = torch.arange(prod(shape)).reshape([shape[d] for d in order]).to(torch.float32).to(dtype)
        whole = stored.permute([order.index(d) for d in range(3)])
        for layout in universe(factors, sizes, splits, "").layouts:
            wanted = shard(whole, factors, layout, sizes)
            for coordinate, want in zip(coordinates(sizes), wanted, strict=True):
                part = local_part(whole, factors, layout, sizes, coordinate, tuple(whole.stride()))
                assert same_bits(part, want) and part.stride() == want.stride()
                assert part.untyped_storage().nbytes() == part.numel() * dtype.itemsize


def test_a_whole_part_is_a_copy() -> None:
    """Replicated on one rank too: the optimizer writes into it."""
    whole = torch.arange(4)
    local_part(whole, ((4,),), (R,), (1,), (0,), (1,)).zero_()
    assert whole.tolist() == [0, 1, 2, 3]


# ---- models with values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_values_that_are_there_are_taken(sizes: tuple[int, ...]) -> None:
    """Parameters and buffers, a tied weight once, under its first name."""
    model = Tied()
    model.norm.running_mean += 1.0
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = materialized(model, sizes)
    assert "embedding.weight" in found and "head.weight" not in found
    assert same(found, {name: tensor.detach() for name, tensor in named.items()})


def test_parts_have_the_dtype_asked_for() -> None:
    """float32 masters of a bfloat16 model."""
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    place = Place(((4,), (4,)), (split(0),), torch.float32)
    bias = Place(((4,),), (split(0),), torch.float32)
    found = materialize(model, {"weight": place, "bias": bias}.__getitem__, (2,), (1,), device="cpu")
    assert same_bits(found["weight"], model.weight[2:].detach().float())


def test_a_plain_attribute_is_a_buffer() -> None:
    """As in the graph."""
    model = nn.Linear(2, 2)
    model.table = torch.arange(4)
    assert materialized(model, (2,))["table"].tolist() == [0, 1, 2, 3]


def test_weights_that_torchao_wrapped_are_cut_inside() -> None:
    """`quantize_` with an MXFP8 training config: the parts are plain tensors."""
    config = pytest.importorskip("torchao.prototype.moe_training.config").MXFP8TrainingOpConfig()
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
    whole = model[0].weight.detach().clone()
    importlib.import_module("torchao.quantization").quantize_(model, config)
    assert type(model[0].weight.detach()) is not Tensor
    place = Place(((32,), (64,)), (split(0),), torch.bfloat16)
    bias = Place(((32,),), (split(0),), torch.bfloat16)
    found = materialize(model, {"0.weight": place, "0.bias": bias}.__getitem__, (2,), (1,), device="cpu")
    assert type(found["0.weight"]) is Tensor and same_bits(found["0.weight"], whole[16:])


def test_weights_of_several_tensors_are_refused() -> None:
    """Data and scales of a quantized weight have no one part."""
    from torch.testing._internal.two_tensor import TwoTensor  # a wrapper of two, for tests

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4)))
    with pytest.raises(
        ApplyError, match=r"the values of a TwoTensor are 2 tensors.*\n  at: weight\n  do: apply the plan"
    ):
        materialize(model, {}.__getitem__, (2,), (1,), device="cpu")


# ---- models on the meta device ---------------------------------------------------------------------------------------


def test_the_mesh_does_not_show_in_the_values() -> None:
    """Equal on one rank, two and four; nothing left unwritten; torch's own values for norms and attention."""
    model = on_meta(Tied)
    one, two, four = (materialized(model, sizes) for sizes in MESHES)
    assert same(one, two) and same(two, four)
    assert all(tensor.isfinite().all() for tensor in one.values())
    assert (
        one["norm.weight"].eq(1).all() and one["norm.running_var"].eq(1).all() and one["norm.num_batches_tracked"] == 0
    )
    assert one["attention.out_proj.bias"].eq(0).all(), "attention has the last word over its linear's bias"
    assert 0.5 < one["embedding.weight"].std() < 1.5
    assert all(tensor.is_meta for tensor in model.parameters()), "the model is only read"


def test_other_modules_do_not_show_in_the_values() -> None:
    """A module's values depend on the seed and its name."""
    short, long = (on_meta(lambda n=n: nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))) for n in (2, 3))
    few, many = materialized(short, (1,)), materialized(long, (2,))
    assert all(same_bits(few[name], many[name]) for name in few)
    assert not torch.equal(many["0.weight"], many["1.weight"])
    assert not torch.equal(few["0.weight"], materialized(short, (1,), seed=1)["0.weight"])


def test_random_numbers_of_the_caller_go_on() -> None:
    """Initialising draws none of them."""
    before = torch.get_rng_state()
    materialized(on_meta(Tied), (1,))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_has_values_stays_where_the_rest_is_on_meta() -> None:
    """A module half on the meta device: its reset fills the other half."""
    model = on_meta(lambda: nn.BatchNorm1d(4))
    model.running_mean = torch.full((4,), 5.0)
    found = materialized(model, (2,))
    assert found["running_mean"].eq(5).all() and found["running_var"].eq(1).all()
    assert model.running_mean.eq(5).all()


def test_init_is_called_as_apply_would() -> None:
    """After the module's own, on the module and then on those around it; it may fill, rescale or replace."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.mul_(0).add_(1)
        if isinstance(module, Scaled):
            module.inner.weight.add_(1)
            module.scale = nn.Parameter(torch.full((8,), 3.0))
            module.mask.fill_(True)

    for sizes in MESHES:
        found = materialized(on_meta(Scaled), sizes, init=init)
        assert found["inner.weight"].eq(2).all() and found["scale"].eq(3).all() and found["mask"].all()


def test_one_module_is_whole_at_a_time() -> None:
    """When a module is initialised, what the ones before it needed is freed."""
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))))
    alive: list[StorageWeakRef] = []
    seen = []

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert not [ref for ref in alive if not ref.expired()]
            alive[:] = [StorageWeakRef(p.untyped_storage()) for p in module.parameters()]
            seen.append(module)

    place = partial(place_in, model, (2,))
    found = materialize(model, place, (2,), (0,), device="cpu", init=init)
    assert len(seen) == 5 and len(found) == 10
    assert all(ref.expired() for ref in alive)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_modules_are_initialised_on_the_gpu() -> None:
    """Parts are there, the mesh does not show, the device's own random numbers go on."""
    model, before = on_meta(Tied), torch.cuda.get_rng_state()
    parts = {}
    for sizes in ((1,), (2,)):
        place = partial(place_in, model, sizes)
        parts[sizes] = [materialize(model, place, sizes, c, device="cuda") for c in coordinates(sizes)]
    assert torch.equal(torch.cuda.get_rng_state(), before)
    (whole,), halves = parts[(1,)], parts[(2,)]
    assert all(tensor.is_cuda for tensor in whole.values())
    assert torch.equal(torch.cat([half["embedding.weight"] for half in halves]), whole["embedding.weight"])
    assert not torch.equal(whole["embedding.weight"][:8], whole["embedding.weight"][8:])


# ---- what cannot be initialised --------------------------------------------------------------------------------------


def test_what_nobody_initialises_is_named() -> None:
    """Parameters, and buffers of a dtype without NaN."""
    with pytest.raises(ApplyError, match=r"nothing initialises scale, mask\n  at: model\n  do: pass init="):
        materialized(on_meta(Scaled), (2,))


def test_half_filled_floats_are_named() -> None:
    """A table of which an init fills the first half only."""
    model = on_meta(nn.Module)
    model.table = torch.empty(4, device="meta")
    with pytest.raises(ApplyError, match="nothing initialises table"):
        materialized(model, (1,), init=lambda module: module.table[:2].fill_(0.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_table_is_filled_or_named(dtype: torch.dtype) -> None:
    """Every kind of dtype: unwritten is seen, zeros and ones are values."""
    model = on_meta(nn.Module)
    model.table = torch.empty_strided((4, 2), (1, 4), dtype=dtype, device="meta")
    with pytest.raises(ApplyError, match="nothing initialises table"):
        materialized(model, (1,))
    for value in (0, 1):
        found = materialized(model, (2,), init=lambda module, v=value: module.table.copy_(torch.full((4, 2), v)))
        assert found["table"].float().eq(value).all() if dtype != torch.complex64 else found["table"].eq(value).all()


def test_an_init_that_reads_other_modules_fails_with_its_place() -> None:
    """They are on the meta device; the error says so."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Sequential):
            module[0].weight.copy_(module[1].weight)

    with pytest.raises(
        ApplyError, match=r"(?s)initialising a Linear failed: .*at: 0\n  do: initialise each module from"
    ):
        materialized(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), (1,), init=init)


def test_an_init_may_not_change_a_shape() -> None:
    """The plan is for the shape that the model had."""

    def init(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.zeros(3))

    with pytest.raises(ApplyError, match=r"shape \[3\] instead of \[2\]\n  at: weight"):
        materialized(on_meta(lambda: nn.LayerNorm(2)), (1,), init=init)


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def hugging_face(name: str, **settings: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    config = getattr(transformers, f"{name}Config")(**sizes, bos_token_id=1, eos_token_id=2, **settings)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def llama() -> nn.Module:
    return hugging_face("Llama", intermediate_size=96, num_key_value_heads=2, tie_word_embeddings=True)


def test_a_llama_is_initialised_as_transformers_would() -> None:
    """Tied weights once, norms one, the tables of rotary embeddings right, linears normal with the config's width."""
    found, real = materialized(on_meta(llama), (2,)), llama()
    assert "model.embed_tokens.weight" in found and "lm_head.weight" not in found
    assert set(found) == {name for name, _ in [*real.named_parameters(), *real.named_buffers()]}
    for name, tensor in [*real.named_parameters(), *real.named_buffers()]:
        if tensor.ndim == 1:
            assert same_bits(found[name], tensor.detach()), name
        else:
            assert found[name].std().item() == pytest.approx(0.02, rel=0.1), name


def test_a_gpt2_has_its_scaled_projections() -> None:
    """The attention and MLP around a projection initialise it again, narrower; the order of calls holds."""
    found = materialized(on_meta(lambda: hugging_face("GPT2")), (2, 2))
    assert found["transformer.h.0.attn.c_attn.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert found["transformer.h.0.attn.c_proj.weight"].std().item() == pytest.approx(0.01, rel=0.1)


def test_a_mixtral_has_its_experts() -> None:
    """Parameters of a module of transformers' own."""
    build = partial(hugging_face, "Mixtral", intermediate_size=96, num_key_value_heads=2, num_local_experts=4)
    found = materialized(on_meta(build), (2,))
    assert found["model.layers.1.mlp.experts.gate_up_proj"].std().item() == pytest.approx(0.02, rel=0.1)


def test_the_innermost_model_around_a_module_says_how() -> None:
    """A model of transformers inside another, and that inside a plain module."""
    transformers = pytest.importorskip("transformers")

    class Outer(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.weight)

    model = on_meta(lambda: hugging_face("Llama", intermediate_size=96, tie_word_embeddings=False))
    model.__class__ = Outer
    found = materialized(nn.Sequential(model), (1,))
    assert found["0.lm_head.weight"].eq(0).all()
    assert found["0.model.layers.0.self_attn.q_proj.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def test_a_weight_that_transformers_does_not_know_is_reset() -> None:
    """As when the layer is built: its own reset first, then transformers over what it knows."""

    class Adapted(nn.Linear):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes, bias=False)
            self.gain = nn.Parameter(torch.ones(sizes[1]))

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if hasattr(self, "gain"):
                nn.init.ones_(self.gain)

    model = on_meta(llama)
    model.model.layers[0].mlp.up_proj = on_meta(lambda: Adapted(64, 96))
    found = materialized(model, (2,))
    assert found["model.layers.0.mlp.up_proj.gain"].eq(1).all()
    assert found["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def test_the_examples_hold() -> None:
    """Those in the docstrings."""
    assert doctest.testmod(module).failed == 0
