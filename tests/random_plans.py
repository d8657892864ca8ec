"""Runs what `random_models` draws: captures the model, plans each trial, and holds its numbers against one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from autoparallel_fp8.cost_models import DeviceProfile, load_device
from graph_samples import in_float32
from random_choices import random_choices
from random_models import Case, Model, Trial, arguments, build
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoparallel_fp8 import AutoParallel
from autoparallel_fp8.api import Prepared
from autoparallel_fp8.constraints import restrictions
from autoparallel_fp8.errors import InfeasibleError, UsageError
from autoparallel_fp8.expansion import Space
from autoparallel_fp8.formulate import formulate
from autoparallel_fp8.graph import Graph, Ref
from autoparallel_fp8.redistribute import Routes
from autoparallel_fp8.simulate import run_graph
from autoparallel_fp8.structure import Structure
from autoparallel_fp8.verify import Verification, verify

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Verified:
    """One plan, run.

    Attributes:
        case: with this plan's trial alone.
        verification: of the plan; without the pins where they were refused.
        refused: what was said of the pins; "" where they were taken.
    """

    case: Case
    verification: Verification
    refused: str = ""


def verified(case: Case) -> Iterator[Verified]:
    """Every trial of the case, planned and run."""
    graph = captured(replace(case, trials=()))
    for trial in case.trials:
        yield _verified(replace(case, trials=(trial,)), trial, graph)


def _verified(case: Case, trial: Trial, graph: Graph) -> Verified:
    made = planner(case, trial)
    made._graph = graph
    try:
        if trial.seed is None:
            return Verified(case, made.optimize().verify())
        prepared = made._prepare()
        routes = random_routes(prepared.space, trial.seed) if trial.random_routes else prepared.pricing.routes
        choices = random_plan(made, prepared, trial)
        return Verified(case, verify(prepared.space, prepared.shape, choices, routes, seed=trial.seed))
    except (InfeasibleError, UsageError) as error:
        is_told = bool(error.message and error.do) and "pin(" in str(error)
        if not trial.pins or not is_told:
            raise
        return replace(_verified(case, replace(trial, pins=()), graph), refused=str(error))


@lru_cache(maxsize=4)
def captured(case: Case) -> Graph:
    """The graph, once for all trials."""
    return planner(case, Trial("dp=1")).graph()


def planner(case: Case, trial: Trial) -> AutoParallel:
    """As a user makes it, but for a device whose links are so fast that small models are split at all."""
    args, kwargs = arguments(case.model, torch.bfloat16 if case.mixed else case.model.dtype)
    made = AutoParallel(
        build(case.model),
        trial.mesh,
        inputs=args,
        kwargs=kwargs,
        recipe=case.recipe,
        device=fast_links("B200" if case.recipe == "mxfp8" and not case.emulate else "H100"),
        emulate=case.emulate,
        scale_scope=trial.scale_scope,
        mixed_precision=MIXED if case.mixed else None,
        recompute=case.recompute,
    )
    for name, placement in trial.pins:
        made.pin(name, placement)
    return made.add_parameter_memory_constraint() if trial.budget else made


@cache
def fast_links(name: str) -> DeviceProfile:
    """The device with links a million times as fast, and as much slower at arithmetic."""
    device = load_device(name)
    link = replace(device.scale_up, bandwidth_bytes_per_s=1e18, latency_us=1e-6, base_us=1e-6, multicast_us=None)
    rates = {dtype: rate / 1e6 for dtype, rate in device.peak_flops.items()}
    return replace(device, scale_up=link, scale_out=link, peak_flops=rates, launch_us=1e-3)


def random_plan(made: AutoParallel, prepared: Prepared, trial: Trial) -> tuple[int, ...]:
    """Choices at random among all that fit together."""
    limits = restrictions(made.constraints, prepared.space, prepared.shape)
    problem = formulate(prepared.shape, prepared.costs, prepared.pricing.table, (), limits)
    order = in_order(prepared.shape)
    assert trial.seed is not None
    choices = random_choices(problem, order, trial.seed, trial.stay)
    assert choices is not None, f"no choices at random for {trial}"
    return choices


def in_order(shape: Structure) -> list[int]:
    """Variables so that a value's producer comes before its copies, and they before its readers."""
    roles = {"node": 0, "copy": 1, "output": 2}
    return sorted(range(len(shape.variables)), key=lambda v: (shape.variables[v].node, roles[shape.variables[v].role]))


def random_routes(space: Space, seed: int) -> Callable[[Ref], Routes]:
    """Collectives at random from layout to layout."""
    draw = np.random.default_rng(seed)

    @cache
    def routes(ref: Ref) -> Routes:
        return Routes(
            space.graph.spec(ref), space.factors[ref], space.reach[ref], space.mesh.sizes, lambda *_: draw.random()
        )

    return routes


# ---- the module itself --------------------------------------------------------------------------------------------


def graph_errors(case: Case) -> dict[str, float]:
    """Errors of the captured graph against the module itself, in float32, without a recipe; nothing with dropout."""
    model = case.model
    if case.recipe is not None or model.dropout or case.mixed:
        return {}
    graph = in_float32(captured(replace(case, trials=())))
    torch.manual_seed(0)
    module = build(model, "cpu").float()
    for parameter in module.parameters():
        parameter.data.normal_().mul_(0.3)
    args, kwargs = arguments(model, torch.float32)
    args = tuple(_made_up(x, model) for x in args)
    kwargs = {name: _made_up(x, model) for name, x in kwargs.items()}
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {name: value.detach().clone() for name, value in held.items()}
    given = [x for x in (*args, *kwargs.values()) if x is not None]
    found = run_graph(graph, values, given)
    results = module(*args, **kwargs)
    made = {"loss": results} if isinstance(results, Tensor) else dict(enumerate(results))
    made = results if isinstance(results, dict) else made
    tensors = list(made.values())
    torch.autograd.backward(tensors, [torch.ones_like(x) for x in tensors])
    gradients = {name: module.get_parameter(name).grad for name in found["gradient"]}
    pairs = [(name, value, whole) for (name, value), whole in zip(found["output"].items(), tensors, strict=True)]
    pairs += [(name, value, gradients[name]) for name, value in found["gradient"].items()]
    pairs += [(name, value, module.get_buffer(name)) for name, value in found["buffer"].items()]
    largest = max((float(grad.norm()) for grad in gradients.values() if grad is not None), default=1.0)
    return {name: _error(value, whole, largest) for name, value, whole in pairs}


def _made_up(x: Any, model: Model) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.randn(x.shape) if x.is_floating_point() else torch.randint(0, model.vocab or 48, x.shape)


def _error(found: Tensor, wanted: Tensor | None, largest: float) -> float:
    """Norm of the difference over the norm; a gradient that is next to nothing beside the largest one is rounding."""
    whole = torch.zeros_like(found) if wanted is None else wanted.detach()
    return float((found.double() - whole.double()).norm() / whole.double().norm().clamp_min(1e-3 * largest))
