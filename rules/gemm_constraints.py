"""What kernels demand of scaled GEMMs in blocks, of grouped GEMMs and of torchao's kernels, on one rank.

K, N, the operands' memory order and e5m2 are in `constraints.py`. Devices: blocks of 128 run on sm90 alone, MX and
NVFP4 on sm100 and later (gfx950: MX), grouped float8 on sm90, sm100 and AMD's gfx94x and gfx950. A swizzled scale is
whole tiles by its rule. CPUs are asked about nothing but the strides of grouped operands, which every device checks.

Source, where none is named: ATen/native/cuda/ScaledBlas.cpp and GroupedBlas.cpp; torch/_meta_registrations.py, 2.13.
The fake kernels of 2.13 differ, and refuse some legal calls before a rule is asked: `_scaled_mm_v2` with a last block
of 128 that is not full (they round K / 128 down), MXFP4 (they count scales in stored elements, two values each), and
packed K of 8 modulo 16; unswizzled MX scales are refused unless torch was built for ROCm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph import TensorSpec
from ..ops.scaling import BLOCK_128X128, PADDED_BLOCKS, inferred_scales, round_up
from .constraints import ALIGNMENT, constraint
from .language import OpCall

aten = torch.ops.aten
_SCALED = (aten._scaled_mm.default, aten._scaled_mm_v2.default)
_SCALED_GROUPED = (aten._scaled_grouped_mm.default, aten._scaled_grouped_mm_v2.default)
_GROUPED = (aten._grouped_mm.default, *_SCALED_GROUPED)
_FP4 = torch.float4_e2m1fn_x2
ROW_BYTES = 16
"""Rows of a grouped operand, and of its result, begin at multiples of this."""
LARGEST_TILE = 512
"""Rows of the largest tile that torchao's dim-1 cast may choose. Source: prototype/mx_formats/kernels.py, 0.18."""


def sm(architecture: str) -> int:
    """The number of an NVIDIA architecture, 0 for others.

    >>> sm("sm90"), sm("gfx950")
    (90, 0)
    """
    digits = "".join(c for c in architecture.removeprefix("sm") if c.isdigit())
    return int(digits) if architecture.startswith("sm") and digits else 0


def _shown(name: str, spec: TensorSpec) -> str:
    return f"{name} local {list(spec.shape)}"


def _is_by_block(operands: Sequence[TensorSpec]) -> bool:
    """Whether float32 scales are of blocks: more than one an operand, and more than one a row."""
    a, b, scale_a, scale_b = operands[:4]
    is_rowwise = (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
    return scale_a.dtype is torch.float32 and not is_rowwise and not scale_a.numel == scale_b.numel == 1


@constraint(*_SCALED, do="plan for sm90, or cast rowwise or to MX")
def blocks_on_sm90(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Scales of 1x128 and 128x128 blocks. Source: _check_deepseek_support."""
    if architecture == "cpu" or not _is_by_block(operands) or 90 <= sm(architecture) < 100:
        return None
    return (
        f"scales local {list(operands[2].shape)} are of blocks of 128: {architecture} has no kernel for them, sm90 has"
    )


@constraint(*_SCALED, do="plan for sm100 or gfx950, or plan another recipe")
def tiles_on_sm100(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Scales of 1x32 and 1x16 blocks; MXFP4 runs on sm100 and sm103 alone. Source: _check_mxfp4_support and its kin."""
    dtype, number = operands[2].dtype, sm(architecture)
    if architecture == "cpu" or dtype is torch.float32:
        return None
    is_mx = dtype is torch.float8_e8m0fnu
    if is_mx and operands[0].dtype is _FP4 and number and not 100 <= number < 110:
        return f"MXFP4: {architecture} has no kernel for it, sm100 has"
    if number >= 100 or (architecture == "gfx950" and is_mx):
        return None
    recipe, where = ("MX", "sm100 and gfx950 have") if is_mx else ("NVFP4", "sm100 has")
    return f"{recipe} scales: {architecture} has no kernel for them, {where}"


@constraint(*_SCALED, do="copy it: scale.contiguous()")
def tiles_in_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Scales of 1x32 and 1x16 blocks are contiguous."""
    if architecture == "cpu" or operands[2].dtype is torch.float32:
        return None
    for name, spec in zip(("scale_a", "scale_b"), operands[2:4], strict=True):
        if not _is_contiguous(spec):
            return f"{_shown(name, spec)} has strides {list(spec.stride)}: it must be contiguous"
    return None


@constraint(aten._scaled_mm.default, do="copy the scales, the dim of the rows innermost")
def block_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """1x128 scales have the outer dim innermost, 128x128 scales the blocks of k. Source: is_blockwise_*_scaling."""
    found = inferred_scales(*operands[:4])
    if architecture == "cpu" or found is None or not _is_by_block(operands):
        return None
    for k, (name, spec, how) in enumerate(zip(("scale_a", "scale_b"), operands[2:4], found, strict=True)):
        inner = 1 - k if how.recipe == BLOCK_128X128 else k
        if spec.shape[inner] > 1 and spec.stride[inner] != 1:
            return f"{_shown(name, spec)} has strides {list(spec.stride)}: dim {inner} must be innermost"
    return None


@constraint(aten._scaled_mm.default, do="use scaled_mm, whose 128x128 scales are padded to multiples of 4 blocks")
def square_block_rows(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """128x128 scales of several columns have their k blocks in fours: the kernel reads columns at 16 bytes.

    It takes others without a word and multiplies by the wrong scales (seen on one H200, torch 2.11, CUDA 13.0).
    """
    found = inferred_scales(*operands[:4])
    if architecture == "cpu" or found is None:
        return None
    for k, (name, spec, how) in enumerate(zip(("scale_a", "scale_b"), operands[2:4], found, strict=True)):
        blocks = spec.shape[1 - k] if how.recipe == BLOCK_128X128 else 0
        if blocks % PADDED_BLOCKS and spec.numel > blocks:
            return f"{_shown(name, spec)}: {blocks} blocks of k are not a multiple of {PADDED_BLOCKS}"
    return None


@constraint(aten._scaled_mm_v2.default, do="copy the scales: scale.t().contiguous().t()")
def named_block_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Scales of blocks of 128 are column-major in v2. Source: _scaled_block1x128_block1x128 and its kin."""
    if architecture == "cpu" or not _is_by_block(operands):
        return None
    for name, spec in zip(("scale_a", "scale_b"), operands[2:4], strict=True):
        if spec.shape[0] > 1 and spec.stride[0] != 1:
            return f"{_shown(name, spec)} has strides {list(spec.stride)}: it must be column-major"
    return None


@constraint(*_SCALED, do="pad the tokens to a multiple of 4")
def rows_of_blocks(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """cuBLASLt wants M in fours where scales are of blocks of 128. Source: vllm-project/vllm#49932."""
    mat1 = operands[0]
    if architecture == "cpu" or not _is_by_block(operands) or mat1.shape[0] % 4 == 0:
        return None
    return f"{_shown('mat1', mat1)}: {mat1.shape[0]} is not a multiple of 4"


@constraint(*_SCALED, do="pad the layer to a multiple of 32")
def mx_on_amd(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """M, N and K in blocks of 32. Source: _scaled_mxfp8_mxfp8, USE_ROCM."""
    if not architecture.startswith("gfx") or operands[2].dtype is not torch.float8_e8m0fnu:
        return None
    for name, spec in zip(("mat1", "mat2"), operands[:2], strict=True):
        for size in spec.shape:
            if size % 32:
                return f"{_shown(name, spec)}: {size} is not a multiple of 32"
    return None


@constraint(aten._scaled_mm.default, of_call=True, do="use scaled_mm, whose swizzle is an argument")
def mx_order_on_amd(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """Whether scales are swizzled depends on the ROCm version and shows nowhere, so k is not split."""
    k, whole = operands[0].shape[1], call.tensors[0].shape[1]
    if not architecture.startswith("gfx") or operands[2].dtype is not torch.float8_e8m0fnu or k == whole:
        return None
    return f"{_shown('mat1', operands[0])} of K {whole}: {architecture} does not say in which order MX scales lie"


@constraint(*_SCALED, of_call=True, do="cast the bias to the result's dtype, or add it after the GEMM")
def bias_dtype(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """A bias is bfloat16 or float16, as the result is; with a float8 result it is bfloat16 or float16."""
    bias, made = call.arg("bias"), call.out[0].dtype
    if architecture == "cpu" or bias is None:
        return None
    halves = (torch.bfloat16, torch.float16)
    wanted = () if made is torch.float32 else (made,) if made in halves else halves
    if bias.dtype in wanted:
        return None
    return f"a bias of {_name(bias.dtype)} with a result of {_name(made)}: no kernel adds it"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- grouped ------------------------------------------------------------------------------------------------------


@constraint(*_SCALED_GROUPED, do="plan for sm90 or sm100, or keep the experts in bf16")
def grouped_on_hopper(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Grouped float8 GEMMs; MX ones on sm100 alone."""
    number, is_mx = sm(architecture), operands[2].dtype is torch.float8_e8m0fnu
    is_amd = architecture.startswith(("gfx94", "gfx95")) and not is_mx
    if architecture == "cpu" or is_amd or 100 <= number < 110 or (90 <= number < 100 and not is_mx):
        return None
    what, where = ("MX", "sm100 has") if is_mx else ("float8", "sm90, sm100, gfx942 and gfx950 have")
    return f"a grouped {what} GEMM: {architecture} has no kernel for it, {where}"


@constraint(*_SCALED_GROUPED, do="pad features, and every group of tokens, to a multiple of 16")
def grouped_aligned_16(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """K of the first operand, K and N of the second; where tokens are one of them, groups end at multiples too."""
    if architecture == "cpu":
        return None
    for name, spec, sizes in (
        ("mat1", operands[0], operands[0].shape[-1:]),
        ("mat2", operands[1], operands[1].shape[-2:]),
    ):
        for size in sizes:
            if size % ALIGNMENT:
                return f"{_shown(name, spec)}: {size} is not a multiple of {ALIGNMENT}"
    return None


@constraint(*_SCALED_GROUPED, do="copy it: mat1.contiguous(), mat2.transpose(-1, -2).contiguous().transpose(-1, -2)")
def grouped_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """mat1 row-major, mat2 column-major in their last two dims; rowwise scales contiguous in the last."""
    if architecture == "cpu":
        return None
    for name, spec, inner, order in (("mat1", operands[0], -1, "row"), ("mat2", operands[1], -2, "column")):
        if 1 not in spec.shape[-2:] and spec.stride[inner] != 1:
            return f"{_shown(name, spec)} has strides {list(spec.stride)}: it must be {order}-major"
    for name, spec in zip(("scale_a", "scale_b"), operands[2:4], strict=True):
        if spec.shape[-1] > 1 and spec.stride[-1] != 1:
            return f"{_shown(name, spec)} has strides {list(spec.stride)}: its last dim must be innermost"
    return None


@constraint(*_GROUPED, do="pad the features: rows of 16 bytes")
def grouped_rows(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Rows (columns of a column-major operand) begin at multiples of 16 bytes, in bfloat16 on CPUs too.

    Where tokens are contracted, the kernel asks the same of every group's end and of a rank's part of the tokens.
    """
    if architecture == "cpu" and operands[0].dtype.itemsize == 1:
        return None
    for name, spec in zip(("mat1", "mat2"), operands[:2], strict=True):
        step = max(spec.stride[-2:]) * spec.dtype.itemsize
        if 1 not in spec.shape[-2:] and step % ROW_BYTES:
            return f"{_shown(name, spec)}: rows of {step} bytes, not a multiple of {ROW_BYTES}"
    return None


@constraint(*_GROUPED, of_call=True, do="pad the features")
def grouped_result_rows(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """Rows of the result are padded to 16 bytes: a part that needs padding does not fit where the whole has none."""
    size, whole, itemsize = operands[1].shape[-1], call.out[0].shape[-1], call.out[0].dtype.itemsize
    if architecture == "cpu" or size == whole or round_up(size * itemsize, ROW_BYTES) == size * itemsize:
        return None
    return f"{_shown('mat2', operands[1])}: result rows of {size * itemsize} bytes, not a multiple of {ROW_BYTES}"


# ---- torchao's kernels --------------------------------------------------------------------------------------------


@constraint(
    "torchao.triton_fp8_gemm_1x128_128x128.default",
    "torchao.triton_fp8_gemm_1x128_128x1.default",
    "torchao.blockwise_scaled_mm.default",
    do="copy it: a.contiguous(), b.t().contiguous().t()",
)
def torchao_operand_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """a row-major, b column-major. Source: torchao/prototype/blockwise_fp8_training/kernels.py, 0.18."""
    a, b = operands[0], operands[1]
    if a.shape[1] > 1 and a.stride[1] != 1:
        return f"{_shown('a', a)} has strides {list(a.stride)}: it must be row-major"
    if b.shape[0] > 1 and b.stride[0] != 1:
        return f"{_shown('b', b)} has strides {list(b.stride)}: it must be column-major"
    return None


@constraint("torchao.blockwise_scaled_mm.default", do="use torchao's triton GEMM there")
def torchao_blocks_on_sm90(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """It calls `aten._scaled_mm_v2`, which has blocks of 128 on sm90 alone."""
    if architecture == "cpu" or 90 <= sm(architecture) < 100:
        return None
    return f"scales of blocks of 128: {architecture} has no kernel for them, sm90 has"


_DIM0 = "torchao.triton_to_mxfp8_dim0.default"
_DIM1 = "torchao.triton_to_mxfp8_dim1.default"
_QUANTISE = "torchao.mxfp8_quantize.default"


@constraint(
    _DIM0,
    _DIM1,
    "torchao.triton_fp8_blockwise_act_quant_lhs.default",
    "torchao.triton_fp8_blockwise_act_quant_rhs.default",
    "torchao.triton_fp8_blockwise_act_quant_transposed_lhs.default",
    "torchao.triton_fp8_blockwise_weight_quant_rhs.default",
    "torchao.triton_fp8_blockwise_weight_quant_transposed_rhs.default",
    do="copy it: x.contiguous()",
)
def torchao_contiguous(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """torchao's casts read row-major tensors."""
    x = operands[0]
    return None if _is_contiguous(x) else f"{_shown('x', x)} has strides {list(x.stride)}: it must be contiguous"


@constraint(_DIM0, do="cast it to bfloat16 first")
def torchao_dim0_dtype(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """The dim-0 cast reads bfloat16. Source: torchao/prototype/mx_formats/kernels.py, 0.18."""
    dtype = operands[0].dtype
    return None if dtype is torch.bfloat16 else f"x is {_name(dtype)}: the kernel reads bfloat16"


@constraint(_DIM1, of_call=True, do="pad the tokens, or cast with mxfp8_quantize")
def torchao_dim1_tiles(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """Rows and columns fill tiles of 128; rows the largest tile that the kernel may choose, if the whole does.

    Scales are stored unmasked: with rows that do not fill its tile, the kernel overwrites those of other columns. A
    whole that breaks this is the user's; a split does not add to it. Source: pytorch/ao#4627.
    """
    (rows, columns), whole = operands[0].shape, call.tensors[0].shape[0]
    for size in (rows, columns):
        if size % 128:
            return f"{_shown('x', operands[0])}: {size} is not a multiple of 128"
    if rows != whole and rows % LARGEST_TILE and whole % LARGEST_TILE == 0:
        return (
            f"{_shown('x', operands[0])}: {rows} rows are not a multiple of {LARGEST_TILE}, the kernel's largest tile"
        )
    return None


@constraint(_QUANTISE, do="pad it to a multiple of 32")
def torchao_quantise_blocks(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Rows and columns in blocks of 32. Source: torchao/prototype/mx_formats/kernels.py, mxfp8_quantize_cuda."""
    for size in operands[0].shape:
        if size % 32:
            return f"{_shown('x', operands[0])}: {size} is not a multiple of 32"
    return None


@constraint(_DIM0, _DIM1, _QUANTISE, do="plan for sm100 or gfx950, or use the mxfp8 recipe, which runs everywhere")
def torchao_mx_devices(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """torchao registers its MX casts on sm100 and later and on gfx950."""
    if architecture in ("cpu", "gfx950") or sm(architecture) >= 100:
        return None
    return f"torchao's MX casts: {architecture} has none, sm100 and gfx950 have"


def _is_contiguous(spec: TensorSpec) -> bool:
    step = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
