"""The plan as text: what was asked, how good the plan is, where every parameter lies, what moves, what it holds."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import CollectivePlan, ParameterPlan, Plan
from ..plan_text import fold, numbers_of, pattern_of, placement_text


def format_plan(plan: Plan) -> str:
    """The whole plan as printed by `print(plan)`; repeated layers are folded into one line."""
    parts = [
        format_head(plan),
        format_inputs(plan),
        format_parameters(plan),
        format_collectives(plan),
        format_memory(plan),
        format_notes(plan),
    ]
    return "\n\n".join(part for part in parts if part)


def format_head(plan: Plan) -> str:
    devices = 1
    for size in plan.mesh.values():
        devices *= size
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    inputs = ", ".join(plan.inputs.values())
    proof = {
        "optimal": f"proven optimal (gap {plan.gap:.1e})",
        "feasible": f"within {plan.gap:.2%} of optimal (lower bound {format_us(plan.lower_bound_us)})",
    }.get(plan.status, plan.status)
    t = plan.step_time_us
    return "\n".join(
        [
            f"{plan.model}, {plan.recipe or 'no recipe'}, on {devices} x {plan.device} ({mesh}); inputs {inputs}",
            f"step {format_us(t['total'])}: compute {format_us(t['compute'])}, exposed communication "
            f"{format_us(t['exposed_comm'])}, optimizer {format_us(t['optimizer'])}; "
            f"{format_us(t['hidden_comm'])} of communication runs beside compute",
            f"{proof}",
        ]
    )


def format_inputs(plan: Plan) -> str:
    """Which rows of each input a rank works on; ranks along an axis with R must have the same."""
    placed = [f"{node.name} {node.output[0]}" for node in plan.nodes if node.op == "input"]
    return f"inputs lie as ({', '.join(plan.mesh)}): {'; '.join(placed)}" if placed else ""


def format_parameters(plan: Plan) -> str:
    """One line a parameter; layers with the same line are folded, `layers.{0-31}.mlp.up_proj.weight`."""
    rows = [("parameter", "shape", "dtype", f"placement ({', '.join(plan.mesh)})", "local", "why")]
    folded: dict[tuple[str, ParameterPlan], list[tuple[int, ...]]] = {}
    names: dict[tuple[str, ParameterPlan], str] = {}
    for name, parameter in plan.parameters.items():
        key = (pattern_of(name), _hashable(parameter))
        folded.setdefault(key, []).append(numbers_of(name))
        names.setdefault(key, name)
    for (pattern, parameter), numbers in folded.items():
        rows.append(
            (
                fold(pattern, numbers),
                _shape(parameter.shape),
                short_dtype(parameter.dtype),
                placement_text(parameter.placements, dict(parameter.split)),
                _shape(parameter.local_shape),
                parameter.why,
            )
        )
    return format_table(rows)


def format_collectives(plan: Plan) -> str:
    """What moves in a step, summed over equal kinds."""
    groups: dict[tuple[str, str, str, bool], list[CollectivePlan]] = {}
    for c in plan.collectives:
        groups.setdefault((c.kind, c.axis, c.dtype, c.hidden), []).append(c)
    if not groups:
        return "no communication"
    rows = [("collective", "axis", "dtype", "count", "bytes", "time", "beside compute")]
    for (kind, axis, dtype, hidden), items in sorted(groups.items(), key=lambda g: -sum(c.us for c in g[1])):
        total = sum(c.bytes for c in items)
        rows.append(
            (kind.replace("_", "-"), axis, short_dtype(dtype), str(len(items)), format_bytes(total),
             format_us(sum(c.us for c in items)), "yes" if hidden else "no")
        )  # fmt: skip
    text = format_table(rows)
    small = [c for c in plan.collectives if c.dtype.startswith("float8") and c.kind == "all_gather"]
    if small:
        moved = sum(c.bytes for c in small)
        text += (
            f"\n{len(small)} gathers move float8, 1 byte an element: {format_bytes(moved)} instead of "
            f"{format_bytes(2 * moved)} in bfloat16; what they carry is cast on its shard."
        )
    return text


def format_memory(plan: Plan) -> str:
    m = plan.memory_bytes
    names = ("parameters", "gradients", "optimizer", "activations")
    parts = ", ".join(f"{name} {format_bytes(m[name])}" for name in names)
    return f"memory a device: {format_bytes(m['total'])} of {format_bytes(m['limit'])} ({parts})"


def format_notes(plan: Plan) -> str:
    lines = [f"note: {note}" for note in plan.notes]
    if plan.replicated_ops:
        lines.append(f"note: no rule for {', '.join(plan.replicated_ops)}: replicated")
    if plan.skipped:
        reasons: dict[str, list[str]] = {}
        for name, reason in plan.skipped.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            made = "MXFP8" if plan.recipe == "mxfp8" else "float8"
            lines.append(f"note: not converted to {made}: {shown} ({reason})")
    return "\n".join(lines)


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the left, two spaces apart; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * min(max(map(len, lines)), 140), *lines[1:]])


def format_us(us: float) -> str:
    """Microseconds as a person reads them.

    >>> format_us(1234.5)
    '1.23 ms'
    """
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} us"


def format_bytes(count: float) -> str:
    """Bytes as a person reads them, binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _hashable(parameter: ParameterPlan) -> ParameterPlan:
    from dataclasses import replace

    return replace(parameter, split=tuple((d, tuple(axes)) for d, axes in parameter.split.items()))  # type: ignore[arg-type]


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def short_dtype(dtype: str) -> str:
    """As the plan's tables name a dtype.

    >>> short_dtype("bfloat16")
    'bf16'
    """
    return {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "float64": "fp64"}.get(dtype, dtype)
