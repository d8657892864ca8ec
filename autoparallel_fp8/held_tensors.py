"""Parameters and buffers of a parallel model as a call finds them: what was done to them since they were placed.

A user may cast a module or put other tensors into it. A step would then fail in the middle, on some ranks first, with
the words of an op; so each tensor is looked at before anything runs.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import UsageError
from .graph import TensorSpec, dtype_name
from .layout import Layout, format_layout


def rank_part(
    module: nn.Module, kind: str, name: str, spec: TensorSpec, layout: Layout, device: torch.device
) -> Tensor:
    """This rank's part of a parameter or buffer.

    Args:
        module: the parallel model.
        kind: "parameter" or "buffer".
        name: in the model.
        spec: of the part, as planned.
        layout: of the whole.
        device: that the plan runs on.

    Raises:
        UsageError: it is another tensor than the one that was placed.
    """
    try:
        tensor = module.get_parameter(name) if kind == "parameter" else module.get_buffer(name)
    except AttributeError:
        _refuse(f"{kind} {name} is gone", "leave parameters and buffers where apply placed them")
    is_placed = isinstance(tensor, DTensor)
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if part.dtype != spec.dtype:
        _refuse(
            f"{kind} {name} is {dtype_name(part.dtype)}, and was planned as {dtype_name(spec.dtype)}",
            "cast it back; to compute in another dtype plan with mixed_precision=MixedPrecisionPolicy(...), or plan "
            "the model in that dtype",
        )
    if kind == "parameter" and not is_placed:
        _refuse(
            f"parameter {name} is a plain tensor in place of the DTensor that lies as [{format_layout(layout)}]",
            "write values into the parameter that is there, p.data.copy_(distribute_tensor(value, p.device_mesh, "
            "p.placements)), or load them with torch.distributed.checkpoint",
        )
    if tuple(part.shape) != spec.shape:
        _refuse(
            f"{kind} {name} is {list(part.shape)} on this rank, and [{format_layout(layout)}] of the plan gives "
            f"{list(spec.shape)}",
            "leave parameters and buffers where apply placed them",
        )
    if part.device.type != device.type:
        _refuse(
            f"{kind} {name} is on {part.device}, and was placed on {device}",
            "leave the module on its device; apply the plan on a mesh of the other one",
        )
    return part


def _refuse(message: str, do: str) -> NoReturn:
    raise UsageError(message, at="ParallelModule.forward", do=do)
