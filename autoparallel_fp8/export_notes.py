"""What the hand-written form of a plan does otherwise than the plan, in sentences for its head."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from math import prod

from .plan import Plan
from .plan_reading import Reading, Splits, size_of, split_name
from .plan_text import placement_text, ranges
from .shard_units import ShardUnits, gathers_of
from .tensor_styles import TensorStyles


def differences(plan: Plan, units: ShardUnits) -> list[str]:
    """`names: plan -> here` for every parameter that lies otherwise, equal layers in one line."""
    found: dict[str, list[str]] = {}
    for name, parameter in plan.parameters.items():
        there = placement_text(parameter.placements, parameter.split)
        here = placement_text(units.placed[name].placements, units.placed[name].split)
        if there != here:
            found.setdefault(f"{there} -> {here}", []).append(name)
    return [f"{pattern}: {text}" for text, names in found.items() for pattern in folded(names)]


def folded(names: Sequence[str]) -> list[str]:
    """Names of equal layers in one: `layers.{0-31}.mlp.up_proj`.

    >>> folded(["layers.0.w", "layers.1.w", "layers.3.w", "head"])
    ['layers.{0-1,3}.w', 'head']
    """
    found: dict[str, list[int]] = {}
    for name in names:
        stack, number, tail = split_name(name) or ("", -1, name)
        pattern = name if number < 0 else f"{stack}{'.' * bool(stack)}#{tail}"
        found.setdefault(pattern, []).append(number)
    return [pattern.replace("#", ranges(sorted(numbers)), 1) for pattern, numbers in found.items()]


def gathers_float8(plan: Plan, reading: Reading, units: ShardUnits) -> bool:
    """Whether `fully_shard` is to gather weights in float8, which torchao does for all of them or none."""
    low, high = _weight_gathers(plan, reading, units)
    split = {unit.module for unit in units.units if unit.split}
    is_possible = plan.recipe == "tensorwise" and len(split) == len(units.units)
    return is_possible and sum(size_of(plan, n) for n in low) > sum(size_of(plan, n) for n in high)


def notes(plan: Plan, reading: Reading, tensor: TensorStyles, units: ShardUnits) -> Iterator[str]:
    """Everything else: one sentence each."""
    yield from _parameters(plan, units)
    for sentence, names in tensor.notes.items():
        yield f"{', '.join(folded(names))}: {sentence}."
    yield from _tokens(plan, reading, units)
    yield from _gathers(plan, units)
    yield from _precision(plan, reading, tensor, units)
    if tensor.is_vocabulary_split:
        yield (
            "The logits are a DTensor split by vocabulary: compute the loss inside "
            "torch.distributed.tensor.parallel.loss_parallel(), with labels as they are."
        )


def _parameters(plan: Plan, units: ShardUnits) -> Iterator[str]:
    moved = {name for name, p in plan.parameters.items() if tuple(p.placements) != tuple(units.placed[name].placements)}
    alike = [n for n, p in plan.parameters.items() if n not in moved and dict(p.split) != dict(units.placed[n].split)]
    if alike:
        yield (
            "A flattened mesh cuts by the earlier axis first: the ranks hold other parts, of the same size, of a dim "
            "that two axes split."
        )
    whole = [name for name in moved if not plan.parameters[name].split]
    if whole:
        yield (
            "What the plan leaves whole is split where its group is: fully_shard splits every parameter of a module, "
            "and reduces no gradient of its ignored_params."
        )
    if moved - set(whole):
        yield "The others lie as most of their group do: one call of fully_shard has one mesh."
    if units.ignored:
        axes = ", ".join(units.axes)
        yield f"{', '.join(units.ignored)}: fully_shard takes no scalars; reduce their gradients over {axes}."


def _tokens(plan: Plan, reading: Reading, units: ShardUnits) -> Iterator[str]:
    """How the plan splits tokens over the data axes, where this is not by batch."""
    used = [u for u in reading.modules.values() if u.kind == "norm"] or list(reading.modules.values())
    for axis in units.axes:
        at = reading.axes.index(axis)
        ways = Counter(_way(u.makes if u.kind == "norm" else u.reads, at) for u in used)
        for way, sentence in _WAYS.items():
            if ways[way]:
                yield sentence.format(axis=axis, count=ways[way], all=len(used))
    ranks = prod(plan.mesh[axis] for axis in units.axes)
    batch = _batch(plan)
    if batch and batch % ranks:
        yield (
            f"Batches are split over all of {', '.join(units.axes)}: use a multiple of {ranks} sequences; "
            f"the plan had {batch}."
        )


_WAYS = {
    "sequence": "The plan splits sequences over {axis} ({count} of {all} activations looked at): context parallelism, "
    "which is not part of this form; here every rank of {axis} takes sequences of its own.",
    "features": "The plan splits features over {axis} ({count} of {all} activations looked at); here every rank of "
    "{axis} takes sequences of its own.",
    "whole": "The plan repeats work on every rank of {axis} ({count} of {all} activations looked at); here every rank "
    "of {axis} takes sequences of its own.",
}


def _way(splits: Splits, at: int) -> str:
    split = splits[at]
    if split is None:
        return "whole"
    if split.dim == 0:
        return "sequence" if split.factor else "batch"
    return "sequence" if split.dim == 1 and len(splits) and not split.factor else "features"


def _batch(plan: Plan) -> int | None:
    """The first dim of the first input."""
    for text in plan.inputs.values():
        if match := re.search(r"\[(\d+)", text):
            return int(match[1])
    return None


def _gathers(plan: Plan, units: ShardUnits) -> Iterator[str]:
    """Weights whose gathers in backward are not as their unit's."""
    again = {unit.module: unit.reshard_after_forward for unit in units.units if unit.split}
    found: dict[str, list[str]] = {}
    for name in plan.parameters:
        over = [gather for gather in gathers_of(plan, name) if set(gather.axes) & set(units.axes)]
        module = _unit_of(name, again)
        if not over or module is None:
            continue
        is_again = any("bwd" in gather.phases for gather in over)
        if is_again != again[module]:
            found.setdefault("kept for backward" if not is_again else "gathered again in backward", []).append(name)
    for what, names in found.items():
        yield f"{', '.join(folded(names))}: {what} in the plan; reshard_after_forward is one for a group."


def _unit_of(name: str, modules: Collection[str]) -> str | None:
    """The innermost of the units that hold a parameter."""
    module = name.rpartition(".")[0]
    while module and module not in modules:
        module = module.rpartition(".")[0]
    return module if module in modules else None


def _weight_gathers(plan: Plan, reading: Reading, units: ShardUnits) -> tuple[list[str], list[str]]:
    """Weights of converted linears that are gathered over data axes in float8, and in more."""
    low: list[str] = []
    high: list[str] = []
    for module, used in reading.modules.items():
        if used.kind != "linear" or used.weight is None or module in plan.skipped:
            continue
        dtypes = {g.dtype for g in gathers_of(plan, used.weight) if set(g.axes) & set(units.axes)}
        if dtypes:
            (low if all(dtype.startswith("float8") for dtype in dtypes) else high).append(used.weight)
    return low, high


def _precision(plan: Plan, reading: Reading, tensor: TensorStyles, units: ShardUnits) -> Iterator[str]:
    if plan.settings.get("mixed_precision") and not units.units:
        yield "Mixed precision is fully_shard's, and nothing is sharded here: cast the model yourself."
    if not plan.recipe:
        if any(node.op.startswith("aten._scaled_mm") or "mx_mm" in node.op for node in plan.nodes):
            yield "The model was converted to low precision before it was planned: convert it before this too."
        return
    low, high = _weight_gathers(plan, reading, units)
    gathers = gathers_float8(plan, reading, units)
    if low and not gathers:
        where = "all weights or none" if plan.recipe == "tensorwise" else "tensorwise scales alone"
        yield f"{', '.join(folded(low))}: gathered in float8 in the plan, in more here (torchao: {where})."
    if high and gathers:
        yield f"{', '.join(folded(high))}: gathered in float8 here, in more in the plan (torchao: all weights or none)."
    if gathers:
        yield (
            "Call torchao.float8.precompute_float8_dynamic_scale_for_fsdp(model) after each step of the optimizer: one "
            "all-reduce for the scales of all weights."
        )
    axis = tensor.axis
    moved = [c for c in plan.collectives if c.kind == "all_gather" and not c.hidden and c.dtype.startswith("float8")]
    count = sum(axis in c.axis.split("+") for c in moved) if axis else 0
    if count:
        yield (
            f"{count} activations are gathered over {axis} in float8 in the plan, in more here; torchao's "
            "PrepareFloat8ModuleInput does it, given how each block is called."
        )
    if plan.recipe == "tensorwise" and plan.settings.get("scale_scope") == "global":
        yield "Activations and gradients carry one scale over all ranks in the plan, one a rank (over data axes) here."
    if axis and any(_is_own(plan, text, axis) for node in plan.nodes for text in node.output):
        yield f"Ranks of {axis} have scales of their own in the plan; torchao agrees on one for a DTensor over {axis}."
    if plan.recipe == "mxfp8":
        yield from _mx_products(plan, reading, tensor)
    if plan.recipe == "mxfp8" and plan.settings.get("emulate"):
        yield f"Emulated: {plan.device} has no kernel for MXFP8."


def _mx_products(plan: Plan, reading: Reading, tensor: TensorStyles) -> Iterator[str]:
    """Linears that lose MXFP8: a product of DTensors does not reach torchao's wrapper inside them (0.18)."""
    lost = [
        module
        for module, used in reading.modules.items()
        if used.kind == "linear" and used.weight in tensor.dims and module not in plan.skipped
    ]
    if lost:
        yield f"{', '.join(folded(lost))}: multiplied unquantised here: torchao 0.18 has no MXFP8 product of DTensors."


def _is_own(plan: Plan, layout: str, axis: str) -> bool:
    part = layout.split(", ")[list(plan.mesh).index(axis)]
    return part.startswith(("Own", "Frozen"))
