"""What kernels demand of scaled GEMMs in blocks, of grouped GEMMs and of torchao's kernels, on one rank.

K, N, the operands' memory order and e5m2 are in `constraints.py`, devices and dtypes in `gemm_kernels.py`. A swizzled
scale is whole tiles by its rule. CPUs are asked about nothing but the strides of grouped operands, which every device
checks.

Not held, and why: where groups end (rowwise: multiples of 16, MX: of 32), which `offs` says when it runs; how many rows
MX scales of tokens have, which is padded group by group; whether the elements of MX scales are swizzled, where their
number is the same; which way AMD's MX scales are swizzled in v2 (ROCm 7.14 changed it); empty operands, which every
kernel takes; what some builds add, such as slack behind rowwise scales (pytorch/pytorch#133334).

Source, where none is named: ATen/native/cuda/ScaledBlas.cpp and GroupedBlas.cpp; torch/_meta_registrations.py, 2.13.
The fake kernels of 2.13 differ, and refuse some legal calls before a rule is asked: `_scaled_mm_v2` with a last block
of 128 that is not full (they round K / 128 down), MXFP4 (they count scales in stored elements, two values each), and
packed K of 8 modulo 16; unswizzled MX scales are refused unless torch was built for ROCm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph import TensorSpec, dtype_name, is_contiguous
from ..ops.scaling import BLOCK_128X128, PADDED_BLOCKS, inferred_scales, round_up, values_in
from .constraints import ALIGNMENT, constraint, wrong_order
from .gemm_kernels import SCALED, SCALED_GROUPED, has_mx, is_by_block, is_rowwise, sm
from .language import OpCall

aten = torch.ops.aten
_GROUPED = (aten._grouped_mm.default, *SCALED_GROUPED)
ROW_BYTES = 16
"""Rows of a grouped operand, and of its result, begin at multiples of this."""
LARGEST_TILE = 512
"""Rows of the largest tile that torchao's dim-1 cast may choose. Source: prototype/mx_formats/kernels.py, 0.18."""


def _shown(name: str, spec: TensorSpec) -> str:
    return f"{name} local {list(spec.shape)}"


@constraint(*SCALED, do="copy it: scale.contiguous()")
def tiles_in_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Scales of 1x32 and 1x16 blocks are contiguous."""
    if architecture == "cpu" or operands[2].dtype is torch.float32:
        return None
    tiled = [spec for spec in operands[2:] if spec.dtype is operands[2].dtype]  # NVFP4 has a second, plain scale each
    for name, spec in zip(("scale_a", "scale_b"), tiled, strict=False):
        if not is_contiguous(spec.shape, spec.stride):
            return f"{_shown(name, spec)} has strides {list(spec.stride)}: it must be contiguous"
    return None


@constraint(aten._scaled_mm.default, do="copy the scales, the dim of the rows innermost")
def block_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """1x128 scales have the outer dim innermost, 128x128 scales the blocks of k. Source: is_blockwise_*_scaling."""
    found = inferred_scales(*operands[:4])
    if architecture == "cpu" or found is None or not is_by_block(operands):
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
    if architecture == "cpu" or not is_by_block(operands):
        return None
    for name, spec in zip(("scale_a", "scale_b"), operands[2:4], strict=True):
        if spec.shape[0] > 1 and spec.stride[0] != 1:
            return f"{_shown(name, spec)} has strides {list(spec.stride)}: it must be column-major"
    return None


@constraint(*SCALED, do="pad the tokens to a multiple of 4")
def rows_of_blocks(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """cuBLASLt wants M in fours where scales are of blocks of 128. Source: vllm-project/vllm#49932."""
    mat1 = operands[0]
    if architecture == "cpu" or not is_by_block(operands) or mat1.shape[0] % 4 == 0:
        return None
    return f"{_shown('mat1', mat1)}: {mat1.shape[0]} is not a multiple of 4"


@constraint(aten._scaled_mm_v2.default, of_call=True, do="copy it: scale_b.contiguous()")
def named_row_order(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """Rowwise factors of mat2 lie one behind the other in v2. Source: _scaled_rowwise_rowwise."""
    if architecture == "cpu" or not is_rowwise(operands, call) or operands[3].shape[-1] == 1:
        return None
    spec = operands[3]
    if spec.stride[-1] == 1:
        return None
    return f"{_shown('scale_b', spec)} has strides {list(spec.stride)}: its last dim must be innermost"


@constraint(aten._scaled_mm.default, do="pad tokens and out features to a multiple of 16, in features to one of 128")
def mx_on_amd(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """M and N in sixteens, K in blocks of 128 values. Source: _scaled_mm_out_cuda, USE_ROCM."""
    if not _is_mx_on_amd(operands, architecture):
        return None
    (mat1, mat2), values = operands[:2], values_in(operands[0].dtype)
    for name, spec, size, multiple in (
        ("mat1", mat1, mat1.shape[0], 16),
        ("mat1", mat1, mat1.shape[1] * values, 128),
        ("mat2", mat2, mat2.shape[1], 16),
    ):
        if size % multiple:
            return f"{_shown(name, spec)}: {size} is not a multiple of {multiple}"
    return None


@constraint(aten._scaled_mm_v2.default, do="pad the layer, and the tokens, to a multiple of 32")
def named_mx_on_amd(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """M, N and K in blocks of 32. Source: _scaled_mxfp8_mxfp8, USE_ROCM."""
    for name, spec in zip(("mat1", "mat2"), operands[:2], strict=True):
        for size in spec.shape:
            if _is_mx_on_amd(operands, architecture) and size % 32:
                return f"{_shown(name, spec)}: {size} is not a multiple of 32"
    return None


def _is_mx_on_amd(operands: Sequence[TensorSpec], architecture: str) -> bool:
    return architecture.startswith("gfx") and operands[2].dtype is torch.float8_e8m0fnu


@constraint(aten._scaled_mm.default, of_call=True, do="use scaled_mm, whose swizzle is an argument")
def mx_order_on_amd(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """Whether scales are swizzled depends on the ROCm version and shows nowhere, so k is not split."""
    k, whole = operands[0].shape[1], call.tensors[0].shape[1]
    if not architecture.startswith("gfx") or operands[2].dtype is not torch.float8_e8m0fnu or k == whole:
        return None
    return f"{_shown('mat1', operands[0])} of K {whole}: {architecture} does not say in which order MX scales lie"


# ---- grouped ------------------------------------------------------------------------------------------------------


@constraint(*SCALED_GROUPED, do="pad features, and every group of tokens, to a multiple of 16")
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


@constraint(*SCALED_GROUPED, do="copy it: mat1.contiguous(), mat2.transpose(-1, -2).contiguous().transpose(-1, -2)")
def grouped_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """mat1 row-major, mat2 column-major in their last two dims; rowwise scales contiguous in the last."""
    if architecture == "cpu":
        return None
    wrong = wrong_order(operands)
    if wrong:
        return wrong
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
    if is_contiguous(x.shape, x.stride):
        return None
    return f"{_shown('x', x)} has strides {list(x.stride)}: it must be contiguous"


@constraint(_DIM0, do="cast it to bfloat16 first")
def torchao_dim0_dtype(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """The dim-0 cast reads bfloat16. Source: torchao/prototype/mx_formats/kernels.py, 0.18."""
    dtype = operands[0].dtype
    return None if dtype is torch.bfloat16 else f"x is {dtype_name(dtype)}: the kernel reads bfloat16"


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
    if architecture == "cpu" or has_mx(architecture):
        return None
    return f"torchao's MX casts: {architecture} has none, sm100 and gfx950 have"
