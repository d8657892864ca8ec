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
from .language import OpCall

aten = torch.ops.aten

Check = Callable[..., str | None]
ALIGNMENT = 16
"""K and N of a float8 GEMM are multiples of this. Source: torch/_meta_registrations.py, meta_scaled_mm."""

_CHECKS: dict[Any, list[Check]] = {}
_ADVICE: dict[Check, str] = {}
_OF_CALL: set[Check] = set()


def constraint(*ops: Any, do: str = "", of_call: bool = False) -> Callable[[Check], Check]:
    """Decorator: the function is asked about every option of these op overloads.

    It gets the local specs of the tensors read, in order, and the device's architecture (`sm90`, `gfx942`, `cpu`),
    and returns None or a sentence such as `mat2 local [256, 564]: 564 is not a multiple of 16`.

    Args:
        ops: overloads, or names of such as need not be there ("torchao.triton_to_mxfp8_dim1.default").
        do: what helps where the op breaks it even unsplit.
        of_call: it gets the `OpCall` on whole tensors as a third argument, for attributes and for what was split; it
            is not asked where that is not known.
    """

    def register(function: Check) -> Check:
        for op in ops:
            _CHECKS.setdefault(op, []).append(function)
        _ADVICE[function] = do
        if of_call:
            _OF_CALL.add(function)
        return function

    return register


def broken_constraints(
    op: Any, operands: Sequence[TensorSpec], architecture: str, call: OpCall | None = None
) -> tuple[str, ...]:
    """Every sentence that the op's constraints have about these local operands; empty where the kernel takes them.

    Args:
        op: the overload.
        operands: local specs of the tensors read, in order.
        architecture: of the device.
        call: the op on whole tensors, where it is known.
    """
    sentences = (_ask(check, operands, architecture, call) for check in constraints_of(op))
    return tuple(sentence for sentence in sentences if sentence)


def advice(op: Any, operands: Sequence[TensorSpec], architecture: str, call: OpCall | None = None) -> tuple[str, ...]:
    """What helps against each constraint of the op that these operands break."""
    broken = (check for check in constraints_of(op) if _ask(check, operands, architecture, call))
    return tuple(_ADVICE[check] for check in broken if _ADVICE[check])


def constraints_of(op: Any) -> tuple[Check, ...]:
    """The constraints of an op, in order."""
    return (*_CHECKS.get(op, ()), *_CHECKS.get(str(op), ()))


def _ask(check: Check, operands: Sequence[TensorSpec], architecture: str, call: OpCall | None) -> str | None:
    if check not in _OF_CALL:
        return check(operands, architecture)
    return None if call is None else check(operands, architecture, call)


@constraint(
    aten._scaled_mm.default,
    aten._scaled_mm_v2.default,
    do="pad the layer to a multiple of 16, or keep it in bf16 (leave it out of the conversion)",
)
def aligned_16(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """K and N are multiples of 16 on every rank."""
    if architecture == "cpu":
        return None
    mat2 = operands[1]
    for size in mat2.shape:
        if size % ALIGNMENT:
            return f"mat2 local {list(mat2.shape)}: {size} is not a multiple of {ALIGNMENT}"
    return None


@constraint(
    aten._scaled_mm.default, aten._scaled_mm_v2.default, do="copy it: mat1.contiguous(), mat2.t().contiguous().t()"
)
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


@constraint(aten._scaled_mm.default, aten._scaled_mm_v2.default, do="cast one of them to float8_e4m3fn")
def one_e4m3(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """CUDA multiplies no e5m2 with e5m2. Source: ATen/native/cuda/ScaledBlas.cpp, _scaled_mm_out_cuda."""
    if architecture.startswith("sm") and all(t.dtype is torch.float8_e5m2 for t in operands[:2]):
        return "mat1 and mat2 are both float8_e5m2: one of them must be float8_e4m3fn"
    return None
