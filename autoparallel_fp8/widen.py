"""The same space with every float wider than float8 as float64: a plan then differs from one device by no rounding.

Sums taken in another order differ by 1e-16, so a cast to float8 rounds the same way on both sides, all but always, and
one bound holds for every recipe. Float8 stays, so a plan is still quantised as it says; bytes of collectives are not
what this space tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from .expansion import Space
from .graph import ABSENT, TensorSpec

_WIDE = dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), torch.float64)


def widen(space: Space) -> Space:
    """The space with every bfloat16, float16 and float32, of tensors and among arguments, a float64."""
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


@contextmanager
def float64_by_default() -> Iterator[None]:
    """For running a wide space: what ops make of whole numbers and a float has the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _wide(value: Any) -> Any:
    if value is ABSENT:
        return value
    if isinstance(value, TensorSpec):
        return TensorSpec(value.shape, value.stride, _WIDE.get(value.dtype, value.dtype))
    if isinstance(value, tuple):
        return tuple(map(_wide, value))
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value
