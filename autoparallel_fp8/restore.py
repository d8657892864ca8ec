"""A plan from a file made live again, and a live plan taken to inputs of another size.

The file tells how the planner was made; the model is captured again. Where the graph is the file's, every choice is
found as the file has it (`same_choices.py`) and nothing is solved. Where it is another (other torch, depth or inputs),
parameters keep the file's layouts as far as they can, the rest is planned again, and one note says so.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from .api import AutoParallel, Proof
from .assemble import fingerprint
from .constraints import Constraints
from .cost_models import DeviceProfile, load_device
from .errors import PlanError, UsageError
from .graph import Graph, dtype_name
from .input_text import describe_inputs, parse_inputs
from .mesh import parse_mesh
from .plan import Plan
from .plan_checks import CHANGED
from .plan_text import numbers_of, pattern_of
from .problem import evaluate
from .progress import Progress
from .same_choices import first_unknown, recorded_choices, same_choices
from .settings import recall

_CHOSEN = ("objective_us", "step_time_us", "memory_bytes", "parameters", "nodes", "collectives")
"""What two plans of one graph share where they are the same plan at the same prices."""
_FILE_CHANGED = "the file was changed after it was saved"


def restore(
    plan: Plan,
    model: nn.Module,
    *,
    inputs: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    mesh: Any = None,
    device: str | DeviceProfile | None = None,
    time_limit: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan with its live part, so that it runs, verifies and explains.

    >>> plan = restore(Plan.load("plan.json"), model)

    Args:
        plan: read from a file.
        model: that it was made for, as it was before the recipe converted it; or one with other layers.
        inputs, kwargs: where they are not the file's.
        mesh: that the plan is to run on; only compared with the file's.
        device: the profile of the file's device, where it is not a shipped one.
        time_limit, progress: as `AutoParallel` takes them.

    Raises:
        PlanError: the plan names parameters that the model lacks, or is for another mesh or an unknown device.
        UsageError, CaptureError, ...: as planning the model raises.
    """
    _require_parameters(plan, model)
    planner = _planner(plan, model, inputs, kwargs, mesh, device, time_limit, progress)
    if fingerprint(planner.graph()) != plan.graph:
        others = f"made for another graph ({', '.join(_differences(plan, planner))})"
        return _planned_again(plan, planner, _FILE_CHANGED if CHANGED in plan.notes else others)
    restored = _same(plan, planner)
    if restored is not None:
        return restored
    name = first_unknown(plan, planner.space()) or "together"
    others = "rules are others than when it was made"
    cause = _FILE_CHANGED if CHANGED in plan.notes else others
    return _planned_again(plan, planner, f"the file's layouts are no options here ({name}): {cause}")


def with_inputs(plan: Plan, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Plan:
    """The same layouts for inputs of other sizes, such as another batch; nothing is solved.

    The model is captured again, since sizes stand in its graph as numbers too (a mean's divisor). No bound is known
    but that of the ops alone; a plan above the memory limit says so in its notes.

    Args:
        plan: that was just made, or restored.
        inputs, kwargs: global, as the planner took them.

    Raises:
        PlanError: the plan has no live part; at these inputs the model is another program; a layout does not divide.
    """
    if plan.live is None:
        raise PlanError("a plan read from a file holds no graph", do="restore it first: restore(plan, model)")
    planner = plan.live.planner.with_inputs(inputs, kwargs)
    choices = same_choices(plan.live, planner.pricing())
    made = planner.plan_of(choices, planner.overlap())
    sizes = "; ".join(f"{name} {text}" for name, text in plan.inputs.items() if made.inputs.get(name) != text)
    limit = made.memory_bytes["total"] > made.memory_bytes["limit"]
    note = f"planned for {sizes}; its layouts are kept and nothing is solved again" if sizes else ""
    over = "the memory limit is exceeded at these inputs" if limit else ""
    settings = {**made.settings, **{key: plan.settings[key] for key in plan.settings if key not in made.settings}}
    return replace(made, settings=settings, notes=(*made.notes, *filter(None, (note, over))))


def _planner(
    plan: Plan,
    model: nn.Module,
    inputs: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    mesh: Any,
    device: str | DeviceProfile | None,
    time_limit: float | None,
    progress: Progress | None,
) -> AutoParallel:
    """Made as the file tells."""
    if mesh is not None and parse_mesh(mesh) != parse_mesh(plan.mesh):
        raise PlanError(
            f"the plan is for the mesh {parse_mesh(plan.mesh)}, not for {parse_mesh(mesh)}",
            at="mesh",
            do="use the plan's mesh, or plan for this one",
        )
    if inputs is None and kwargs is None:
        inputs, kwargs = parse_inputs(plan.inputs)
    planner = AutoParallel(
        model,
        dict(plan.mesh),
        inputs=inputs,
        kwargs=kwargs,
        recipe=plan.recipe,
        device=_device(plan, device),
        memory_limit=plan.memory_bytes["limit"],
        time_limit=time_limit,
        progress=progress,
        name=plan.model,
        **recall(plan.settings),
    )
    planner.constraints = _constraints(plan)
    return planner


def _constraints(plan: Plan) -> Constraints:
    try:
        return Constraints.recall(plan.settings.get("constraints"))
    except UsageError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"constraints of the plan do not read: {error}", at="settings", do="plan again") from error


def _device(plan: Plan, device: str | DeviceProfile | None) -> DeviceProfile:
    if device is not None:
        profile = load_device(device)
        if profile.name != plan.device:
            raise PlanError(
                f"the plan is for the device {plan.device}, not for {profile.name}",
                at="device",
                do="pass the profile of that name, or plan again",
            )
        return profile
    try:
        return load_device(plan.device)
    except UsageError as error:
        raise PlanError(
            f'the plan is for the device "{plan.device}", of which there is no profile here',
            at="device",
            do="pass device=, the profile or its .toml file",
        ) from error


def _same(plan: Plan, planner: AutoParallel) -> Plan | None:
    """The file's plan, live; None where its layouts are no options any more or do not go together."""
    overlap = planner.overlap()
    choices = recorded_choices(plan, planner.pricing(), overlap.at(plan.bound_weight))
    if choices is None or not math.isfinite(evaluate(replace(overlap.busy, rows=(), restrictions=()), choices)):
        return None
    made = planner.plan_of(choices, overlap, Proof(plan.lower_bound_us, plan.bound_weight))
    if all(_is_close(getattr(made, name), getattr(plan, name)) for name in _CHOSEN):
        return replace(plan, live=made.live)
    changed = [name for name in _CHOSEN if not _is_close(getattr(made, name), getattr(plan, name))]
    made = planner.plan_of(choices, overlap)
    others = "the device's profile or the costs are others than when it was made"
    cause = _FILE_CHANGED if CHANGED in plan.notes else others
    note = f"priced again: {made.objective_us:.6g} us, where the file says {plan.objective_us:.6g} us; " + cause
    if "objective_us" not in changed:
        what = " and ".join(changed)
        note = f"{what} of the file are not what its layouts give, and are made anew: {cause}"
    return replace(made, settings=plan.settings, notes=(*made.notes, note))


def _is_close(a: Any, b: Any) -> bool:
    """Equal but for the last digits of floats, which the file leaves out."""
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=1e-7, abs_tol=1e-6)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_is_close, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_is_close(a[key], b[key]) for key in a)
    if is_dataclass(a):
        return _is_close(vars(a), vars(b))
    return bool(a == b)


# ---- another graph ----


def _planned_again(plan: Plan, planner: AutoParallel, why: str) -> Plan:
    kept = _kept_layouts(plan, planner)
    planner.constraints = _still_meant(planner)
    made = planner.keep(kept)
    note = f"{why}: {len(kept)} of {len(made.parameters)} parameters lie as in the file, the rest is planned again"
    extra = {key: value for key, value in plan.settings.items() if key not in made.settings}
    return replace(made, settings={**made.settings, **extra}, notes=(*made.notes, note))


def _differences(plan: Plan, planner: AutoParallel) -> Iterator[str]:
    here = describe_inputs(planner.inputs, planner.kwargs)
    found = []
    version = torch.__version__.split("+")[0]
    if version != plan.torch:
        found.append(f"torch {plan.torch}, here {version}")
    if here != dict(plan.inputs):
        found.append(f"inputs {', '.join(plan.inputs.values())}, here {', '.join(here.values())}")
    names = {node.target for node in planner.graph().nodes if node.kind == "parameter"}
    if names != set(plan.parameters):
        found.append(f"{len(plan.parameters)} parameters, here {len(names)}")
    yield from found or [_first_difference(plan, planner.graph())]


def _first_difference(plan: Plan, graph: Graph) -> str:
    """Between graphs with the same parameters; a file holds their shapes and the names of ops, and no constants."""
    here = {node.target: node.outputs[0] for node in graph.nodes if node.kind == "parameter"}
    for name, parameter in plan.parameters.items():
        old = f"{parameter.dtype} {list(parameter.shape)}"
        new = f"{dtype_name(here[name].dtype)} {list(here[name].shape)}"
        if old != new:
            return f"{name} {old}, here {new}"
    for old_node, node in zip(plan.nodes, graph.nodes, strict=False):
        if (old_node.name, old_node.op) != (node.name, node.op_name):
            return f"{old_node.name} {old_node.op}, here {node.name} {node.op_name}"
    if len(plan.nodes) != len(graph.nodes):
        return f"{len(plan.nodes)} ops and tensors, here {len(graph.nodes)}"
    return "the same ops on other values: a number such as an epsilon, or sizes such as a head's"


def _kept_layouts(plan: Plan, planner: AutoParallel) -> dict[str, str]:
    """Parameter of the graph -> the file's layout for it or its like, where it is one of the parameter's options."""
    lookup = _Like(plan)
    space, found = planner.space(), {}
    for v, node in enumerate(space.graph.nodes):
        if node.kind != "parameter":
            continue
        like = lookup.find(node.target, len(node.outputs[0].shape))
        options = {tuple(str(p) for p in option.results[0]) for option in space.kind(v).options}
        if like is not None and plan.parameters[like].placements in options:
            found[node.target] = ", ".join(plan.parameters[like].placements)
    return found


@dataclass
class _Like:
    """Finds a parameter in the file by name, or the last layer's of its kind where the file has fewer layers."""

    plan: Plan

    def __post_init__(self) -> None:
        self.by_pattern: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        for name in self.plan.parameters:
            self.by_pattern.setdefault(pattern_of(name), []).append((numbers_of(name), name))

    def find(self, name: str, num_dims: int) -> str | None:
        if name in self.plan.parameters:
            return name if len(self.plan.parameters[name].shape) == num_dims else None
        numbers = numbers_of(name)
        close = [
            (there, other)
            for there, other in self.by_pattern.get(pattern_of(name), [])
            if sum(a != b for a, b in zip(there, numbers, strict=True)) == 1
            and len(self.plan.parameters[other].shape) == num_dims
        ]
        return max(close)[1] if close else None


def _require_parameters(plan: Plan, model: nn.Module) -> None:
    """Everything the plan names exists, or is of a layer of a kind that exists."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}, not an nn.Module", at="model")
    names = {pattern_of(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    lacking = [name for name in plan.parameters if pattern_of(name) not in names]
    if lacking:
        shown = ", ".join(lacking[:3]) + ", ..." * (len(lacking) > 3)
        raise PlanError(
            f"the model lacks {len(lacking)} of the plan's {len(plan.parameters)} parameters: {shown}",
            at=f"plan of {plan.model}, model {type(model).__name__}",
            do="pass the model that the plan was made for, or plan this one",
        )


def _still_meant(planner: AutoParallel) -> Constraints:
    """What was asked of the first graph, without what names nothing of this one; pins are in the file's layouts."""
    asked, graph = planner.constraints, planner.graph()
    ops = [node.name for node in graph.nodes if node.kind == "op"]
    num_inputs = sum(node.kind == "input" for node in graph.nodes)
    num_outputs = sum(variable.role == "output" for variable in planner.pricing().shape.variables)
    return replace(
        asked,
        parameters=(),
        nodes=tuple(item for item in asked.nodes if fnmatch.filter(ops, item[0])),
        inputs=asked.inputs if len(asked.inputs) == num_inputs else (),
        outputs=asked.outputs if len(asked.outputs) == num_outputs else (),
    )
