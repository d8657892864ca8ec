"""Scaled and grouped GEMMs in every recipe, and torchao's ops: rows, constraints, formulas, costs.

`test_rules.py` holds every row of the aten ops by brute force, on the samples of `scaled_samples.py` and
`grouped_samples.py`; here are torchao's, which need not be registered, and what is particular to a recipe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from autoparallel_fp8.cost_models import load_device
from autoparallel_fp8.cost_models.compute import gemm_us, op_us
from autoparallel_fp8.cost_models.fusion import Traffic
from autoparallel_fp8.cost_models.scaled_gemms import products, recipe_of
from autoparallel_fp8.rules import (
    HEAVY_OPS,
    OpCall,
    Signature,
    advice,
    broken_constraints,
    find_rule,
    in_float8_of,
    partial_kinds,
)
from autoparallel_fp8.rules.language import named_rules
from grouped_samples import columns_scales, forms, mx, plain, tokens_scales
from missing_rows import missing_rows, reasons_for
from op_samples import all_samples
from scaled_samples import (
    BF16,
    E4M3,
    E8M0,
    F32,
    block_samples,
    fours,
    operands,
    powers,
    tiled_samples,
    tiles,
    v1,
    v2,
    whole,
)
from split_ops import Sample, call_of, kind_of, problems
from torchao_samples import SCHEMAS, op_of, torchao_samples

from autoparallel_fp8.capture import capture
from autoparallel_fp8.errors import RuleError, UsageError
from autoparallel_fp8.expansion import expand
from autoparallel_fp8.graph import Graph, TensorSpec
from autoparallel_fp8.mesh import parse_mesh
from autoparallel_fp8.ops.grouped_mm import grouped_mm_formula
from autoparallel_fp8.ops.scale_tiles import from_tiles, to_tiles
from autoparallel_fp8.ops.scaled_mm import scaled_mm_formula, scaled_mm_v2_formula, values_of
from autoparallel_fp8.ops.scaling import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, SWIZZLE_32_4_4, inferred_scales
from autoparallel_fp8.ops.stand_ins import stand_in
from autoparallel_fp8.products import format_option, local_specs
from autoparallel_fp8.recipes import convert
from autoparallel_fp8.shards import same_bits

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("one_thread")
ONE_AXIS = [(2,), (3,), (4,)]


def rows_of(sample: Sample, ways: int) -> set[str]:
    """Options of the call over one axis, without what is in brackets."""
    return {format_option(option).replace("[", "").replace("]", "") for option in kind_of(sample, (ways,)).options}


# ---- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_row_of_torchao_ops_gives_the_unsplit_result(name: str) -> None:
    """Axes of 2, 3 and 4, two axes, splits that start inside a dim."""
    wrong, tried = [], 0
    for sample in torchao_samples():
        if sample.op is op_of(name):
            for sizes in [*ONE_AXIS, (2, 2)]:
                kind = kind_of(sample, sizes)
                tried += len(kind.options) - 1
                wrong += problems(sample, kind, sizes, 16)
            wrong += problems(sample, kind_of(sample, (2,), halved=True), (2,))
    assert tried and not wrong, "\n".join(wrong[:5])


def test_no_placement_of_a_recipe_is_missing() -> None:
    """What holds on one axis of 2 has a row or a reason, in every recipe and for torchao's ops."""
    missing = []
    ops = (PLAIN, NAMED, GROUPED, SCALED_GROUPED, aten._scaled_grouped_mm_v2.default)
    for sample in [*(s for op in ops for s in all_samples()[op]), *torchao_samples()]:
        for text in missing_rows(sample, 2):
            if not reasons_for(sample.op, text):
                missing.append(f"{sample.op} {[tuple(t.shape) for t in sample.tensors()]}: {text}")
    assert not missing, "\n".join(missing)


def test_blocks_of_128_are_split_whole() -> None:
    """K = 384 is three blocks and N = 256 two: neither comes apart in the other's number of parts."""
    a, b = operands(24, 384, 256)
    sample = v1(a, b, powers(24, 3, order="T"), powers(3, 2, order="T"))
    assert rows_of(sample, 2) == {"R x R x R x R -> R", "S(0) x R x S(0) x R -> S(0)", "R x S(1) x R x S(1) -> S(1)"}
    assert rows_of(sample, 3) == {
        "R x R x R x R -> R",
        "S(0) x R x S(0) x R -> S(0)",
        "S(1) x S(0) x S(1) x S(0) -> P(sum)",
    }


def test_swizzled_scales_follow_whole_tiles() -> None:
    """x [128, 1024] and w [512, 1024]: k splits tile columns of both, n tile rows of one; other parts run a program."""
    a, b = operands(128, 1024, 512)
    sample = v1(a, b, tiles(128, 32), tiles(512, 32))
    assert rows_of(sample, 2) == {
        "R x R x R x R -> R",
        "S(0) x R x R x R -> S(0)",  # 64 rows are half a tile: each rank swizzles its own
        "S(1) x S(0) x S(0) x S(0.1) -> P(sum)",  # a has one row of tiles, so its columns are the leading factor
        "S(1.1) x S(0.1) x R x R -> P(sum)",
        "R x S(1) x R x S(0) -> S(1)",
        "R x S(1.1) x R x R -> S(1.1)",
    }


def test_half_a_tile_never_splits_the_scales() -> None:
    """192 rows are a tile and a half: the flat scales of 256 rows would come apart in whole tiles, and be wrong."""
    a, b = operands(192, 128, 160)
    for sample in (v1(a, b, tiles(192, 4), tiles(160, 4)),
                   v1(a, b, tiles(192, 4).view(64, 16), tiles(160, 4).view(256, 4))):  # fmt: skip
        kind = kind_of(sample, (2,))
        assert all(p.kind == "R" for option in kind.options for layout in option.operands[2:] for p in layout)
        assert {option.operands[0][0].kind for option in kind.options} == {"R", "S"}


def test_a_flat_split_of_the_scales_along_k_is_found_out() -> None:
    """The formula reads what it is given tile by tile: halves of the flat scales are rows, not columns, of tiles."""
    a, b = operands(256, 256, 256)
    sample = v1(a, b, tiles(256, 8), tiles(256, 8))
    right = find_rule(sample.op)
    assert right is not None
    signature = right(call_of(sample))
    halves = ("kbt", "z")

    def wrong(op: Any) -> Signature:
        flat = ((halves,), (halves,))
        sizes = {**signature.sizes, "z": 1024}
        return replace(signature, operands=(*signature.operands[:2], *flat), sizes=sizes, finer=None,
                       results=((("mt", "mr"), ("nt", "nr")),), whole=signature.whole | {"z"})  # fmt: skip

    kind = kind_of(sample, (2,), rule=wrong)
    options = tuple(o for o in kind.options if o.results[0][0].kind == "P" and o.operands[2][0].kind == "S")
    (text,) = problems(sample, replace(kind, options=options), (2,))
    assert "[S(1)] x [S(0)] x [S(0)] x [S(0)] -> [P(sum)]: result 0 is off by" in text
    assert not list(problems(sample, kind_of(sample, (2,)), (2,)))


def test_a_bias_under_a_split_k_is_added_once() -> None:
    """The row is there, and parts with the bias on every rank would add up to more."""
    a, b = operands(12, 24, 8)
    sample = v1(a, b, powers(), powers(), whole(8, dtype=F32))
    assert "S(1) x S(0) x R x R x R -> P(sum)" in rows_of(sample, 2)
    split = next(
        o for o in kind_of(sample, (2,)).options if o.operands[0][0].kind == "S" and o.results[0][0].kind == "P"
    )
    plainly = replace(split, rows=tuple(replace_local(row) for row in split.rows))
    kind = replace(kind_of(sample, (2,)), options=(plainly,))
    assert "is off by" in next(iter(problems(sample, kind, (2,))))


def replace_local(row: Any) -> Any:
    return row._replace(local="")


def test_rowwise_k_splits_with_scales_that_span_it_and_with_one_a_shard() -> None:
    """Both forms, in v2 as in v1."""
    a, b = operands(12, 24, 8)
    found = rows_of(v2(a, b, (powers(12, 1), powers(1, 8)), ((1,), (1,))), 2)
    assert "S(1) x S(0) x R x R -> P(sum)" in found
    assert "Frozen(1) x Frozen(0) x Own(1) x Own(0) -> P(sum)" in found


def test_a_recipe_without_a_kernel_stays_whole() -> None:
    """Recipes that do not go together, scales of another size."""
    a, b = operands(256, 256, 128)
    odd = v2(a, b, (powers(256, 2, order="T"), powers(1)), ((BLOCK_1X128,), (0,)))
    call = call_of(replace(odd, stand_in=lambda *args, **kwargs: torch.zeros(256, 128)))
    signature = find_rule(odd.op)(call)  # type: ignore[misc]
    assert not signature.sizes
    short = call_of(
        replace(v1(a, b, tiles(256, 8), tiles(128, 8)[:512]), stand_in=lambda *a, **k: torch.zeros(256, 128))
    )
    assert not find_rule(short.op)(short).sizes  # type: ignore[misc]


def test_experts_and_tokens_split_by_programs() -> None:
    """Experts with all tokens on every rank leave parts of the sum; tokens of all experts split the result."""
    tokens, weights, offs = forms(BF16)[0]
    assert offs is not None
    found = rows_of(Sample(aten._grouped_mm.default, (tokens, weights, offs), stand_in=grouped_mm_formula), 2)
    assert {
        "R x S(0) x R -> P(sum)",
        "S(0) x R x R -> S(0)",
        "R x S(2) x R -> S(1)",
        "S(1) x S(1) x R -> P(sum)",
    } <= found
    assert "P(sum) x R x R -> P(sum)" in found


def test_experts_do_not_read_tokens_of_others() -> None:
    """Garbage in tokens of other ranks' experts, or of nobody, reaches no result."""
    tokens, weights, offs = forms(BF16)[1]
    assert offs is not None
    sample = Sample(aten._grouped_mm.default, (tokens, weights, offs), stand_in=grouped_mm_formula)
    kind = kind_of(sample, (2,))
    option = next(o for o in kind.options if o.operands[1][0].kind == "S" and o.operands[1][0].dim == 0)
    spoiled = tokens.clone()
    spoiled[80:] = torch.nan
    bad = replace(sample, args=(spoiled, weights, offs))
    assert not list(problems(bad, replace(kind, options=(option,)), (2,)))


def test_mx_tokens_stay_whole() -> None:
    """Their scales begin at a tile only where a group does."""
    for sample in mx():
        assert all(o.operands[0][0].dim != 0 for o in kind_of(sample, (2,)).options)


# ---- orders and formulas -----------------------------------------------------------------------------------------


def test_column_group_scales_are_torchaos() -> None:
    """The same where groups are columns."""
    quant = pytest.importorskip("torchao.prototype.moe_training.kernels.mxfp8.quant")
    sizes = (1, 6, 4)
    raw = torch.cat([powers(192, size, dtype=E8M0).view(torch.uint8) for size in sizes], 1)
    want, _ = quant.torch_to_blocked_2d_K_groups(raw, torch.tensor(sizes).cumsum(0))
    assert same_bits(columns_scales(192, tuple(32 * size for size in sizes), want.shape[1]).view(torch.uint8), want)


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (192, 6), (1, 1), (130, 3)])
def test_tiles_are_torchaos(shape: tuple[int, int]) -> None:
    """`to_tiles` is torchao's `to_blocked`, bit for bit; `from_tiles` leads back."""
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    raw = powers(*shape, dtype=E8M0)
    assert same_bits(to_tiles(raw), utils.to_blocked(raw.view(torch.uint8)).view(E8M0))
    assert same_bits(from_tiles(to_tiles(raw), *shape), raw)


def test_group_scales_are_torchaos() -> None:
    """Each group's tiles stand behind those of the group before it."""
    quant = pytest.importorskip("torchao.prototype.moe_training.kernels.mxfp8.quant")
    sizes, blocks = (32, 96, 160), 8
    raw = torch.cat([powers(size, blocks, dtype=E8M0).view(torch.uint8) for size in sizes])
    ends = torch.tensor(sizes).cumsum(0)
    want, _ = quant.torch_to_blocked_2d_M_groups(raw, ends)
    assert same_bits(tokens_scales(sizes, blocks, want.shape[0]).view(torch.uint8), want)


def test_float4_codes_are_torchaos() -> None:
    """Two values a byte, the low four bits first."""
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    want = kernels.f4_unpacked_to_f32(kernels.unpack_uint4(codes))
    assert same_bits(values_of(codes.view(torch.float4_e2m1fn_x2)), want)


def test_formulas_give_what_cpu_kernels_give() -> None:
    """Tensorwise and rowwise in v2; every form of a plain grouped GEMM, up to rows that belong to nobody."""
    a, b = operands(16, 32, 16)
    for scales, recipe in (((powers(1), powers(1)), 0), ((powers(16, 1), powers(1, 16)), 1)):
        args = (a, b, [scales[0]], [recipe], [], [scales[1]], [recipe], [], None, F32)
        assert same_bits(aten._scaled_mm_v2.default(*args), scaled_mm_v2_formula(*args))
    for a, b, offs in forms(BF16):
        if min(a.stride()[-2] * 2 % 16, b.stride()[-1] * 2 % 16) == 0 and (
            a.stride(-2) * 2 % 16 == b.stride(-1) * 2 % 16
        ):
            made = aten._grouped_mm.default(a, b, offs)
            want = grouped_mm_formula(a, b, offs)
            held = slice(0, int(offs[-1])) if offs is not None and a.ndim == 2 and b.ndim == 3 else slice(None)
            assert same_bits(made[held].contiguous(), want[held])


def test_torchaos_own_references_agree() -> None:
    """Formulas of blockwise casts against the torch versions that torchao tests its kernels with."""
    pytest.importorskip("triton")
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x = whole(256, 384, most=7, dtype=F32) * powers(256, 384)
    for name, want in (
        ("act_quant_lhs", kernels.torch_blockwise_scale_act_quant_lhs(x)),
        ("act_quant_rhs", kernels.torch_blockwise_scale_act_quant_rhs(x)),
        ("weight_quant_rhs", kernels.torch_blockwise_scale_weight_quant(x)),
    ):
        made = stand_in(op_of(f"triton_fp8_blockwise_{name}"))(x)
        assert all(same_bits(m.contiguous(), w.contiguous()) for m, w in zip(made, want, strict=True))


def test_schemas_are_torchaos() -> None:
    """Where torchao registered an op, its schema is the one that samples are defined with."""
    pytest.importorskip("triton")
    pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    held = {s.name.removeprefix("torchao::"): str(s) for s in torch._C._jit_get_all_schemas() if "torchao::" in s.name}
    for name, schema in SCHEMAS.items():
        if name in held:
            assert held[name] == f"torchao::{name}{schema}"


def test_formulas_refuse_what_kernels_refuse() -> None:
    """Scales that fit no recipe, or are too few."""
    a, b = operands(16, 64, 32)
    with pytest.raises(UsageError, match=r"scales \[16, 3\] and \[3, 32\] fit no recipe for \[16, 64\] x \[64, 32\]"):
        scaled_mm_formula(a, b, powers(16, 3), powers(3, 32))
    with pytest.raises(UsageError, match="256 swizzled scales for 16 x 2 blocks"):
        scaled_mm_v2_formula(a, b, [tiles(16, 2)[:256]], [BLOCK_1X32], [SWIZZLE_32_4_4], [tiles(32, 2)], [BLOCK_1X32],
                             [SWIZZLE_32_4_4], None, F32)  # fmt: skip


def test_recipes_are_inferred_in_the_kernels_order() -> None:
    """One block along k makes (M, 1) and (1, N) rowwise; one row makes 128x128 of 1x128."""
    a, b = operands(16, 128, 32)
    assert [str(s) for s in inferred_scales(a, b, powers(16, 1), powers(1, 32)) or ()] == ["rowwise"] * 2
    a, b = operands(1, 256, 32)
    assert [str(s) for s in inferred_scales(a, b, powers(1, 2), powers(2, 32)) or ()] == ["128x128", "1x128"]
    assert inferred_scales(a, b, powers(1, 3), powers(3, 32)) is None


# ---- constraints -------------------------------------------------------------------------------------------------


def spec(shape: tuple[int, ...], dtype: torch.dtype = E4M3, order: str = "") -> TensorSpec:
    steps = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        steps[d] = steps[d + 1] * shape[d + 1]
    if order == "T":
        steps[-2:] = 1, shape[-2]
    return TensorSpec(shape, tuple(steps), dtype)


A, B, MX_A, MX_B = spec((256, 512)), spec((512, 128), order="T"), spec((4096,), E8M0), spec((2048,), E8M0)
ROWS, COLUMNS = spec((256, 4), F32, "T"), spec((4, 128), F32)
SQUARE, TALL = spec((4, 1), F32, "T"), spec((128, 4), F32, "T")
PLAIN, NAMED = aten._scaled_mm.default, aten._scaled_mm_v2.default
GROUPED, SCALED_GROUPED = aten._grouped_mm.default, aten._scaled_grouped_mm.default
W, OFFS = spec((4, 512, 128), E4M3, "T"), spec((4,), torch.int32)
FACTORS = spec((256,), F32), spec((4, 128), F32)


FLOAT4 = torch.float4_e2m1fn_x2
PACKED = spec((256, 256), FLOAT4), spec((256, 128), FLOAT4, "T")
SECOND = spec((8192,), E4M3), spec((), F32), spec((64, 32), E4M3, "T"), spec((), F32)
MX_TOKENS = spec((512, 16), E8M0), spec((4, 2048), E8M0)
THREE = spec((64, 384)), spec((384, 256), order="T"), spec((64, 3), F32, "T"), spec((3, 2), F32, "T")
ONE_COLUMN = spec((64, 384)), spec((384, 128), order="T"), spec((64, 3), F32, "T"), spec((3, 1), F32, "T")
E5M2, FNUZ, ONE = torch.float8_e5m2, torch.float8_e4m3fnuz, spec((), F32)
ODD_ROWS = spec((254, 512)), B, spec((254, 4), F32, "T"), COLUMNS
CASES = [
    (PLAIN, (A, B, ROWS, COLUMNS), "sm90", None),
    (PLAIN, (A, B, ROWS, COLUMNS), "cpu", None),
    (PLAIN, (A, B, ROWS, COLUMNS), "sm100", "scales local [256, 4] are of blocks of 128: sm100 has no kernel for them"),
    (PLAIN, (A, B, ROWS, COLUMNS), "gfx950", "blocks of 128: gfx950 has no kernel"),
    (PLAIN, (A, B, spec((256, 4), F32), COLUMNS), "sm90", "[256, 4] has strides [4, 1]: dim 0 must be innermost"),
    (PLAIN, (A, B, ROWS, spec((4, 128), F32, "T")), "sm90", "[4, 128] has strides [1, 4]: dim 1 must be innermost"),
    (PLAIN, (A, B, ROWS, spec((4, 1), F32)), "sm90", None),
    (PLAIN, THREE, "sm90", "scale_b local [3, 2]: 3 blocks of k are not a multiple of 4"),
    (PLAIN, ONE_COLUMN, "sm90", None),
    (PLAIN, ODD_ROWS, "sm90", "mat1 local [254, 512]: 254 is not a multiple of 4"),
    (NAMED, (A, B, ROWS, TALL), "sm90", None),
    (NAMED, (A, B, ROWS, spec((128, 4), F32)), "sm90", "[128, 4] has strides [4, 1]: it must be column-major"),
    (NAMED, (A, spec((512, 120), order="T"), MX_A, MX_B), "sm100", "[512, 120]: 120 is not a multiple of 16"),
    (PLAIN, (A, B, MX_A, MX_B), "sm100", None),
    (PLAIN, (A, B, MX_A, MX_B), "gfx950", None),
    (PLAIN, (A, B, MX_A, MX_B), "sm90", "MX scales: sm90 has no kernel for them, sm100 and gfx950 have"),
    (PLAIN, (A, B, spec((64, 64), E8M0, "T"), MX_B), "sm120", "scale_a local [64, 64] has strides [1, 64]: it must be"),
    (PLAIN, (spec((24, 512)), B, MX_A, MX_B), "gfx950", "mat1 local [24, 512]: 24 is not a multiple of 16"),
    (PLAIN, (spec((48, 512)), B, MX_A, MX_B), "gfx950", None),
    (PLAIN, (spec((48, 448)), spec((448, 128), order="T"), MX_A, MX_B), "gfx950", "448 is not a multiple of 128"),
    (NAMED, (spec((48, 512)), B, MX_A, MX_B), "gfx950", "mat1 local [48, 512]: 48 is not a multiple of 32"),
    (NAMED, (*PACKED, *SECOND), "sm100", "scale_b local [64, 32] has strides [1, 64]: it must be contiguous"),
    (PLAIN, (A, B, spec((4096,), E4M3), MX_B), "gfx950", "NVFP4 scales: gfx950 has no kernel for them, sm100 has"),
    (NAMED, (*PACKED, MX_A, MX_B), "sm120", "MXFP4: sm120 has no kernel for it, sm100 has"),
    *((PLAIN, (A, B, ONE, ONE), name, None) for name in ("sm89", "sm90", "sm100", "sm120", "gfx950", "gfx1201", "cpu")),
    (
        PLAIN,
        (A, B, ONE, ONE),
        "sm80",
        "sm80 has no float8 GEMM: it needs sm89, sm90 or later, gfx94x, gfx950 or gfx12xx",
    ),
    (NAMED, (A, B, ONE, ONE), "sm86", "sm86 has no float8 GEMM"),
    (PLAIN, (A, B, ONE, ONE), "gfx90a", "gfx90a has no float8 GEMM"),
    (PLAIN, (A, B, ONE, ONE), "gfx942", "mat1 is float8_e4m3fn: gfx942 multiplies float8_e4m3fnuz"),
    (PLAIN, (spec((256, 512), FNUZ), spec((512, 128), FNUZ, "T"), ONE, ONE), "gfx942", None),
    (
        PLAIN,
        (A, spec((512, 128), FNUZ, "T"), ONE, ONE),
        "sm90",
        "mat2 is float8_e4m3fnuz: sm90 multiplies float8_e4m3fn",
    ),
    (SCALED_GROUPED, (A, W, *FACTORS, OFFS), "gfx942", "mat1 is float8_e4m3fn: gfx942 multiplies float8_e4m3fnuz"),
    (
        SCALED_GROUPED,
        (spec((256, 512), E5M2), W, *FACTORS, OFFS),
        "sm90",
        "mat1 is float8_e5m2: grouped GEMMs multiply",
    ),
    (GROUPED, (spec((96, 20), BF16), spec((4, 20, 16), BF16, "T"), OFFS), "cpu", "[96, 20]: rows of 40 bytes, not"),
    (GROUPED, (spec((96, 32), BF16), spec((4, 32, 16), BF16, "T"), OFFS), "sm90", None),
    (SCALED_GROUPED, (A, W, *FACTORS, OFFS), "sm90", None),
    (SCALED_GROUPED, (A, W, *FACTORS, OFFS), "sm120", "a grouped float8 GEMM: sm120 has no kernel for it"),
    (SCALED_GROUPED, (A, W, *MX_TOKENS, OFFS), "sm90", "a grouped MX GEMM: sm90 has no kernel"),
    (SCALED_GROUPED, (A, spec((4, 512, 120), E4M3, "T"), *FACTORS, OFFS), "sm90", "120 is not a multiple of 16"),
    (SCALED_GROUPED, (A, spec((4, 512, 128), E4M3), *FACTORS, OFFS), "sm90", "it must be column-major"),
]


@pytest.mark.parametrize(
    ("op", "tensors", "architecture", "sentence"),
    CASES,
)
def test_a_constraint_says_what_is_wrong(
    op: Any, tensors: tuple[TensorSpec, ...], architecture: str, sentence: str | None
) -> None:
    """One sentence, about local shapes; the CPU is exempt but for grouped rows."""
    broken = broken_constraints(op, tensors, architecture)
    assert (not broken) if sentence is None else any(sentence in said for said in broken), broken


def test_constraints_of_the_call() -> None:
    """What depends on attributes or on what was split: bias and result, MX order on AMD, result rows, dim-1 tiles."""
    a, b = operands(16, 256, 128)
    biased = replace(call_of(v1(a, b, powers(), powers(), whole(128, dtype=F32))), out=(spec((16, 128), BF16),))
    assert "a bias of float32 with a result of bfloat16: no kernel adds it" in broken_constraints(
        PLAIN, biased.tensors, "sm90", biased
    )
    swizzled = call_of(v1(*operands(128, 256, 128), tiles(128, 8), tiles(128, 8)))
    halves = (spec((128, 128)), spec((128, 128), order="T"), *swizzled.tensors[2:])
    assert any("gfx950 does not say" in s for s in broken_constraints(PLAIN, halves, "gfx950", swizzled))
    halved = replace(swizzled, out=(spec((128, 128), BF16),))
    assert not broken_constraints(PLAIN, halved.tensors, "gfx950", halved)
    grouped = call_of(plain()[0])
    narrow = (grouped.tensors[0], spec((4, 32, 12), BF16, "T"), grouped.tensors[2])
    said = broken_constraints(GROUPED, narrow, "sm90", grouped)
    assert said == ("mat2 local [4, 32, 12]: result rows of 24 bytes, not a multiple of 16",)
    op = op_of("triton_to_mxfp8_dim1")
    call = replace(call_of(next(s for s in torchao_samples() if s.op is op)), tensors=(spec((1024, 256), BF16),))
    for rows, sentence in (
        (512, None),
        (128, "128 rows are not a multiple of 512"),
        (96, "96 is not a multiple of 128"),
    ):
        broken = broken_constraints(op, (spec((rows, 256), BF16),), "sm100", call)
        assert (not broken) if sentence is None else any(sentence in said for said in broken)
    assert any("sm90 has none" in said for said in broken_constraints(op, call.tensors, "sm90", call))


def called(op: Any, tensors: tuple[Any, ...], made: torch.dtype, **more: Any) -> OpCall:
    """A call of a scaled GEMM whose result has the dtype."""
    a, b, *scales = tensors
    args: tuple[Any, ...] = (a, b, *scales)
    if op is NAMED:
        recipe = more.pop("recipe", (1,))
        args = (a, b, (scales[0],), recipe, (), (scales[1],), recipe, (), more.pop("bias", None), made)
    read = (*tensors, *(value for value in more.values() if isinstance(value, TensorSpec)))
    return OpCall(op, args, tuple(more.items()), read, (TensorSpec((256, 128), (128, 1), made),))


ROWWISE_AB = A, B, spec((256, 1), F32), spec((1, 128), F32)
PLAIN_AB, MX_AB = (A, B, ONE, ONE), (A, B, MX_A, MX_B)
F16, INT = torch.float16, torch.int64
RESULTS = [
    *((op, PLAIN_AB, "sm90", made, "") for op in (PLAIN, NAMED) for made in (BF16, F16, F32, E4M3)),
    *((PLAIN, PLAIN_AB, name, INT, "a result of int64: scaled GEMMs make bfloat16, float16, float32 or float8")
      for name in ("sm90", "gfx950", "cpu")),
    (PLAIN, ROWWISE_AB, "sm90", F32, ""),
    (PLAIN, ROWWISE_AB, "cpu", F32, ""),
    (PLAIN, ROWWISE_AB, "sm100", F16, ""),
    *((op, ROWWISE_AB, "sm100", F32, "a result of float32: sm100 scales rows and columns into bfloat16 or float16")
      for op in (PLAIN, NAMED)),
    (PLAIN, ROWWISE_AB, "sm89", E4M3, "a result of float8_e4m3fn: sm89 scales rows and columns into bfloat16 or"),
    (PLAIN, ROWWISE_AB, "gfx950", BF16, ""),
    (PLAIN, ROWWISE_AB, "gfx950", F16, "a result of float16: gfx950 scales rows and columns into bfloat16"),
    (PLAIN, MX_AB, "gfx950", F32, "a result of float32: gfx950 multiplies MX operands into bfloat16 or float16"),
    (PLAIN, MX_AB, "sm100", F32, ""),
    (SCALED_GROUPED, (A, W, *FACTORS, OFFS), "sm90", BF16, ""),
    (SCALED_GROUPED, (A, W, *FACTORS, OFFS), "sm90", F32, "a result of float32: grouped float8 GEMMs make bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "tensors", "architecture", "made", "sentence"), RESULTS)
def test_a_result_has_a_dtype_that_the_kernel_makes(
    op: Any, tensors: tuple[TensorSpec, ...], architecture: str, made: torch.dtype, sentence: str
) -> None:
    """Of the recipe, on the device."""
    call = called(op, tensors, made, **({"recipe": (0,)} if tensors is PLAIN_AB and op is NAMED else {}))
    said = broken_constraints(op, call.tensors, architecture, call)
    assert not said if not sentence else len(said) == 1 and said[0].startswith(sentence), said


def test_what_else_a_call_may_not_ask_of_a_kernel() -> None:
    """A scale of a wide result, fast accumulation of float4, e5m2 under AMD's row factors, scattered factors in v2."""
    half = called(PLAIN, PLAIN_AB, BF16, scale_result=ONE)
    (said,) = broken_constraints(PLAIN, half.tensors, "sm90", half)
    assert said == "scale_result with a result of bfloat16: kernels scale float8 results alone"
    quarter = called(PLAIN, PLAIN_AB, E4M3, scale_result=ONE)
    assert not broken_constraints(PLAIN, quarter.tensors, "sm90", quarter)
    fast = called(PLAIN, (*PACKED, spec((8192,), E4M3), spec((4096,), E4M3)), BF16, use_fast_accum=True)
    assert "use_fast_accum with packed float4: no kernel has it" in broken_constraints(
        PLAIN, fast.tensors, "sm100", fast
    )
    mixed = called(PLAIN, (A, spec((512, 128), E5M2, "T"), *ROWWISE_AB[2:]), BF16)
    assert not broken_constraints(PLAIN, mixed.tensors, "sm90", mixed)
    (said,) = broken_constraints(PLAIN, mixed.tensors, "gfx950", mixed)
    assert said == "mat2 is float8_e5m2: gfx950 scales rows and columns of e4m3 alone"
    scattered = TensorSpec((1, 128), (128, 2), F32)
    named = called(NAMED, (*ROWWISE_AB[:3], scattered), BF16)
    (said,) = broken_constraints(NAMED, named.tensors, "sm90", named)
    assert said == "scale_b local [1, 128] has strides [128, 2]: its last dim must be innermost"
    packed = called(NAMED, (*PACKED, MX_A, MX_B), BF16, recipe=(BLOCK_1X32,), bias=spec((128,), BF16))
    assert "a bias with MXFP4: sm100 leaves it out of the result" in broken_constraints(
        NAMED, packed.tensors, "sm100", packed
    )


def test_a_bias_has_an_element_for_each_column() -> None:
    """Any other is a mistake of the call, which no split mends."""
    a, b = operands(16, 32, 64)
    for sample in (v1(a, b, powers(), powers(), whole(63, dtype=F32)),
                   v2(a, b, (powers(), powers(1)), ((0,), (0,)), bias=whole(63, dtype=F32))):  # fmt: skip
        call = call_of(replace(sample, stand_in=lambda *args, **kwargs: torch.zeros(16, 64)))
        with pytest.raises(RuleError, match=r"a bias of shape \[63\] for 64 columns of the result"):
            find_rule(sample.op)(call)  # type: ignore[misc]


def test_without_a_kernel_nothing_else_is_asked() -> None:
    """One sentence and its advice; emulated, the product is a bfloat16 one, which takes any shape and order."""
    odd = spec((256, 520)), spec((520, 100)), ONE, ONE
    assert broken_constraints(PLAIN, odd, "sm80") == (
        "sm80 has no float8 GEMM: it needs sm89, sm90 or later, gfx94x, gfx950 or gfx12xx",
    )
    assert advice(PLAIN, odd, "sm80") == (
        "plan for a device that has one, keep the product in bf16, or plan with emulate=True",
    )
    assert broken_constraints(PLAIN, odd, "sm80", emulate=True) == ()
    assert len(broken_constraints(PLAIN, odd, "sm90", emulate=True)) == 2
    assert broken_constraints(PLAIN, (A, B, ROWS, COLUMNS), "sm100", emulate=True) == ()
    assert broken_constraints(SCALED_GROUPED, (A, W, *FACTORS, OFFS), "sm80", emulate=True) == ()


def test_a_plan_takes_one_spelling_of_float8_for_the_other() -> None:
    """A graph traced on a laptop is of e4m3fn; for an MI300X that stands for e4m3fnuz."""
    ours = in_float8_of("gfx942", (A, B, ONE, ONE))
    assert [s.dtype for s in ours] == [FNUZ, FNUZ, F32, F32] and not broken_constraints(PLAIN, ours, "gfx942")
    assert in_float8_of("sm90", ours) == in_float8_of("gfx950", ours) == (A, B, ONE, ONE)


def rowwise_graph(tokens: int, features: int) -> Graph:
    """A linear of torchao's rowwise recipe, forward and backward, traced on a CPU: in e4m3fn."""
    with torch.device("meta"):
        layers = torch.nn.Sequential(torch.nn.Linear(64, features, bias=False, dtype=BF16))
    model, _ = convert(layers, "rowwise")
    return capture(model, (torch.empty(tokens, 64, dtype=BF16, device="meta"),))


def test_a_plan_for_an_mi300x_is_of_its_own_float8() -> None:
    """The same options as for an MI350X, whose float8 the graph has."""
    graph, mesh = rowwise_graph(64, 128), parse_mesh("tp=2")
    there, here = (expand(graph, mesh, architecture=name) for name in ("gfx942", "gfx950"))
    assert [len(kind.options) for kind in there.kinds] == [len(kind.options) for kind in here.kinds]


def test_an_emulated_plan_demands_nothing_of_a_device_without_the_kernel() -> None:
    """48 features over two ranks: 24 are refused where there is a float8 kernel, and fine where there is none."""
    graph, mesh = rowwise_graph(32, 48), parse_mesh("tp=2")
    with pytest.raises(UsageError, match=r"sm80 has no float8 GEMM(.*\n)*  do: plan for a device that has one"):
        expand(graph, mesh, architecture="sm80")
    emulated = expand(graph, mesh, architecture="sm80", emulate=True)
    assert not any(kind.refused for kind in emulated.kinds)
    (said, *_) = {r.sentence for kind in expand(graph, mesh, architecture="sm90", emulate=True).kinds
                  for r in kind.refused}  # fmt: skip
    assert "24 is not a multiple of 16" in said


# ---- partial sums by dtype ---------------------------------------------------------------------------------------


def test_complex_numbers_add_up_and_integers_stay_whole() -> None:
    """A complex product is split along k, by brute force; an integer one is not."""
    assert partial_kinds(spec((4,), torch.complex64)) == "P" and partial_kinds(spec((4,), torch.int64)) == "M"
    a = torch.complex(whole(8, 12, dtype=F32), whole(12, 8, dtype=F32).t())
    for x in (a, a.real.long()):
        sample = Sample(aten.mm.default, (x, x.t().contiguous()))
        kind = kind_of(sample, (2,))
        assert not list(problems(sample, kind, (2,)))
        assert ("S(1) x S(0) -> P(sum)" in rows_of(sample, 2)) == x.is_complex()
        assert ("P(sum) x R -> P(sum)" in rows_of(sample, 2)) == x.is_complex()


def test_a_split_that_a_kernel_refuses_is_no_option() -> None:
    """Local K of MX blocks of 32 is a multiple of 16 by itself; local N of 24 is refused on a GPU, not on a CPU."""
    sample = v1(*operands(128, 128, 96), tiles(128, 4), tiles(96, 4))
    kind = kind_of(sample, (4,))
    for option in kind.options:
        local = local_specs(kind.call.tensors, kind.operand_factors, option.operands, (4,))
        is_narrow = local[1].shape[1] == 24
        assert bool(broken_constraints(sample.op, local, "sm100", kind.call)) == is_narrow
        assert not broken_constraints(sample.op, local, "cpu", kind.call)


# ---- tables and costs --------------------------------------------------------------------------------------------


def test_rules_by_name_are_of_torchaos_ops() -> None:
    """Every one has samples and a formula; GEMMs among them hide collectives."""
    names = {f"torchao.{name}.default" for name in SCHEMAS}
    assert set(named_rules()) == names == {str(sample.op) for sample in torchao_samples()}
    assert op_of("triton_fp8_gemm_1x128_128x1") in HEAVY_OPS and op_of("triton_to_mxfp8_dim0") not in HEAVY_OPS
    assert NAMED in HEAVY_OPS and GROUPED in HEAVY_OPS


def test_a_cost_goes_by_the_recipe() -> None:
    """The recipe that a call means, from its scales or its arguments."""
    found = {recipe_of(call_of(sample)) for sample in block_samples()}
    assert found == {"blockwise", "rowwise"}  # one block along k
    assert {recipe_of(call_of(sample)) for sample in tiled_samples()} == {"mxfp8", "nvfp4"}
    a, b = operands(256, 512, 128)
    named = v2(a, b, (powers(256, 4, order="T"), powers(4, 1, order="T")), ((BLOCK_1X128,), (BLOCK_128X128,)))
    assert recipe_of(call_of(named)) == "blockwise"
    assert [recipe_of(call_of(s)) for s in (*plain()[:1], *mx()[:2])] == [None, "mxfp8", "mxfp8"]


def test_the_time_of_a_blockwise_gemm_is_its_recipes() -> None:
    """`op_us` is `gemm_us` of the recipe; a float4 element is two values."""
    device = load_device("H100")
    call = call_of(v1(*operands(256, 512, 128), powers(256, 4, order="T"), powers(4, 128)))
    own = Traffic(is_own_kernel=True)
    assert op_us(call, own, call.tensors, call.out, device) == gemm_us(*call.tensors[:2], "blockwise", device)
    packed = call_of(v1(fours(256, 512), fours(128, 512, "T"), tiles(256, 32, E4M3), tiles(128, 32, E4M3)))
    wide = spec((256, 512), packed.tensors[0].dtype), spec((512, 128), packed.tensors[0].dtype, "T")
    b200 = load_device("B200")
    assert op_us(packed, own, packed.tensors, packed.out, b200) == gemm_us(*wide, "nvfp4", b200)


def test_a_grouped_gemm_costs_its_share_of_the_tokens() -> None:
    """96 tokens of 4 experts: 24 an expert; a rank with 2 of the experts multiplies 48 of the tokens."""
    call = call_of(plain()[0])
    a, b = products(call, call.tensors, call.out)
    assert (a.shape, b.shape) == ((4, 24, 32), (4, 32, 32))
    local = (call.tensors[0], spec((2, 32, 32), BF16, "T"), call.tensors[2])
    assert [t.shape for t in products(call, local, call.out)] == [(2, 24, 32), (2, 32, 32)]
    gradients = call_of(plain()[2])
    half = (replace(gradients.out[0], shape=(2, 16, 32)),)
    assert [t.shape for t in products(gradients, gradients.tensors, half)] == [(2, 16, 24), (2, 24, 32)]
