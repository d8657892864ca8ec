"""What placements each op allows: one rule an op, read from top to bottom; see `language.py` for the notation.

matmul: GEMMs, scaled GEMMs included · pointwise: element by element · reductions: sums and maxima ·
views: reshapes and moves · lookup: embedding, gather, scatter · attention · factories · constraints: of kernels.
"""

from . import attention, factories, lookup, matmul, pointwise, reductions, views  # noqa: F401  (they register rules)
from .constraints import ALIGNMENT, broken_constraints, constraint
from .language import (
    HEAVY_OPS,
    AxisRow,
    Dims,
    OpCall,
    Signature,
    einsum,
    find_rule,
    heavy,
    left_out,
    moved,
    reduction,
    regrouped,
    rule,
    rule_ops,
)
from .language import pointwise as elementwise
from .rows import OwnScales, Place, partial_kinds, place_of, rows

__all__ = [
    "ALIGNMENT",
    "HEAVY_OPS",
    "AxisRow",
    "Dims",
    "OpCall",
    "OwnScales",
    "Place",
    "Signature",
    "broken_constraints",
    "constraint",
    "einsum",
    "elementwise",
    "find_rule",
    "heavy",
    "left_out",
    "moved",
    "partial_kinds",
    "place_of",
    "reduction",
    "regrouped",
    "rows",
    "rule",
    "rule_ops",
]
