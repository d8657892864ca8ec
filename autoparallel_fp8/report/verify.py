"""A `Verification` as text: what ran, the bound and its reason, and every tensor's error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .text import format_table

if TYPE_CHECKING:
    from ..verify import Verification


def format_verification(result: Verification) -> str:
    """The verdict, then a line a tensor, those beyond the bound marked."""
    wrong = [one for one in result.compared if not one.is_ok]
    verdict = (
        f"{len(wrong)} of {len(result.compared)} tensors are WRONG"
        if wrong
        else f"all {len(result.compared)} results and gradients equal the unsharded model's"
    )
    whole, small = result.largest_shrunk
    head = (
        f"{verdict}\n{result.num_ranks} ranks in one process; largest tensor {whole} -> {small} elements; "
        f"{result.reason}\n"
    )
    rows = [("kind", "tensor", "shape", "error", "bound", "")]
    for one in result.compared:
        errors = f"{one.error:.1e}", f"{one.bound:.1e}", "" if one.is_ok else "WRONG"
        rows.append((one.kind, one.name, str(list(one.shape)), *errors))
    return f"{head}\n{format_table(rows)}"
