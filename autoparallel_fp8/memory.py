"""The memory row of the problem: what every option holds on one device, and what kept activations add."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .cost_models import Pricing
from .problem import Array, Row

GIB = 2.0**30


def memory_row(pricing: Pricing, limit: float) -> Row:
    """Parameters, gradients and optimizer state of every option, in bytes on one device, against the limit."""
    terms: dict[int, Array] = {}
    for v, node in enumerate(pricing.space.graph.nodes):
        if node.kind == "parameter":
            terms[v] = np.sum(list(pricing.parameter_bytes(v).values()), axis=0)
    return Row("memory", float(limit), terms)


def activation_terms(pricing: Pricing) -> dict[int, Array]:
    """Variable -> bytes on one device that each of its options keeps for backward."""
    terms: dict[int, Array] = {}
    for ref in pricing.fusion.kept:
        held = pricing.kept_bytes(ref)
        terms = added(terms, {ref.node: held})
    return terms


def added(first: Mapping[int, Array], second: Mapping[int, Array]) -> dict[int, Array]:
    """Terms of both; where a variable has both, their sum."""
    result = dict(first)
    for v, held in second.items():
        result[v] = result[v] + held if v in result else held
    return result
