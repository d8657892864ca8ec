"""Random ops: those whose numbers depend on the global position of an element, so that any dim may be split.

A rank draws the numbers of its own part (`dropout_part`, a program that needs to know which part). Other random ops
have no rule and are refused: ranks could not agree on what they draw.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..ops import dropout as _ops  # noqa: F401  (defines torch.ops.autoparallel_fp8.dropout)
from .language import OpCall, Signature, pointwise, rule


@rule(torch.ops.autoparallel_fp8.dropout.default)
def dropout(op: OpCall) -> Signature:
    """Linear in x: every rank drops the same elements of its part of the sum. The seed is no scale."""
    found = pointwise(op, linear=((0,),))
    return replace(found, local=dict.fromkeys(found.sizes, "dropout_part"), passes_scales=False)
