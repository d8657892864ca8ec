"""What a mesh may do to one op, as text: a table of options, then what kernels refuse and what does not divide."""

from __future__ import annotations

import re

from ..capture.one_op import format_shape, format_spec
from ..layout import format_layout
from ..op_options import LocalTensor, OpOptions
from .text import format_table

MOST_OPTIONS = 200
"""Options, refused layouts and uneven splits that are shown, each; the answer itself has all of them."""
MOST_MEMBERS = 6
"""Members of a list of tensors that are shown."""


def format_options(found: OpOptions) -> str:
    """What `print(options(...))` shows."""
    reads = ", ".join(_shortened([f"{name} {format_spec(spec)}" for name, spec in found.operands.items()]))
    makes = ", ".join(_shortened([f"{name} {format_spec(spec)}" for name, spec in found.results.items()]))
    parts = [f"{found.op}: {reads or 'no tensor'} -> {makes}\nmesh {found.mesh}, device {found.device}"]
    parts += [text for text in (_options(found), _refused(found), _uneven(found)) if text]
    return "\n\n".join(parts)


def _options(found: OpOptions) -> str:
    if not found.options:
        return f"no option: the kernel refuses it even unsplit\n  do: {found.advice or 'change the operands'}"
    local = any(option.local for option in found.options)
    names = _shortened([tensor.name for tensor in (*found.options[0].operands, *found.options[0].results)])
    rows = [(*names, f"rows ({', '.join(found.mesh.names)})", *(["program"] if local else []))]
    for option in found.options[:MOST_OPTIONS]:
        tensors = (*option.operands, *option.results)
        cells = _shortened([tensor.name for tensor in tensors], list(map(_cell, tensors)))
        rows.append((*cells, ", ".join(option.notes), *([option.local] if local else [])))
    return "\n".join([format_table(rows), *_more(len(found.options), "options")])


def _refused(found: OpOptions) -> str:
    """Each sentence once, with the layouts that it rules out."""
    grouped: dict[str, list[str]] = {}
    for option in found.refused[:MOST_OPTIONS]:
        left, right = (
            " x ".join(_shortened([t.name for t in side], list(map(_layout, side))))
            for side in (option.operands, option.results)
        )
        grouped.setdefault(option.sentence, []).append(f"    {left} -> {right}")
    lines = [line for sentence, layouts in grouped.items() for line in (f"  {sentence}", *layouts)]
    lines += _more(len(found.refused), "refused layouts")
    return "\n".join(["refused by the kernel:", *lines]) if lines else ""


def _uneven(found: OpOptions) -> str:
    lines = [f"  {split.sentence} ({split.note})" for split in found.uneven[:MOST_OPTIONS]]
    lines += _more(len(found.uneven), "splits that do not come out even")
    return "\n".join(["not split:", *lines]) if lines else ""


def _more(count: int, what: str) -> list[str]:
    """The sentence about what is not shown."""
    left = count - MOST_OPTIONS
    return (
        [f"... and {left} more {what} of {count}: as JSON (--json, to_json()) they are all there"] if left > 0 else []
    )


def _shortened(names: list[str], cells: list[str] | None = None) -> list[str]:
    """The cells, or the names themselves, with the middle of a long list of tensors left out."""
    cells = names if cells is None else cells
    members = [i for i, name in enumerate(names) if re.match(r"\w+\[\d+\]", name)]
    if len(members) <= MOST_MEMBERS:
        return cells
    first, last = members[MOST_MEMBERS - 2], members[-1]
    gap = f"... {len(members) - MOST_MEMBERS} more ..." if cells is names else "..."
    return [*cells[: first + 1], gap, *cells[last:]]


def _cell(tensor: LocalTensor) -> str:
    return f"{format_layout(tensor.layout)} {format_shape(tensor.shape, tensor.stride)}"


def _layout(tensor: LocalTensor) -> str:
    return f"[{format_layout(tensor.layout)}]"
