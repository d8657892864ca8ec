"""For the tests of parallel models: small models with values, plans of them, and what one process gives for the same.

Plans are made here, in the parent of the ranks; links are so fast that small models are split at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from autoparallel_fp8.cost_models import DeviceProfile
from graph_samples import in_float32
from random_models import Case, Model, Trial
from random_models import build as build_model
from random_plans import fast_links, planner, random_plan
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel_fp8 import AutoParallel, Plan
from autoparallel_fp8.apply import schedule_of
from autoparallel_fp8.graph import Graph
from autoparallel_fp8.parallel_module import ParallelModule
from autoparallel_fp8.simulate_plan import run_schedule

Values = dict[str, Tensor]

LM = Model(
    batch=8,
    hidden=64,
    vocab=64,
    positions="rotary",
    attention="causal",
    heads=4,
    kv_heads=2,
    mlp="silu",
    norm="rms",
    residual=True,
    result="loss",
    dtype=torch.float32,
)
"""One block of Llama with its loss, in float32."""


def with_values(model: Model, seed: int = 0) -> nn.Module:
    """The module with random values; buffers as its own code makes them."""
    torch.manual_seed(seed)
    module = build_model(model, "cpu")
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3)
    return module


def tokens(model: Model, seed: int = 1, batch: int = 0) -> Tensor:
    """Token ids [batch, seq]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.classes, (batch or model.batch, model.seq), generator=generator)


def plan_of(
    model: nn.Module,
    mesh: str,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    is_split: bool = True,
    batch: str | None = None,
    outputs: Sequence[str] | None = None,
    pins: Mapping[str, str] | None = None,
    **options: Any,
) -> Plan:
    """A plan.

    Args:
        is_split: every rank holds its share of each parameter at most.
        batch: placement of every input, where it is not left free.
        outputs: placements of the results.
        pins: placements of parameters.
    """
    options = {"device": fast_links("H100"), **options}
    made = AutoParallel(model, mesh, inputs=inputs, kwargs=kwargs, **options)
    if batch is not None:
        made.add_input_constraints([batch for x in pytree.tree_leaves((inputs, kwargs)) if isinstance(x, Tensor)])
    if outputs is not None:
        made.add_output_constraints(outputs)
    for name, placement in (pins or {}).items():
        made.pin(name, placement)
    return (made.add_parameter_memory_constraint() if is_split else made).optimize()


def plans_of(
    model: Model, recipe: str | None, mesh: str, graphs: dict[Any, Graph], module: nn.Module | None = None
) -> list[Plan]:
    """In float32: the fastest with everything split, one drawn at random, and without a recipe the fastest of all.

    Args:
        module: the model with the values that the plans are applied to.
        graphs: captured before, added to.
    """
    case, found = Case(model, recipe), []
    trials = [Trial(mesh, budget=True), Trial(mesh, seed=3, stay=0.9 if recipe else 0.0)]
    for trial in trials if recipe else [*trials, Trial(mesh)]:
        made = planner(case, trial)
        if (model, recipe) not in graphs:
            graphs[model, recipe] = in_float32(made.graph())
        made._graph = graphs[model, recipe]
        made.model = module or made.model
        if trial.seed is None:
            found.append(made.optimize())
        else:
            made.settings = replace(made.settings, device=_narrow_links(made.settings.device))
            found.append(made.plan_of(random_plan(made, made._prepare(), trial), made.overlap()))
    return found


def _narrow_links(device: DeviceProfile) -> DeviceProfile:
    """Links that are slow for large tensors, so that parts are exchanged rather than gathered."""
    link = replace(device.scale_up, bandwidth_bytes_per_s=1e3)
    return replace(device, scale_up=link, scale_out=link)


def simulated(
    plan: Plan, model: nn.Module, inputs: Sequence[Tensor], tangents: Sequence[Tensor] | None = None, seed: int = 0
) -> dict[str, Values]:
    """Results, gradients and buffers of the plan run on all ranks in this process.

    Args:
        inputs: in the order of forward's arguments.
        seed: of dropout.
    """
    live = plan.live
    assert live is not None
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: value.detach() for name, value in held.items()}
    return run_schedule(live.space, live.choices, schedule_of(live), values, inputs, tangents, seed=seed)


def stepped(parallel: ParallelModule, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Whole results, gradients and buffers on this rank after forward and the backward of all results' sum."""
    results = [x for x in pytree.tree_leaves(parallel(*args, **kwargs)) if isinstance(x, Tensor)]
    with_gradient = [x.float().sum() for x in results if x.requires_grad]
    sum(with_gradient[1:], with_gradient[0]).backward()
    return {
        "output": [whole(x) for x in results],
        "gradient": gradients(parallel),
        "buffer": {name: whole(x) for name, x in parallel.named_buffers()},
    }


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Whole gradients by name."""
    return {name: None if p.grad is None else whole(p.grad) for name, p in module.named_parameters()}


def whole(x: Tensor) -> Tensor:
    """The whole of a tensor that may be a DTensor."""
    made = x.full_tensor() if isinstance(x, DTensor) else x
    return made.detach().clone()


def unsharded(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What `stepped` gives, of a copy of the plain model in this process."""
    return stepped(deepcopy(model), *args, **kwargs)  # type: ignore[arg-type]


def error(found: Any, wanted: Any) -> float:
    """Largest relative error among tensors in equal nests; 0 where every bit is the same."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    return max((_error(a, b) for a, b in pairs), default=0.0)


def _error(a: Any, b: Any) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    assert a.shape == b.shape and a.dtype == b.dtype, f"{a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
    difference = (a.double() - b.double()).norm()
    return float(difference / b.double().norm().clamp_min(1e-30)) if float(difference) else 0.0


def alike_on_all(results: Sequence[Any]) -> bool:
    """Whether ranks that put wholes together have the very same."""
    return all(error(result, results[0]) == 0.0 for result in results)


def message(function: Callable[[], Any], kind: type[Exception]) -> str:
    """What an error of this kind says, raised by the function on a rank."""
    try:
        function()
    except kind as raised:
        return str(raised)
    raise AssertionError(f"no {kind.__name__} was raised")


def renamed(model: Model, **changes: Any) -> Model:
    """The model with other parts."""
    return replace(model, **changes)
