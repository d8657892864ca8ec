"""What kernels demand of the operands that one rank hands them: named predicates with a sentence each.

A constraint looks at *local* shapes, strides and dtypes (after the split) and returns a sentence where they break it.
Options that break one never reach the solver; the sentence is kept for `explain`.
To add one: a function under `@constraint(op)`; see `aligned_16`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..graph import TensorSpec

aten = torch.ops.aten

Check = Callable[[Sequence[TensorSpec], str], str | None]
ALIGNMENT = 16
"""K and N of a float8 GEMM are multiples of this. Source: torch/_meta_registrations.py, meta_scaled_mm."""

_CHECKS: dict[Any, list[Check]] = {}


def constraint(*ops: Any) -> Callable[[Check], Check]:
    """Decorator: the function is asked about every option of these op overloads.

    It gets the local specs of the tensors read, in order, and the device's architecture (`sm90`, `gfx942`, `cpu`),
    and returns None or a sentence such as `mat2 local [256, 564]: 564 is not a multiple of 16`.
    """

    def register(function: Check) -> Check:
        for op in ops:
            _CHECKS.setdefault(op, []).append(function)
        return function

    return register


def broken_constraints(op: Any, operands: Sequence[TensorSpec], architecture: str) -> tuple[str, ...]:
    """Every sentence that the op's constraints have about these local operands; empty where the kernel takes them."""
    sentences = (check(operands, architecture) for check in _CHECKS.get(op, ()))
    return tuple(sentence for sentence in sentences if sentence)


@constraint(aten._scaled_mm.default)
def aligned_16(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """K and N are multiples of 16 on every rank."""
    if architecture == "cpu":
        return None
    mat2 = operands[1]
    for size in mat2.shape:
        if size % ALIGNMENT:
            return f"mat2 local {list(mat2.shape)}: {size} is not a multiple of {ALIGNMENT}"
    return None


@constraint(aten._scaled_mm.default)
def operand_order(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """mat1 row-major, mat2 column-major. Source: as above; sm90's float8 GEMMs take no other order."""
    if architecture == "cpu":
        return None
    mat1, mat2 = operands[0], operands[1]
    if 1 not in mat1.shape and mat1.stride[1] != 1:
        return f"mat1 local {list(mat1.shape)} has strides {list(mat1.stride)}: it must be row-major"
    if 1 not in mat2.shape and mat2.stride[0] != 1:
        return f"mat2 local {list(mat2.shape)} has strides {list(mat2.stride)}: it must be column-major"
    return None


@constraint(aten._scaled_mm.default)
def one_e4m3(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """CUDA multiplies no e5m2 with e5m2. Source: ATen/native/cuda/ScaledBlas.cpp, _scaled_mm_out_cuda."""
    if architecture.startswith("sm") and all(t.dtype is torch.float8_e5m2 for t in operands[:2]):
        return "mat1 and mat2 are both float8_e5m2: one of them must be float8_e4m3fn"
    return None
