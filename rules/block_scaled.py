"""Block-scaled formats: casts to MX and their GEMM. A block of 32 elements shares a scale, so it is never cut.

A dim along which blocks lie is `(c s)`: c blocks of s elements. Splitting c takes the data and the scales along; s
stays whole, so quantised values are those of the unsplit tensor bit for bit. A cast of a partial sum is no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph import TensorSpec, dtype_name
from ..ops import mx_mm as _mx_mm  # noqa: F401  (defines torch.ops.autoparallel_fp8.mx_mm)
from ..ops.to_mx import BLOCK_SIZE
from .constraints import ALIGNMENT, constraint, one_e4m3, wrong_order
from .gemm_kernels import has_mx, sm
from .language import OpCall, Signature, einsum, heavy, rule

ops = torch.ops.autoparallel_fp8

heavy(ops.mx_mm.default)


@rule(ops.to_mx.default)
def to_mx(op: OpCall) -> Signature:
    """x[..., (c s), ...] -> data[..., (c s), ...], scale[..., c, ...]."""
    ndim, block = len(op.tensors[0].shape), op.arg("block_size")
    axis = op.arg("axis") % ndim
    names = [f"d{i}" for i in range(ndim)]
    data = " ".join("(c s)" if i == axis else name for i, name in enumerate(names))
    scale = " ".join("c" if i == axis else name for i, name in enumerate(names))
    return einsum(op, f"{data} -> {data}, {scale}", sizes={"s": block}, whole=("s",))


@rule(ops.mx_mm.default)
def mx_mm(op: OpCall) -> Signature:
    """a[m, (c s)], b[(c s), n], scale_a[m, c], scale_b[c, n] -> out[m, n]; a split c leaves parts of the sum."""
    text = "m (c s), (c s) n, m c, c n -> m n"
    return einsum(op, text, sizes={"s": BLOCK_SIZE}, whole=("s",))


@constraint(
    ops.mx_mm.default,
    of_kernel=True,
    do="plan for a device that has one, or with emulate=True: there it multiplies in bfloat16",
)
def mx_devices(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """sm100 and later, gfx950 (`ops.mx_mm.has_kernel` asks the device itself); CPUs multiply in float32."""
    if architecture == "cpu" or has_mx(architecture):
        return None
    return f"{architecture} has no MX GEMM: it needs sm100 or later, or gfx950"


@constraint(ops.mx_mm.default, do="pad out features to a multiple of 16, or keep the layer in bf16")
def mx_aligned(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """N is a multiple of 16 on NVIDIA; K is whole blocks by the rule.

    Source: torch/_meta_registrations.py, _check_scaled_mm_sizes_v2.
    """
    size = operands[1].shape[1]
    if not sm(architecture) or size % ALIGNMENT == 0:
        return None
    return f"mat2 local {list(operands[1].shape)}: {size} is not a multiple of {ALIGNMENT}"


@constraint(
    ops.mx_mm.default,
    do=f"pad tokens and out features to a multiple of {BLOCK_SIZE}, or keep the layer in bf16",
)
def mx_aligned_on_amd(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """M and N are multiples of 32 on AMD. Source: ATen/native/cuda/ScaledBlas.cpp, _scaled_mxfp8_mxfp8."""
    mat1, mat2 = operands[0], operands[1]
    for name, spec, size in (("mat1", mat1, mat1.shape[0]), ("mat2", mat2, mat2.shape[1])):
        if architecture.startswith("gfx") and size % BLOCK_SIZE:
            return f"{name} local {list(spec.shape)}: {size} is not a multiple of {BLOCK_SIZE}"
    return None


constraint(ops.mx_mm.default, do="cast one of them to float8_e4m3fn")(one_e4m3)  # its kernel is torch's scaled GEMM


@constraint(ops.mx_mm.default, of_call=True, do="make it in bfloat16 and cast after the GEMM")
def mx_result_dtype(operands: Sequence[TensorSpec], architecture: str, call: OpCall) -> str | None:
    """AMD's kernel makes bfloat16 and float16; the op itself takes no other than these and float32."""
    made = call.out[0].dtype
    if not architecture.startswith("gfx") or made in (torch.bfloat16, torch.float16):
        return None
    return f"a result of {dtype_name(made)}: {architecture} multiplies MX operands into bfloat16 or float16"


@constraint(ops.mx_mm.default, do="cast mat1 along its last dim and mat2 along its first")
def mx_operand_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """mat1 row-major, mat2 column-major. Source: torch/_meta_registrations.py, _check_scaled_mm_sizes_v2."""
    if architecture == "cpu":
        return None
    return wrong_order(operands)
