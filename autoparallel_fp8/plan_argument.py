"""A plan file in the place of MODEL on the command line: told by its content, its model built as the file says.

Options that repeat what the file says may stand beside it; one that says something else is an error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from .cost_models import load_device
from .errors import AutoParallelError, PlanError, UsageError
from .input_text import parse_inputs
from .mesh import parse_mesh
from .plan import Plan
from .settings import parse_bytes

_MARKS = ("objective_us", "lower_bound_us", "step_time_us")
"""Fields that every plan begins with, and no config has."""


def plan_in(path: str) -> Plan | None:
    """The plan in a file; None where there is no such file or it holds something else, such as a config.

    Raises:
        PlanError: a plan that this library does not read, whole or not.
        UsageError: a file that is neither a plan nor a config.
    """
    try:
        text = Path(path).read_text()
    except (OSError, ValueError):
        return None
    if any(f'"{name}"' in text for name in _MARKS):
        return Plan.load(path)
    try:
        is_empty = not text.strip() or not isinstance(json.loads(text), dict)
    except ValueError:
        return None  # a config, which is told of where the model is built
    if is_empty:
        shown = "is empty" if not text.strip() else "holds no JSON object"
        raise UsageError(f"{path} {shown}", at="MODEL", do="pass a plan file, or a model's config.json")
    return None


def built_from(model: str, layers: int | None) -> dict[str, Any]:
    """What the settings of a plan say of how the command line built its model."""
    return {"built_from": {"model": model, "layers": layers}}


def how_built(plan: Plan, path: str) -> tuple[str, int | None]:
    """MODEL and --layers of the command that made the plan.

    Raises:
        PlanError: it was made from Python, or the record does not read.
    """
    record = plan.settings.get("built_from")
    if not isinstance(record, dict):
        raise PlanError(
            "the plan file does not say how to build its model: it was made from Python",
            at=path,
            do='from Python too: Plan.load("plan.json").verify(model)',
        )
    model, layers = record.get("model"), record.get("layers")
    if not isinstance(model, str) or not (layers is None or isinstance(layers, int)):
        raise PlanError(f"the plan file says {record!r} of how its model is built", at=path, do="plan again")
    return model, layers


def require_agreement(plan: Plan, options: argparse.Namespace) -> None:
    """Options beside the file say what it says.

    Raises:
        UsageError: one does not; the message has both.
    """
    for option, given, recorded in _compared(plan, options):
        if given != recorded:
            shown = "does not say it" if recorded in (None, False) else f"says {recorded}"
            value = "" if given is True else f" {given}"
            raise UsageError(f"{option}{value} contradicts the plan file, which {shown}", at=option, do="leave it out")


def _compared(plan: Plan, options: argparse.Namespace) -> Iterator[tuple[str, Any, Any]]:
    """Option, what is given and what the file says, for every option that is given."""
    settings = plan.settings
    if options.mesh is not None:
        yield "--mesh", str(parse_mesh(options.mesh)), str(parse_mesh(plan.mesh))
    for option, given in (("--gpus", options.gpus), ("--max-axes", options.max_axes), ("--workers", options.workers)):
        if given is not None:
            yield option, given, None
    if options.device is not None:
        yield "--device", load_device(options.device).name, plan.device
    if options.layers is not None:
        yield "--layers", options.layers, how_built(plan, options.model)[1]
    if options.memory_limit is not None:
        yield "--memory-limit", parse_bytes(options.memory_limit, 0), plan.memory_bytes["limit"]
    shape = _shape(plan)
    for option, given, dim in (("--batch", options.batch, 0), ("--seq", options.seq, 1)):
        if given is not None:
            yield option, given, shape[dim] if dim < len(shape) else None
    texts = (
        ("--recipe", options.recipe, plan.recipe),
        ("--recompute", options.recompute, settings.get("recompute")),
        ("--scale-scope", options.scale_scope, settings.get("scale_scope")),
    )
    yield from (row for row in texts if row[1] is not None)
    flags = (
        ("--emulate", options.emulate, settings.get("emulate", False)),
        ("--mixed-precision", options.mixed_precision, settings.get("mixed_precision") is not None),
        ("--no-loss", options.no_loss, settings.get("loss", "auto") is None),
        ("--strict", options.strict, settings.get("strict", False)),
    )
    yield from (row for row in flags if row[1])
    pins = [list(pin) for pin in (settings.get("constraints") or {}).get("parameters", ())]
    for text in options.pin:
        name, _, placement = text.partition("=")
        is_there = [name.strip(), placement.strip()] in pins
        yield "--pin", text, text if is_there else None


def _shape(plan: Plan) -> tuple[int, ...]:
    """Of the first tensor among the inputs."""
    try:
        inputs, named = parse_inputs(plan.inputs)
    except AutoParallelError:
        return ()
    return next((tuple(x.shape) for x in (*inputs, *named.values()) if isinstance(x, Tensor)), ())
