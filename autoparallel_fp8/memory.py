"""The memory row of the problem: what every option holds on one device between forward and backward."""

from __future__ import annotations

import math

import numpy as np

from .cost_models import Pricing
from .problem import Array, Row


def memory_row(pricing: Pricing, limit: float) -> Row:
    """Parameters, gradients, optimizer state and kept activations, in bytes on one device, against the limit."""
    terms: dict[int, Array] = {}
    for v, node in enumerate(pricing.space.graph.nodes):
        if node.kind == "parameter":
            terms[v] = np.sum(list(pricing.parameter_bytes(v).values()), axis=0)
    for ref in pricing.fusion.kept:
        held = pricing.kept_bytes(ref)
        terms[ref.node] = terms[ref.node] + held if ref.node in terms else held
    return Row("memory", float(limit), terms)


def format_need(count: float) -> str:
    """Bytes in the unit that fits, rounded up, so that a limit written so is enough.

    >>> format_need(2**30 + 1)
    '1.01 GiB'
    """
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
    unit, size = next((unit, size) for unit, size in units if count >= size or size == 1)
    return f"{math.ceil(count / size * 100 - 1e-9) / 100:g} {unit}"
