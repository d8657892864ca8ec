"""The public entry: `AutoParallel(model, mesh).optimize()`. Reading `optimize` is reading the library.

capture -> expand (rules) -> price (costs) -> formulate (problem) -> solve (with presolve) -> assemble (plan)
"""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .assemble import Request, assemble
from .capture import capture
from .constraints import Constraints, Wanted, check_name, restrictions
from .cost_models import DeviceProfile, Optimizer, Pricing, Topology, default_device, load_device, require_recipe
from .errors import InfeasibleError, SolveError, UsageError
from .expansion import Space, expand
from .explain import Explainer, dead_end
from .formulate import formulate
from .garbage import no_collection
from .graph import Graph, dtype_name
from .inputs import default_inputs
from .integrations.hugging_face import pooler_cure
from .memory import format_need, memory_row
from .mesh import Mesh, parse_mesh
from .overlap import Overlap, solve_step
from .plan import Plan
from .problem import Array, Problem, Solution
from .recipes import RECIPES
from .settings import Settings, check_choice, check_number, parse_bytes
from .solver import min_row, solve
from .structure import Structure, structure
from .verify import verify

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """Everything between the graph and the solver, for one planner."""

    space: Space
    shape: Structure
    pricing: Pricing
    costs: list[Array]


@dataclass(frozen=True)
class Solved:
    """The problem of one plan, its solution, and the weight of the two sums that proves it (`overlap.py`)."""

    overlap: Overlap
    solution: Solution
    weight: float


class AutoParallel:
    """Plans how a model is sharded over a mesh.

    >>> from autoparallel_fp8 import AutoParallel
    >>> from autoparallel_fp8.models.presets import build
    >>> model = build("llama3-debug", num_layers=1)
    >>> plan = AutoParallel(model, "dp=2,tp=2", recipe="rowwise", device="H100").optimize()
    >>> plan.status
    'optimal'

    Args:
        model: any module, on any device (the meta device too); it is only read.
        mesh: a torch DeviceMesh, or "dp=8,tp=8", or {"dp": 8, "tp": 8}; the last axis is the innermost.
        inputs: example inputs with their *global* shapes, real or meta. Without them a Hugging Face model gets token
            ids [batch, seq], for an encoder and a decoder each, or images as its config has them; another model its
            `example_inputs`.
        kwargs: keyword inputs.
        recipe: None (the model as it is), "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8".
        device: a profile's name or a `DeviceProfile`; by default the CUDA device at hand, else H100.
        batch, seq: of the made-up token ids; by default twice the first axis, and min(8192, the model's maximum). A
            batch of images is 32 times the first axis.
        loss: "auto" puts cross-entropy into the graph of a causal language model; None leaves it out.
        mixed_precision: torch's MixedPrecisionPolicy.
        recompute: "none"; "selective" and "full" are not planned yet.
        scale_scope: "local" lets activations and gradients carry one float8 scale a shard; "global" does not.
        emulate: plan a recipe that the device has no kernel for as emulated in bfloat16, instead of refusing it.
        memory_limit: bytes a device, or "64 GiB"; by default the device's.
        optimizer: bytes of state a parameter element; by default AdamW's.
        strict: an op without a rule is an error instead of replicated.
        topology: GPUs a node and network rate, where they differ from the profile's.
        time_limit: seconds for the solver; at the limit the best plan comes with its gap.
        progress: called with a line of text when a stage begins or ends.

    Raises:
        UsageError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Any,
        *,
        inputs: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        recipe: str | None = None,
        device: str | DeviceProfile | None = None,
        batch: int | None = None,
        seq: int | None = None,
        loss: str | None = "auto",
        mixed_precision: Any = None,
        recompute: str = "none",
        scale_scope: str = "local",
        emulate: bool = False,
        memory_limit: float | str | None = None,
        optimizer: float | None = None,
        strict: bool = False,
        topology: Topology | None = None,
        time_limit: float | None = None,
        progress: Progress | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"the model is a {type(model).__name__}, not an nn.Module", at="model")
        if topology is not None and not isinstance(topology, Topology):
            raise UsageError(f"topology is a {type(topology).__name__}", at="topology", do="pass a Topology(...)")
        if mixed_precision is not None and not hasattr(mixed_precision, "param_dtype"):
            raise UsageError(
                f"mixed_precision is {mixed_precision!r}",
                at="mixed_precision",
                do="pass torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)",
            )
        if progress is not None and not callable(progress):
            raise UsageError(f"progress is a {type(progress).__name__}", at="progress", do="pass a function of a text")
        self.model = model
        self.mesh: Mesh = parse_mesh(mesh)
        profile, note = (load_device(device), "") if device is not None else default_device()
        check_choice("recipe", recipe, (None, *RECIPES))
        check_choice("scale_scope", scale_scope, ("local", "global"))
        check_choice("recompute", recompute, ("none",))
        emulated = require_recipe(profile, recipe, emulate=emulate)
        if emulated:
            note = f"{note}; " * bool(note) + f"{profile.name} has no kernel for {recipe}: emulated in bfloat16"
        self.settings = Settings(
            recipe=recipe,
            device=profile,
            mixed_precision=mixed_precision,
            recompute=recompute,
            scale_scope=scale_scope,
            memory_limit=parse_bytes(memory_limit, profile.memory_bytes),
            optimizer=Optimizer(check_number("optimizer", optimizer, least=0.0)),
            strict=strict,
            emulate=emulate,
            loss=loss,
            topology=topology or Topology(),
            time_limit=check_number("time_limit", time_limit),
            notes=[note] if note else [],
        )
        self.name = name or type(model).__name__
        self.inputs, self.kwargs = default_inputs(model, self.mesh, inputs, kwargs, batch, seq)
        self.constraints = Constraints()
        self._say: Progress = progress or (lambda text: None)
        self._graph: Graph | None = None
        self._prepared: Prepared | None = None

    # ---- constraints ----

    def pin(self, pattern: str, placement: Wanted) -> AutoParallel:
        """Pin parameters by name or glob to a placement, `"R, S(0)"` in mesh order; None takes the pin back."""
        self.constraints = self.constraints.pin(pattern, placement)
        return self

    def add_node_constraint(self, node: str, placement: Wanted) -> AutoParallel:
        """Pin the result of an op (name or glob, as `plan.nodes` has it); None takes it back."""
        self.constraints = self.constraints.node(node, placement)
        return self

    def add_input_constraints(self, placements: Sequence[Wanted]) -> AutoParallel:
        """One placement for each input, None where free."""
        self.constraints = self.constraints.with_inputs(placements)
        return self

    def add_output_constraints(self, placements: Sequence[Wanted]) -> AutoParallel:
        """One placement for each output, None where free."""
        self.constraints = self.constraints.with_outputs(placements)
        return self

    def add_parameter_memory_constraint(self, low: float | None = None, high: float | None = None) -> AutoParallel:
        """Bounds for the share of every parameter that one rank holds; by default 0 to 1 / number of devices.

        A parameter that cannot be split so finely is held to its own best.
        """
        least = 0.0 if low is None else low
        largest = 1.0 / self.mesh.num_devices if high is None else high
        self.constraints = self.constraints.with_budget(least, largest)
        return self

    # ---- planning ----

    def optimize(self) -> Plan:
        """The fastest plan that fits, with its proof.

        Raises:
            CaptureError, RuleError, CostError: a stage cannot handle the model; the message says where.
            InfeasibleError: nothing satisfies memory limit and constraints together; the message names them.
            SolveError: no plan was found in the time limit.
        """
        prepared = self._prepare()
        solved = self._solve(prepared, self.constraints)
        self._say("plan: assembling")
        request = self._request(self.constraints)
        plan = assemble(request, prepared.pricing, prepared.costs, solved.overlap, solved.solution)
        explainer = Explainer(prepared.space, prepared.shape, solved.overlap, solved.weight, solved.solution)
        choices, routes = solved.solution.choices, prepared.pricing.routes
        check = partial(verify, prepared.space, prepared.shape, choices, routes)
        return replace(plan, explain_with=explainer.explain, verify_with=check)

    def score(self, placements: Mapping[str, Wanted] | Plan) -> Plan:
        """The best plan in which these parameters and ops lie as written; what is not named is chosen.

        Args:
            placements: name or glob of parameters, or of ops (their result) where no parameter is called so, and the
                placement of each. Or a plan: its parameters' placements.
        """
        if isinstance(placements, Plan):
            placements = {name: p.placements for name, p in placements.parameters.items()}
        if not isinstance(placements, Mapping):
            raise UsageError(
                f"placements is a {type(placements).__name__}",
                at="score",
                do="pass {name or glob: placement}, or a plan",
            )
        for pattern in placements:
            check_name("score", pattern)
        prepared = self._prepare()
        parameters = [n.target for n in prepared.space.graph.nodes if n.kind == "parameter"]
        wanted = self.constraints
        for pattern, placement in placements.items():
            is_parameter = any(fnmatch.fnmatchcase(name, pattern) for name in parameters)
            wanted = wanted.pin(pattern, placement) if is_parameter else wanted.node(pattern, placement)
        solved = self._solve(prepared, wanted)
        return assemble(self._request(wanted), prepared.pricing, prepared.costs, solved.overlap, solved.solution)

    def finish_progress(self) -> None:
        """Ends a progress line, where the progress function has one."""
        finish = getattr(self._say, "finish", None)
        if finish is not None:
            finish()

    def graph(self) -> Graph:
        """The captured graph, made once."""
        if self._graph is None:
            with _Stage(self._say, "capture"):
                self._graph = capture(
                    self.model,
                    self.inputs,
                    kwargs=self.kwargs,
                    recipe=self.settings.recipe,
                    loss=self.settings.loss,
                    mixed_precision=self.settings.mixed_precision,
                )
        return self._graph

    def space(self) -> Space:
        """The options of every op, made once."""
        return self._prepare().space

    def _prepare(self) -> Prepared:
        if self._prepared is None:
            graph, settings = self.graph(), self.settings
            self._require_kernels(graph)
            with _Stage(self._say, "rules"):
                space = self._expand(graph)
                shape = structure(space)
            with _Stage(self._say, "costs"), no_collection():
                pricing = Pricing(
                    space, shape, settings.device, settings.topology, settings.optimizer, emulate=settings.emulate
                )
                costs = pricing.costs()
            self._prepared = Prepared(space, shape, pricing, costs)
        return self._prepared

    def _expand(self, graph: Graph) -> Space:
        settings = self.settings
        try:
            return expand(
                graph,
                self.mesh,
                architecture=settings.device.architecture,
                scale_scope=settings.scale_scope,
                strict=settings.strict,
                emulate=settings.emulate,
            )
        except UsageError as error:
            cure = pooler_cure(self.model, (error.at or "").partition(" ")[0])
            if not cure:
                raise
            raise UsageError(error.message, at=error.at, do=f"{error.do}; or {cure}") from error

    def _require_kernels(self, graph: Graph) -> None:
        """What `recipe` is checked for at once, of a model that was converted before: the device has an MX kernel."""
        first = next((n for n in graph.nodes if n.op is torch.ops.autoparallel_fp8.mx_mm.default), None)
        if first is None or self.settings.recipe is not None:
            return
        try:
            require_recipe(self.settings.device, "mxfp8", emulate=self.settings.emulate)
        except UsageError as error:
            what = f"{error.message}, which the model was converted to, as by torchao"
            raise UsageError(what, at=first.module or "the model itself", do=error.do) from error

    def _solve(self, prepared: Prepared, wanted: Constraints) -> Solved:
        with _Stage(self._say, "problem"), no_collection():
            limits = restrictions(wanted, prepared.space, prepared.shape)
            row = memory_row(prepared.pricing, self.settings.memory_limit)
            pricing = prepared.pricing
            busy = formulate(prepared.shape, prepared.costs, pricing.table, (row,), limits)
            waiting = formulate(prepared.shape, pricing.waiting_costs(), pricing.waiting_table, (row,), limits)
            overlap = Overlap(busy, waiting)
        with _Stage(self._say, "solve"):
            solution, weight = solve_step(overlap, self._search, self.settings.time_limit)
        return Solved(overlap, solution, weight)

    def _search(self, problem: Problem, seconds: float | None) -> Solution:
        solution = solve(problem, time_limit=seconds, progress=self._say)
        if solution.status == "infeasible":
            raise self._infeasible(problem, solution)
        if not solution.choices and self.settings.time_limit == seconds:
            raise SolveError("no plan was found in the time limit", at=f"time_limit {seconds} s", do="give more time")
        return solution

    def _infeasible(self, problem: Problem, solution: Solution) -> InfeasibleError:
        names = ", ".join(solution.conflict) or "the options of the ops themselves"
        for row in problem.rows:
            least = min_row(problem, row.name) if row.name in solution.conflict else math.inf
            if math.isfinite(least):
                pins = [name for name in solution.conflict if name != row.name]
                need = format_need(least)
                return InfeasibleError(
                    f"no plan fits in {format_need(row.limit)} a device; the smallest needs {need}",
                    at=f"mesh {self.mesh}, device {self.settings.device.name}"
                    + (f"; with {', '.join(pins)}" if pins else ""),
                    do=f"set memory_limit to {need} or more, add devices to the mesh, or drop pins",
                )
        alone = tuple(r for r in problem.restrictions if r.name == names)
        if alone:
            prepared = self._prepare()
            cause = dead_end(prepared.space, prepared.shape, replace(problem, restrictions=alone))
            return InfeasibleError(
                f"no plan has {names}: {cause}", at=f"mesh {self.mesh}", do="take it back or change it"
            )
        return InfeasibleError(
            f"these cannot hold together: {names}", at=f"mesh {self.mesh}", do="take one of them back or change it"
        )

    def _request(self, wanted: Constraints) -> Request:
        described = {f"inputs[{i}]": _describe(x) for i, x in enumerate(self.inputs)}
        described |= {key: _describe(x) for key, x in sorted(self.kwargs.items())}  # in whatever order they came
        settings = self.settings
        recorded = {**settings.recorded(), "constraints": wanted.recorded()}
        notes = (*settings.notes, *(f"asked for: {text}" for text in wanted.described()))
        return Request(self.name, settings.recipe, described, recorded, settings.memory_limit, notes)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    return "None" if value is None else type(value).__name__


class _Stage:
    """Says that a stage begins, and how long it took when it ends."""

    def __init__(self, say: Progress, name: str) -> None:
        self.say, self.name = say, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()
        self.say(f"{self.name}: ...")

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is None:
            self.say(f"{self.name}: {time.perf_counter() - self.started:.1f} s")


__all__ = ["AutoParallel"]
