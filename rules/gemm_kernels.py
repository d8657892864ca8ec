"""Which scaled GEMMs a device has at all, and in which dtypes; `gemm_constraints.py` has what they demand of shapes.

Float8: sm89, sm90 and later, gfx94x (in fnuz), gfx950, gfx12xx. Blocks of 128: sm90 alone. MX and NVFP4: sm100 and
later (gfx950: MX). Grouped: sm90, sm100, gfx94x, gfx950; MX ones sm100. CPUs run every recipe, in float32.

Sources, where none is named: ATen/native/cuda/ScaledBlas.cpp, GroupedBlas.cpp, ScaledBlasDeviceUtils.cpp;
torch/_meta_registrations.py, 2.13. Not held, and why: what a build is without (ROCm before 7.0, CUDA before 12.9, no
MSLK for MXFP4), since a device does not tell; float8 results of sm90's rowwise GEMMs and of MX and NVFP4 ones, on which
cuBLAS decides; Intel's GPUs, of which nothing is known here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph import TensorSpec, dtype_name
from ..ops.scaling import ROWWISE, inferred_scales
from .constraints import constraint, is_fnuz
from .language import OpCall

aten = torch.ops.aten
SCALED = (aten._scaled_mm.default, aten._scaled_mm_v2.default)
SCALED_GROUPED = (aten._scaled_grouped_mm.default, aten._scaled_grouped_mm_v2.default)
_FP4 = torch.float4_e2m1fn_x2
_HALVES = (torch.bfloat16, torch.float16)
_E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)
_WIDE = (*_HALVES, torch.float32)
_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_OCP = (torch.float8_e4m3fn, torch.float8_e5m2)


def sm(architecture: str) -> int:
    """The number of an NVIDIA architecture, 0 for others.

    >>> sm("sm90"), sm("gfx950")
    (90, 0)
    """
    digits = "".join(c for c in architecture.removeprefix("sm") if c.isdigit())
    return int(digits) if architecture.startswith("sm") and digits else 0


def has_mx(architecture: str) -> bool:
    """Whether the device multiplies and casts MX: sm100 and later, gfx950."""
    return sm(architecture) >= 100 or architecture.startswith("gfx950")


def is_by_block(operands: Sequence[TensorSpec]) -> bool:
    """Whether float32 scales are of blocks: more than one an operand, and more than one a row."""
    a, b, scale_a, scale_b = operands[:4]
    is_rowwise = (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
    return scale_a.dtype is torch.float32 and not is_rowwise and not scale_a.numel == scale_b.numel == 1


# ---- whether there is a kernel ---------------------------------------------------------------------------------------


@constraint(
    *SCALED,
    of_kernel=True,
    do="plan for a device that has one, keep the product in bf16, or plan with emulate=True",
)
def float8_devices(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Source: scaled_mm_arch_allowed."""
    number = sm(architecture)
    is_without = 0 < number < 90 and number != 89
    if architecture.startswith("gfx"):
        is_without = not architecture.startswith(("gfx94", "gfx950", "gfx12"))
    if not is_without:
        return None
    return f"{architecture} has no float8 GEMM: it needs sm89, sm90 or later, gfx94x, gfx950 or gfx12xx"


@constraint(*SCALED, of_kernel=True, do="plan for sm90, or cast rowwise or to MX")
def blocks_on_sm90(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Scales of 1x128 and 128x128 blocks. Source: _check_deepseek_support."""
    if architecture == "cpu" or not is_by_block(operands) or 90 <= sm(architecture) < 100:
        return None
    return (
        f"scales local {list(operands[2].shape)} are of blocks of 128: {architecture} has no kernel for them, sm90 has"
    )


@constraint(*SCALED, of_kernel=True, do="plan for sm100 or gfx950, or plan another recipe")
def tiles_on_sm100(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Scales of 1x32 and 1x16 blocks; MXFP4 runs on sm100 and sm103 alone. Source: _check_mxfp4_support and its kin."""
    dtype, number = operands[2].dtype, sm(architecture)
    if architecture == "cpu" or dtype is torch.float32:
        return None
    is_mx = dtype is torch.float8_e8m0fnu
    if is_mx and operands[0].dtype is _FP4 and number and not 100 <= number < 110:
        return f"MXFP4: {architecture} has no kernel for it, sm100 has"
    if number >= 100 or (is_mx and has_mx(architecture)):
        return None
    recipe, where = ("MX", "sm100 and gfx950 have") if is_mx else ("NVFP4", "sm100 has")
    return f"{recipe} scales: {architecture} has no kernel for them, {where}"


@constraint(*SCALED_GROUPED, of_kernel=True, do="plan for sm90 or sm100, or keep the experts in bf16")
def grouped_on_hopper(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Grouped float8 GEMMs; MX ones on sm100 alone."""
    number, is_mx = sm(architecture), operands[2].dtype is torch.float8_e8m0fnu
    is_amd = architecture.startswith(("gfx94", "gfx95")) and not is_mx
    if architecture == "cpu" or is_amd or 100 <= number < 110 or (90 <= number < 100 and not is_mx):
        return None
    what, where = ("MX", "sm100 has") if is_mx else ("float8", "sm90, sm100, gfx942 and gfx950 have")
    return f"a grouped {what} GEMM: {architecture} has no kernel for it, {where}"


# ---- dtypes of the operands ------------------------------------------------------------------------------------------


@constraint(*SCALED, *SCALED_GROUPED, do="cast to the device's float8; a plan takes one spelling for the other")
def float8_spelling(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """The MI300 series multiplies fnuz float8, every other device OCP float8."""
    if architecture == "cpu":
        return None
    foreign, other = (_OCP, _FNUZ) if is_fnuz(architecture) else (_FNUZ, _OCP)
    for name, spec in zip(("mat1", "mat2"), operands[:2], strict=True):
        if spec.dtype in foreign:
            own = other[foreign.index(spec.dtype)]
            return f"{name} is {dtype_name(spec.dtype)}: {architecture} multiplies {dtype_name(own)}"
    return None


@constraint(*SCALED, of_call=True, do="cast mat2 to the device's e4m3, or scale it by one factor")
def rowwise_on_amd(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """hipBLASLt's rowwise GEMM has e4m3 on the right."""
    dtype = operands[1].dtype
    if not architecture.startswith("gfx") or not is_rowwise(operands, call) or dtype not in _E5M2:
        return None
    return f"mat2 is {dtype_name(dtype)}: {architecture} scales rows and columns of e4m3 alone"


@constraint(*SCALED_GROUPED, do="cast them to float8_e4m3fn (gfx94x: float8_e4m3fnuz)")
def grouped_e4m3(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """Grouped GEMMs have e4m3 on both sides."""
    for name, spec in zip(("mat1", "mat2"), operands[:2], strict=True):
        if architecture != "cpu" and spec.dtype in _E5M2:
            return f"{name} is {dtype_name(spec.dtype)}: grouped GEMMs multiply e4m3"
    return None


def is_rowwise(operands: Sequence[TensorSpec], call: OpCall) -> bool:
    """Whether the call is scaled rowwise: as it says in v2, as the kernel infers of these operands in v1."""
    if call.op is aten._scaled_mm_v2.default:
        return tuple(call.arg("recipe_a")) == tuple(call.arg("recipe_b")) == (ROWWISE,)
    found = inferred_scales(*operands[:4])
    return found is not None and found[0].recipe == found[1].recipe == ROWWISE


# ---- the result, the bias --------------------------------------------------------------------------------------------


@constraint(*SCALED, of_call=True, do="make it in bfloat16 and cast after the GEMM")
def result_dtype(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """bfloat16, float16, float32, or float8 under one factor; fewer in rowwise and block-scaled GEMMs.

    Rowwise: cuBLAS, which is sm90's, makes float32 too, CUTLASS bfloat16 and float16, hipBLASLt bfloat16 alone. MX on
    AMD: bfloat16 and float16; MXFP4 on NVIDIA: bfloat16 (MSLK's f4f4bf16).
    """
    allowed: tuple[torch.dtype, ...] = (*_WIDE, *_OCP, *_FNUZ)
    made, what = call.out[0].dtype, "scaled GEMMs make"
    is_mx, is_amd = operands[2].dtype is torch.float8_e8m0fnu, architecture.startswith("gfx")
    if architecture != "cpu" and is_rowwise(operands, call) and not 90 <= sm(architecture) < 100:
        allowed, what = (torch.bfloat16,) if is_amd else _HALVES, f"{architecture} scales rows and columns into"
    elif is_mx and is_amd:
        allowed, what = _HALVES, f"{architecture} multiplies MX operands into"
    elif is_mx and sm(architecture) and operands[0].dtype is _FP4:
        allowed, what = (torch.bfloat16,), f"{architecture} multiplies MXFP4 into"
    if made in allowed:
        return None
    shown = (*_WIDE, "float8") if torch.float32 in allowed else allowed
    return f"a result of {dtype_name(made)}: {what} {_list(shown)}"


@constraint(*SCALED_GROUPED, of_call=True, do="make it in bfloat16 and cast after the GEMM")
def grouped_result_dtype(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """bfloat16 alone."""
    made = call.out[0].dtype
    if architecture == "cpu" or made is torch.bfloat16:
        return None
    return f"a result of {dtype_name(made)}: grouped float8 GEMMs make bfloat16"


@constraint(*SCALED, of_call=True, do="cast the bias to the result's dtype, or add it after the GEMM")
def bias_dtype(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """A bias is bfloat16 or float16, as the result is; with a float8 result it is bfloat16 or float16."""
    bias, made = call.arg("bias"), call.out[0].dtype
    if architecture == "cpu" or bias is None:
        return None
    wanted = () if made is torch.float32 else (made,) if made in _HALVES else _HALVES
    if bias.dtype in wanted:
        return None
    return f"a bias of {dtype_name(bias.dtype)} with a result of {dtype_name(made)}: no kernel adds it"


@constraint(aten._scaled_mm_v2.default, of_call=True, do="add the bias after the GEMM")
def mxfp4_bias(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """NVIDIA's MXFP4 kernel is not given the bias. Source: _scaled_mxfp4_mxfp4."""
    is_mxfp4 = operands[0].dtype is _FP4 and operands[2].dtype is torch.float8_e8m0fnu
    if not sm(architecture) or not is_mxfp4 or call.arg("bias") is None:
        return None
    return f"a bias with MXFP4: {architecture} leaves it out of the result"


@constraint(aten._scaled_mm.default, of_call=True, do="make a float8 result, or divide the wide one after the GEMM")
def result_scale(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """The scale of the result is read where that is float8."""
    made = call.out[0].dtype
    if architecture == "cpu" or call.arg("scale_result") is None or made in (*_OCP, *_FNUZ):
        return None
    return f"scale_result with a result of {dtype_name(made)}: kernels scale float8 results alone"


@constraint(*SCALED, of_call=True, do="pass use_fast_accum=False")
def fast_accumulation(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """Packed float4 has none."""
    if architecture == "cpu" or not call.arg("use_fast_accum") or _FP4 not in (t.dtype for t in operands[:2]):
        return None
    return "use_fast_accum with packed float4: no kernel has it"


def _list(dtypes: Sequence[torch.dtype | str]) -> str:
    names = [dtype if isinstance(dtype, str) else dtype_name(dtype) for dtype in dtypes]
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
