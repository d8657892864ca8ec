"""Ops whose CPU kernel is missing or too slow, and the formula that runs instead.

A stand-in reads its operands as the kernel would: swizzled scales tile by tile, a recipe from the shapes it is called
with. So a plan, or a rule, that cuts them wrongly gives wrong numbers on the CPU too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .grouped_mm import grouped_mm_formula, scaled_grouped_mm_formula, scaled_grouped_mm_v2_formula
from .scaled_mm import scaled_mm_formula, scaled_mm_v2_formula
from .torchao_formulas import FORMULAS

aten = torch.ops.aten

STAND_INS: dict[Any, Callable[..., Any]] = {
    aten._scaled_mm.default: scaled_mm_formula,
    aten._scaled_mm_v2.default: scaled_mm_v2_formula,
    aten._grouped_mm.default: grouped_mm_formula,
    aten._scaled_grouped_mm.default: scaled_grouped_mm_formula,
    aten._scaled_grouped_mm_v2.default: scaled_grouped_mm_v2_formula,
}


def stand_in(op: Any) -> Any:
    """The formula that runs in an op's place on the CPU; the op itself where it has a kernel.

    torchao's ops are known by name, so that it need not be imported.
    """
    return STAND_INS.get(op) or FORMULAS.get(str(op), op)


def kernels_of(device: torch.device) -> Callable[[Any], Any]:
    """op -> what runs in its place on a device: the kernel where there is one, else its formula."""
    if device.type != "cuda":
        return stand_in
    has_float8 = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)
    return (lambda op: op) if has_float8 else stand_in
