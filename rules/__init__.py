"""What placements each op allows: one rule an op, read from top to bottom; see `language.py` for the notation.

matmul: GEMMs, scaled GEMMs included · pointwise: element by element · reductions: sums and maxima ·
views: reshapes and moves · lookup: embedding, gather, scatter · attention · factories · constraints: what kernels demand.
"""

from . import attention, factories, lookup, matmul, pointwise, reductions, views  # noqa: F401  (they register rules)
from .constraints import broken_constraints, constraint
from .language import HEAVY_OPS, AxisRow, OpCall, Signature, einsum, find_rule, heavy, moved, reduction, regrouped, rows, rule, rule_ops
from .language import pointwise as elementwise

__all__ = [
    "HEAVY_OPS",
    "AxisRow",
    "OpCall",
    "Signature",
    "broken_constraints",
    "constraint",
    "einsum",
    "elementwise",
    "find_rule",
    "heavy",
    "moved",
    "reduction",
    "regrouped",
    "rows",
    "rule",
    "rule_ops",
]
