"""A plan put to work: the model as a module that every rank of a process group runs.

    restore (a plan from a file) -> schedule -> reread (held against the plan) -> groups -> parameters -> ParallelModule

Every rank does the same and needs nobody for it but to see that all have the same plan and model (`same_ranks.py`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .capture.arguments import argument_names, bound
from .errors import ApplyError, UsageError
from .graph import Ref
from .in_range import InRange
from .layout import R
from .live import Live
from .local_inputs import LocalInputs, plain_factors
from .materialize import Place, materialize, tensor_of
from .mesh import Mesh, parse_mesh
from .module_tree import hang
from .ops.stand_ins import stand_in
from .parallel_module import ParallelModule, Step
from .parts import coordinates
from .process_groups import ProcessGroups, axes_of
from .rank import Calls
from .reread import reread
from .runner import Accumulated, Runner
from .same_inputs import CHECKS, SameInputs
from .same_model import require_same_model
from .same_ranks import of_choices, of_model, of_plan, require_same
from .schedule import Schedule, planned_schedule
from .settings import check_choice

if TYPE_CHECKING:
    from .plan import Plan


def apply(
    plan: Plan,
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    compile: bool = False,
    seed: int = 0,
    init: Callable[[nn.Module], Any] | None = None,
    check_inputs: str = "first",
) -> ParallelModule:
    """The model as the plan shards it, on this rank.

    Args:
        plan: live, or read from a file.
        model: that was planned; on the meta device its values are made shard by shard. It is only read. Another object
            than the planned one is captured, and must give the same graph.
        mesh: a DeviceMesh with the plan's axes, of all ranks or some of them (a slice of a larger one); by default one
            is made of all ranks that torchrun started.
        compile: let Inductor compile forward and backward.
        seed: of values made for a model on the meta device, and of dropout; the same on every rank.
        init: called on every module of a model on the meta device after its own initialisation.
        check_inputs: when ranks that must have the same part of an input compare it: "first", at the first call with
            its size; "always"; "never".

    Raises:
        ApplyError: the ranks are not as many as the mesh has, hold different plans, or the model has no values.
        PlanError, UsageError: an argument is wrong, or the plan does not fit the model or the mesh.
    """
    _check_arguments(model, mesh, compile, seed, init, check_inputs)
    if mesh is None:
        _start(parse_mesh(plan.mesh))
    ranks = _ranks(parse_mesh(plan.mesh), mesh)
    over = None if mesh is None else mesh.get_all_groups()
    require_same({**of_plan(plan, seed, compile, check_inputs), **of_model(model)}, over)
    device_mesh = mesh or _device_mesh(parse_mesh(plan.mesh))
    restored = plan
    if plan.live is None:
        from .restore import restore

        restored = restore(plan, model)
        for note in restored.notes if dist.get_rank() == ranks[0] else ():
            if note not in plan.notes:
                warnings.warn(note, stacklevel=3)
    live = restored.live
    assert live is not None, "a restored plan is live"
    require_same_model(live, model)
    rank, device = ranks.index(dist.get_rank()), _device(device_mesh)
    written = schedule_of(live)
    calls = Calls(live.space, live.choices, coordinates(live.space.mesh.sizes)[rank], stand_in, device="meta")
    reread(written, calls, restored.collectives, names=live.space.mesh.names)
    require_same(of_choices(live.choices), over)
    wanted = axes_of((*written.forward, *written.backward))
    groups = ProcessGroups(device_mesh, wanted, live.space.mesh.names)
    accumulated = Accumulated()

    def runner(live: Live, written: Schedule) -> Runner:
        return Runner(
            live.space,
            live.choices,
            written,
            rank,
            groups,
            device,
            is_compiled=compile,
            accumulated=accumulated,
        )

    def runner_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runner:
        from .restore import with_inputs

        other = with_inputs(restored, args, kwargs).live
        assert other is not None
        return runner(other, schedule_of(other))

    planned = runner(live, written)
    layouts = {name: written.program.layouts[key] for name, key in planned.keys.get("input", {}).items()}
    inputs = LocalInputs(model, _planned_leaves(live, model), layouts, live.space, device_mesh, rank)
    same_inputs = SameInputs(check_inputs, live.space, rank, over)
    in_range = InRange(check_inputs, live.space.graph, f"{type(model).__name__}.forward")
    step = Step(planned, runner_for, inputs, device_mesh, device, seed, same_inputs, in_range)
    place = _place_of(live, planned, model)
    sizes = live.space.mesh.sizes
    parts = materialize(model, place, sizes, coordinates(sizes)[rank], device=device, seed=seed, init=init)
    module = ParallelModule(step, model.training)
    hang(module, model, {name: step.placed(part, place(name), tensor_of(model, name)) for name, part in parts.items()})
    return module


def _check_arguments(model: Any, mesh: Any, compile: Any, seed: Any, init: Any, check_inputs: Any) -> None:
    """Each argument is of its type; what the ranks are is looked at later."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}, not an nn.Module", at="model")
    if isinstance(model, ParallelModule):
        do = "call it; for another plan apply that to the model as it was before"
        raise UsageError("the model is a parallel one already, which a plan was applied to", at="model", do=do)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        do = "pass torch's DeviceMesh with the plan's axes, or leave it out: one is made of all ranks"
        raise UsageError(f"mesh is a {type(mesh).__name__}", at="mesh", do=do)
    if not isinstance(compile, bool):
        raise UsageError(f"compile is {compile!r}", at="compile", do="pass True or False")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UsageError(f"seed is {seed!r}", at="seed", do="pass a whole number")
    if init is not None and not callable(init):
        raise UsageError(f"init is a {type(init).__name__}", at="init", do="pass a function of a module")
    check_choice("check_inputs", check_inputs, CHECKS)


def schedule_of(live: Live) -> Schedule:
    """The schedule of a plan."""
    pricing = live.pricing
    return planned_schedule(live.space, live.shape, live.choices, pricing.routes, pricing.fusion.kept)


def _ranks(planned: Mesh, mesh: DeviceMesh | None) -> list[int]:
    """The ranks of the mesh, row by row, after a check against those that there are."""
    if mesh is None:
        if dist.get_world_size() != planned.num_devices:
            raise ApplyError(
                f"the plan is for {planned.num_devices} ranks ({planned}), and {dist.get_world_size()} run",
                at=f"rank {dist.get_rank()}",
                do=f"start torchrun with as many processes, or plan for a mesh of {dist.get_world_size()}",
            )
        return list(range(planned.num_devices))
    sizes = tuple(mesh.mesh.shape)
    found = parse_mesh(dict(zip(mesh.mesh_dim_names, sizes, strict=True)) if mesh.mesh_dim_names else sizes)
    if found != planned:
        raise ApplyError(
            f"the DeviceMesh is {found}, the plan is for {planned}",
            at="mesh",
            do="pass a mesh with these axes",
        )
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if dist.get_rank() not in ranks:
        raise ApplyError(
            f"rank {dist.get_rank()} is not on the mesh", at="mesh", do="call apply on the ranks of the mesh alone"
        )
    return ranks


def _start(planned: Mesh) -> None:
    """The process group of torchrun's ranks, where there is none; of this process alone where nobody started others."""
    if "RANK" in os.environ:
        _take_device()
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group()
        return
    if planned.num_devices > 1:
        raise ApplyError(
            f"the plan is for {planned.num_devices} ranks ({planned}), and there is no process group",
            at="torch.distributed",
            do=f"start the script with torchrun --nproc-per-node=... for {planned.num_devices} processes in all",
        )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _take_device() -> None:
    """torchrun's GPU for this rank, where the process has not taken one yet."""
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def _device_mesh(planned: Mesh) -> DeviceMesh:
    """torch's mesh of all ranks; of GPUs where the process group reaches them."""
    is_cuda = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return init_device_mesh("cuda" if is_cuda else "cpu", planned.sizes, mesh_dim_names=planned.names)


def _device(device_mesh: DeviceMesh) -> torch.device:
    if device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_mesh.device_type)


def _planned_leaves(live: Live, model: nn.Module) -> dict[str, Any]:
    """Name of every leaf of the planned arguments -> the leaf."""
    from torch.utils import _pytree as pytree  # what capture flattens arguments with; no public name in 2.11

    planner = live.planner
    args, kwargs = bound(model, planner.inputs, planner.kwargs, planner.settings.loss)
    return dict(zip(argument_names(model, args, kwargs), pytree.tree_leaves((args, kwargs)), strict=True))


def _place_of(live: Live, runner: Runner, model: nn.Module) -> Callable[[str], Place]:
    """How the plan holds a parameter or buffer; what no op reads is whole on every rank."""
    keys = {**runner.keys.get("parameter", {}), **runner.keys.get("buffer", {})}

    def place(name: str) -> Place:
        if name in keys:
            ref = Ref(keys[name].variable)
            layout = runner.written.program.layouts[keys[name]]
            return Place(live.space.factors[ref], layout, live.space.graph.spec(ref).dtype)
        tensor = tensor_of(model, name)
        return Place(plain_factors(tuple(tensor.shape)), (R,) * len(live.space.mesh.axes), tensor.dtype)

    return place
