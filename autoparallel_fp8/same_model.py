"""Whether a model is the one that a live plan was made for: that object as it was, or one of the same graph.

A plan holds ops and constants, and of the model that it is applied to only tensors are taken. So what the model
computes has to be looked at too: another epsilon or one more layer would else be left out without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .errors import PlanError, UsageError
from .graph import Graph, Node, Ref, dtype_name, map_refs
from .live import Live
from .materialize import tensor_of


def require_same_model(live: Live, model: nn.Module) -> None:
    """The model computes, has and trains what the planned one did; what may not is captured again for it.

    Raises:
        PlanError: it does not; the message names the first difference.
        CaptureError, ...: as planning the model raises.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}, not an nn.Module", at="model")
    planned = live.planner.model
    for text in _tensor_differences(live.space.graph, planned, model):
        raise _other(text, model)
    if model is planned and live.planner.is_as_captured():
        return
    for text in graph_differences(live.space.graph, live.planner.with_model(model).graph()):
        do = "pass the model that the plan was made for, or plan this one"
        if model is planned:
            do = "it was changed after planning: change it back, or plan it again"
        elif model.training != planned.training:
            do = "call train() or eval() on it, as on the planned one; or plan this one"
        raise _other(text, model, do)


def _tensor_differences(graph: Graph, planned: nn.Module, model: nn.Module) -> Iterator[str]:
    """Of what the plan needs of the model; seen without a capture."""
    before = dict(planned.named_parameters(remove_duplicate=False))
    for node in graph.nodes:
        if node.kind not in ("parameter", "buffer"):
            continue
        spec, found = node.outputs[0], _attribute(model, node.target)
        wanted = f"{dtype_name(spec.dtype)} {list(spec.shape)}"
        if found is None:
            yield f"the model has no {node.kind} {node.target}"
            continue
        shown = f"{dtype_name(found.dtype)} {list(found.shape)}"
        if shown != wanted:
            yield f"{node.target} is {shown}, and was planned as {wanted}"
        if found.requires_grad and node.target in before and not before[node.target].requires_grad:
            yield f"{node.target} requires a gradient, and was planned frozen"


def graph_differences(planned: Graph, here: Graph) -> Iterator[str]:
    """What a graph has otherwise than the planned one, in words; what says most of the cause comes first."""
    old, new = dict(planned.aliases), dict(here.aliases)
    for alias in sorted(old.keys() | new.keys()):
        if old.get(alias) != new.get(alias):
            one, two = ("one tensor", "two") if alias in new else ("two tensors", "one")
            yield f"{alias} and {new.get(alias) or old.get(alias)} are {one}, and were planned as {two}"
    names = [{n.target: n.kind for n in g.nodes if n.kind in ("parameter", "buffer")} for g in (planned, here)]
    for name in (name for name in names[1] if name not in names[0]):
        yield f"the model has a {names[1][name]} {name}, and the plan has none of that name"
    trained = [{o.target for o in g.outputs if o.kind == "gradient"} for g in (planned, here)]
    for name in sorted(trained[0] - trained[1]):
        yield f"{name} has no gradient, and was planned with one"
    for before, now in zip(planned.nodes, here.nodes, strict=False):
        if _content(before) != _content(now):
            yield _node_difference(before, now)
    if len(planned.nodes) != len(here.nodes):
        yield f"the model is {len(here.nodes)} ops and tensors, and was planned as {len(planned.nodes)}"
    if (planned.outputs, planned.returns) != (here.outputs, here.returns):
        yield "forward returns other values than planned"


def _content(node: Node) -> tuple[Any, ...]:
    """What the plan takes over of a node; names of modules may differ."""
    return node.kind, node.op, node.target, node.args, node.kwargs, node.outputs, node.phase


def _node_difference(before: Node, now: Node) -> str:
    if (before.kind, before.op, before.target) != (now.kind, now.op, now.target):
        return f"{now.name} is {_title(now)}, and was planned as {_title(before)}"
    constants = [map_refs((n.args, n.kwargs), lambda ref: Ref(0)) for n in (before, now)]
    if constants[0] != constants[1]:
        pairs = zip(_leaves(constants[0]), _leaves(constants[1]), strict=False)
        old, new = next(((a, b) for a, b in pairs if a != b), ("fewer arguments", "more"))
        return f"{now.name} ({now.op_name}) is called with {new}, and was planned with {old}"
    if before.outputs != now.outputs:
        shown = [", ".join(f"{dtype_name(o.dtype)} {list(o.shape)}" for o in n.outputs) for n in (now, before)]
        return f"{now.name} is {shown[0]}, and was planned as {shown[1]}"
    return f"{now.name} ({now.op_name}) reads other values than planned"


def _title(node: Node) -> str:
    return node.op_name if node.kind == "op" else f"the {node.kind} {node.target}"


def _leaves(value: Any) -> Iterator[Any]:
    """Everything inside nested tuples; an empty one is told by its own name."""
    if isinstance(value, tuple) and value:
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _attribute(model: nn.Module, name: str) -> torch.Tensor | None:
    try:
        found = tensor_of(model, name)
    except AttributeError:
        return None
    return found if isinstance(found, torch.Tensor) else None


def _other(message: str, model: nn.Module, do: str = "") -> PlanError:
    do = do or "pass the model that the plan was made for, or plan this one"
    return PlanError(message, at=type(model).__name__, do=do)
