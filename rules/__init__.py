"""What placements each op allows: one rule an op, read from top to bottom; see `language.py` for the notation.

matmul, scaled_matmul, grouped_matmul: GEMMs · torchao_ops: torchao's, by name · block_scaled: MX casts and GEMMs ·
pointwise: element by element · reductions: sums and maxima · views: reshapes and moves · lookup: embedding, gather,
scatter · attention · convolution · factories · random: dropout · constraints, gemm_constraints,
gemm_kernels: of kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import (  # noqa: F401  (they register rules)
    attention,
    block_scaled,
    convolution,
    factories,
    gemm_constraints,
    gemm_kernels,
    grouped_matmul,
    lookup,
    matmul,
    pointwise,
    random,
    reductions,
    scaled_matmul,
    torchao_ops,
    views,
)
from .constraints import ALIGNMENT, advice, broken_constraints, constraint, constraints_of, has_kernel, in_float8_of
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
    named_rules,
    reduction,
    rule,
    rule_by_name,
    rule_ops,
    seal_built_in,
)
from .language import pointwise as elementwise
from .local import Where, program
from .regroup import regrouped
from .rows import OwnScales, Place, partial_kinds, place_of, rows

seal_built_in()

if TYPE_CHECKING:
    from ..op_options import options

__all__ = [
    "ALIGNMENT",
    "HEAVY_OPS",
    "AxisRow",
    "Dims",
    "OpCall",
    "OwnScales",
    "Place",
    "Signature",
    "Where",
    "advice",
    "broken_constraints",
    "constraint",
    "constraints_of",
    "einsum",
    "elementwise",
    "find_rule",
    "has_kernel",
    "heavy",
    "in_float8_of",
    "left_out",
    "moved",
    "named_rules",
    "options",
    "partial_kinds",
    "place_of",
    "program",
    "reduction",
    "regrouped",
    "rows",
    "rule",
    "rule_by_name",
    "rule_ops",
]


def __getattr__(name: str) -> Any:
    """`rules.options`, imported when asked for: it runs the stages after this one, which import this package."""
    if name == "options":
        from ..op_options import options

        return options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
