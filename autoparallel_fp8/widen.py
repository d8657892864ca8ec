"""The same space with 16-bit floats as float32: what then differs between a plan and one device is no rounding of sums.

Float8 stays, so a plan is still quantised as it says; bytes of collectives are not what this space tells.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .expansion import Space
from .graph import ABSENT, TensorSpec

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def widen(space: Space) -> Space:
    """The space with every bfloat16 and float16, of tensors and among arguments, a float32."""
    nodes = [
        replace(n, args=_wide(n.args), kwargs=_wide(n.kwargs), outputs=_wide(n.outputs)) for n in space.graph.nodes
    ]
    kinds = []
    for kind in space.kinds:
        call = replace(
            kind.call,
            args=_wide(kind.call.args),
            kwargs=_wide(kind.call.kwargs),
            tensors=_wide(kind.call.tensors),
            out=_wide(kind.call.out),
        )
        kinds.append(replace(kind, call=call))
    return replace(space, graph=replace(space.graph, nodes=tuple(nodes)), kinds=tuple(kinds))


def _wide(value: Any) -> Any:
    if value is ABSENT:
        return value
    if isinstance(value, TensorSpec):
        return TensorSpec(value.shape, value.stride, _WIDE.get(value.dtype, value.dtype))
    if isinstance(value, tuple):
        return tuple(map(_wide, value))
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value
