"""What a mesh may do to one op, as text: a table of options, then what kernels refuse and what does not divide."""

from __future__ import annotations

from ..capture.one_op import format_shape, format_spec
from ..layout import format_layout
from ..op_options import LocalTensor, OpOptions
from .text import format_table


def format_options(found: OpOptions) -> str:
    """What `print(options(...))` shows."""
    reads = ", ".join(f"{name} {format_spec(spec)}" for name, spec in found.operands.items())
    makes = ", ".join(f"{name} {format_spec(spec)}" for name, spec in found.results.items())
    parts = [f"{found.op}: {reads or 'no tensor'} -> {makes}\nmesh {found.mesh}, device {found.device}"]
    parts += [text for text in (_options(found), _refused(found), _uneven(found)) if text]
    return "\n\n".join(parts)


def _options(found: OpOptions) -> str:
    if not found.options:
        return f"no option: the kernel refuses it even unsplit\n  do: {found.advice or 'change the operands'}"
    local = any(option.local for option in found.options)
    names = [tensor.name for tensor in (*found.options[0].operands, *found.options[0].results)]
    rows = [(*names, f"rows ({', '.join(found.mesh.names)})", *(["program"] if local else []))]
    for option in found.options:
        cells = map(_cell, (*option.operands, *option.results))
        rows.append((*cells, ", ".join(option.notes), *([option.local] if local else [])))
    return format_table(rows)


def _refused(found: OpOptions) -> str:
    """Each sentence once, with the layouts that it rules out."""
    grouped: dict[str, list[str]] = {}
    for option in found.refused:
        left, right = (" x ".join(map(_layout, side)) for side in (option.operands, option.results))
        grouped.setdefault(option.sentence, []).append(f"    {left} -> {right}")
    lines = [line for sentence, layouts in grouped.items() for line in (f"  {sentence}", *layouts)]
    return "\n".join(["refused by the kernel:", *lines]) if lines else ""


def _uneven(found: OpOptions) -> str:
    lines = [f"  {split.sentence} ({split.note})" for split in found.uneven]
    return "\n".join(["not split:", *lines]) if lines else ""


def _cell(tensor: LocalTensor) -> str:
    return f"{format_layout(tensor.layout)} {format_shape(tensor.shape, tensor.stride)}"


def _layout(tensor: LocalTensor) -> str:
    return f"[{format_layout(tensor.layout)}]"
