"""What kernels demand of the operands that one rank hands them: named predicates with a sentence each.

A constraint looks at *local* shapes, strides and dtypes (after the split) and returns a sentence where they break it.
Options that break one never reach the solver; the sentence is kept for `explain`.
To add one: a function under `@constraint(op)`; see `aligned_16`. One that says that the device has no kernel at all
for the call is marked `of_kernel`: there nothing else is asked, and where such a call is emulated (dequantised and
multiplied in bfloat16) nothing is, since a bfloat16 GEMM demands nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..graph import TensorSpec
from .language import OpCall, name_of

aten = torch.ops.aten

Check = Callable[..., str | None]
ALIGNMENT = 16
"""K and N of a float8 GEMM are multiples of this. Source: torch/_meta_registrations.py, meta_scaled_mm."""

_CHECKS: dict[Any, list[Check]] = {}
_ADVICE: dict[Check, str] = {}
_OF_CALL: set[Check] = set()
_OF_KERNEL: set[Check] = set()
_FNUZ = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}
_OCP = {fnuz: ocp for ocp, fnuz in _FNUZ.items()}


def constraint(*ops: Any, do: str = "", of_call: bool = False, of_kernel: bool = False) -> Callable[[Check], Check]:
    """Decorator: the function is asked about every option of these op overloads.

    It gets the local specs of the tensors read, in order, and the device's architecture (`sm90`, `gfx942`, `cpu`),
    and returns None or a sentence such as `mat2 local [256, 564]: 564 is not a multiple of 16`.

    Args:
        ops: overloads, or names of such as need not be there ("torchao.triton_to_mxfp8_dim1.default").
        do: what helps where the op breaks it even unsplit.
        of_call: it gets the `OpCall` on whole tensors as a third argument, for attributes and for what was split; it
            is not asked where that is not known.
        of_kernel: its sentence says that the device has no kernel for the call, however it is split.
    """

    def register(function: Check) -> Check:
        for op in ops:
            _CHECKS.setdefault(op, []).append(function)
        _ADVICE[function] = do
        if of_call:
            _OF_CALL.add(function)
        if of_kernel:
            _OF_KERNEL.add(function)
        return function

    return register


def broken_constraints(
    op: Any,
    operands: Sequence[TensorSpec],
    architecture: str,
    call: OpCall | None = None,
    *,
    emulate: bool = False,
) -> tuple[str, ...]:
    """Every sentence that the op's constraints have about these local operands; empty where the kernel takes them.

    Args:
        op: the overload.
        operands: local specs of the tensors read, in order.
        architecture: of the device.
        call: the op on whole tensors, where it is known.
        emulate: a call without a kernel on the device is emulated, which demands nothing.
    """
    missing = tuple(_broken(op, operands, architecture, call, of_kernel=True).values())
    if missing:
        return () if emulate else missing
    return tuple(_broken(op, operands, architecture, call, of_kernel=False).values())


def advice(op: Any, operands: Sequence[TensorSpec], architecture: str, call: OpCall | None = None) -> tuple[str, ...]:
    """What helps against each constraint of the op that these operands break."""
    broken = _broken(op, operands, architecture, call, of_kernel=True)
    broken = broken or _broken(op, operands, architecture, call, of_kernel=False)
    return tuple(dict.fromkeys(_ADVICE[check] for check in broken if _ADVICE[check]))


def has_kernel(op: Any, operands: Sequence[TensorSpec], architecture: str, call: OpCall | None = None) -> bool:
    """Whether the device has a kernel for the call at all."""
    return not _broken(op, operands, architecture, call, of_kernel=True)


def in_float8_of(architecture: str, operands: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The operands of a product with float8 data in the device's own spelling: fnuz on gfx94x, OCP elsewhere.

    A graph names the float8 type of the machine that traced it; a plan's is the type of the device it is for.
    """
    twins = _FNUZ if is_fnuz(architecture) else _OCP
    found = [replace(spec, dtype=twins.get(spec.dtype, spec.dtype)) for spec in operands[:2]]
    return (*found, *operands[2:])


def is_fnuz(architecture: str) -> bool:
    """Whether the device's float8 is fnuz: the MI300 series alone. Source: ATen, _scaled_mm_is_fnuz."""
    return architecture.startswith("gfx94")


def constraints_of(op: Any) -> tuple[Check, ...]:
    """The constraints of an op, in order."""
    return (*_CHECKS.get(op, ()), *_CHECKS.get(name_of(op), ()))


def _broken(
    op: Any, operands: Sequence[TensorSpec], architecture: str, call: OpCall | None, *, of_kernel: bool
) -> dict[Check, str]:
    """The constraints that are broken, each with its sentence: those of the kernel's being there, or the others."""
    checks = [check for check in constraints_of(op) if (check in _OF_KERNEL) == of_kernel]
    said = ((check, _ask(check, operands, architecture, call)) for check in checks)
    return {check: sentence for check, sentence in said if sentence}


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
    """mat1 row-major, mat2 column-major. Source: as above; sm90's float8 GEMMs take no other order.

    A part of one row counts too: [1, 64] of a column-major tensor has strides (1, 1), which the kernel refuses.
    """
    if architecture == "cpu":
        return None
    return wrong_order(operands)


def wrong_order(operands: Sequence[TensorSpec]) -> str | None:
    """What is wrong with the memory order of mat1 and mat2, of which one is row-major and one column-major.

    That is, of their last two dims one is innermost, as torch's own check has it: the other's stride is larger.
    """
    for name, spec, inner, outer, order in (
        ("mat1", operands[0], -1, -2, "row"),
        ("mat2", operands[1], -2, -1, "column"),
    ):
        if not spec.stride[outer] > spec.stride[inner] == 1:
            return f"{name} local {list(spec.shape)} has strides {list(spec.stride)}: it must be {order}-major"
    return None


@constraint(aten._scaled_mm.default, aten._scaled_mm_v2.default, do="cast one of them to float8_e4m3fn")
def one_e4m3(operands: Sequence[TensorSpec], architecture: str) -> str | None:
    """CUDA multiplies no e5m2 with e5m2. Source: ATen/native/cuda/ScaledBlas.cpp, _scaled_mm_out_cuda."""
    if architecture.startswith("sm") and all(t.dtype is torch.float8_e5m2 for t in operands[:2]):
        return "mat1 and mat2 are both float8_e5m2: one of them must be float8_e4m3fn"
    return None
