"""Ops whose result is as large as an argument says, so that a rank calls them with the size of its own part.

`lower.py` rewrites that argument. Of these ops alone may a rule split what no tensor read has: any other op would make
all of it on every rank, unless a local program runs in its place.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

SIZE_ARGUMENT = {
    aten.view.default: "size",
    aten._unsafe_view.default: "size",
    aten.reshape.default: "shape",
    aten.expand.default: "size",
    aten.zeros.default: "size",
    aten.ones.default: "size",
    aten.full.default: "size",
    aten.empty.memory_format: "size",
    aten.new_zeros.default: "size",
    aten.new_ones.default: "size",
    aten.new_full.default: "size",
    aten.new_empty.default: "size",
    aten.slice_backward.default: "input_sizes",
}
"""Op -> the argument that holds the shape of the result."""

SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def sized_by_arguments(op: Any) -> bool:
    """Whether the shape of the op's result stands among its arguments, so that a rank calls it with others."""
    return op in SIZE_ARGUMENT or op in SQUEEZES or op in (aten.repeat.default, aten.embedding_dense_backward.default)
