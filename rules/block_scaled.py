"""Block-scaled formats: casts to MX and their GEMM. A block of 32 elements shares a scale, so it is never cut.

A dim along which blocks lie is `(c s)`: c blocks of s elements. Splitting c takes the data and the scales along; s
stays whole, so quantised values are those of the unsplit tensor bit for bit. A cast of a partial sum is no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..graph import TensorSpec
from ..ops import mx_mm as _mx_mm  # noqa: F401  (defines torch.ops.autoparallel_fp8.mx_mm)
from ..ops.to_mx import BLOCK_SIZE
from .constraints import ALIGNMENT, constraint
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
    do="pad the layer to a multiple of 32, or keep it in bf16 (leave it out of the conversion)",
)
def mx_aligned(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """N is a multiple of 16 on NVIDIA, M and N are of 32 on AMD; K is whole blocks by the rule.

    Source: torch/_meta_registrations.py, _check_scaled_mm_sizes_v2; ATen/native/cuda/ScaledBlas.cpp,
    _scaled_mxfp8_mxfp8. Devices without the kernel multiply in bfloat16 and demand nothing.
    """
    if not _has_kernel(architecture):
        return None
    mat1, mat2 = operands[0], operands[1]
    demands = [("mat2", mat2, mat2.shape[1], ALIGNMENT)]
    if architecture.startswith("gfx"):
        demands = [("mat1", mat1, mat1.shape[0], BLOCK_SIZE), ("mat2", mat2, mat2.shape[1], BLOCK_SIZE)]
    for name, spec, size, multiple in demands:
        if size % multiple:
            return f"{name} local {list(spec.shape)}: {size} is not a multiple of {multiple}"
    return None


@constraint(ops.mx_mm.default, do="cast mat1 along its last dim and mat2 along its first")
def mx_operand_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """mat1 row-major, mat2 column-major. Source: as above."""
    if not _has_kernel(architecture):
        return None
    for name, spec, inner, order in (("mat1", operands[0], 1, "row"), ("mat2", operands[1], 0, "column")):
        if 1 not in spec.shape and spec.stride[inner] != 1:
            return f"{name} local {list(spec.shape)} has strides {list(spec.stride)}: it must be {order}-major"
    return None


def _has_kernel(architecture: str) -> bool:
    """sm100 and later, gfx950 (`ops.mx_mm.has_kernel` asks the device itself)."""
    number = architecture.removeprefix("sm")
    return architecture == "gfx950" or (architecture.startswith("sm") and number.isdigit() and int(number) >= 100)
