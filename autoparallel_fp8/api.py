"""The public entry: `AutoParallel(model, mesh).optimize()`. Reading `optimize` is reading the library.

capture -> expand (rules) -> price (costs) -> formulate (problem) -> solve (with presolve) -> assemble (plan)
"""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .assemble import Request, assemble
from .by_hand import ByHand, plans_by_hand
from .capture import capture
from .capture.recompute import MODES, recompute
from .compare import Comparison, HandWritten
from .constraints import Constraints, Wanted, check_name, restrictions
from .cost_models import DeviceProfile, Optimizer, Pricing, Topology, default_device, load_device, require_recipe
from .errors import InfeasibleError, SolveError, UsageError
from .expansion import Space, expand
from .explain import Explainer
from .formulate import formulate
from .garbage import no_collection
from .graph import Graph
from .infeasible import infeasible
from .input_text import describe_inputs
from .inputs import default_inputs
from .integrations.hugging_face import pooler_cure
from .live import Live
from .memory import memory_row
from .mesh import Mesh, parse_mesh
from .mesh_candidates import check_gpus, flat
from .mesh_ranking import MeshSearch
from .module_state import State, module_state
from .overlap import Overlap, is_closed, solve_step
from .plan import Plan
from .plan_reading import read_plan
from .problem import OPTIMAL_GAP, Array, Problem, Solution
from .progress import Progress, Stage
from .recipes import RECIPES
from .settings import Settings, check_choice, check_kinds, check_number, parse_bytes
from .solver import min_row, solve
from .structure import Structure, structure

UNLIMITED = 1 << 60  # bytes a device, where a plan is priced that does not fit


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


@dataclass(frozen=True)
class Proof:
    """That no plan is faster, and the weight of the two sums that proves it."""

    lower_bound_us: float
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
        mesh: a torch DeviceMesh, or "dp=8,tp=8", or {"dp": 8, "tp": 8}; the last axis is the innermost. "auto" with
            `gpus` tries all meshes of so many GPUs.
        inputs: example inputs with their *global* shapes, real or meta. Without them a Hugging Face model gets token
            ids [batch, seq], for an encoder and a decoder each, or images as its config has them; another model its
            `example_inputs`.
        kwargs: keyword inputs.
        recipe: None (the model as it is), "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8".
        device: a profile's name or a `DeviceProfile`; by default the CUDA device at hand, else H100.
        batch, seq: of the made-up token ids; by default twice the first axis, and min(8192, the model's maximum). A
            batch of images is 32 times the first axis. For mesh "auto" one sequence, or 32 images, a GPU.
        loss: "auto" puts cross-entropy into the graph of a causal language model; None leaves it out.
        mixed_precision: torch's MixedPrecisionPolicy.
        recompute: what backward makes again, layer by layer, instead of keeping it: "none"; "selective", all but the
            results of GEMMs and attention; "full", all but what a layer is called with.
        scale_scope: "local" lets activations and gradients carry one float8 scale a shard; "global" does not.
        emulate: plan a recipe that the device has no kernel for as emulated in bfloat16, instead of refusing it.
        memory_limit: bytes a device, or "64 GiB"; by default the device's.
        optimizer: bytes of state a parameter element; by default AdamW's.
        strict: an op without a rule is an error instead of replicated.
        topology: GPUs a node and network rate, where they differ from the profile's.
        time_limit: seconds for the solver, of all meshes together; at the limit the best plan comes with its gap.
        progress: called with a line of text when a stage begins or ends.

    Raises:
        UsageError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Any,
        *,
        gpus: int | None = None,
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
        check_kinds(model, topology, mixed_precision, progress)
        self.model = model
        self.gpus = check_gpus(mesh, gpus)
        self.mesh: Mesh = parse_mesh(mesh) if self.gpus is None else flat(self.gpus)
        profile, note = (load_device(device), "") if device is not None else default_device()
        check_choice("recipe", recipe, (None, *RECIPES))
        check_choice("scale_scope", scale_scope, ("local", "global"))
        check_choice("recompute", recompute, MODES)
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
        sequences = 2 if self.gpus is None else 1  # the least that lets every mesh be split by batch alone
        self.inputs, self.kwargs = default_inputs(model, self.mesh, inputs, kwargs, batch, seq, sequences)
        self.constraints = Constraints()
        self._say: Progress = progress or (lambda text: None)
        self._graph: Graph | None = None
        self._captured_state: State = {}
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
        if self.gpus is not None:
            return self.search_meshes().plan
        return self._planned(self.constraints, self.constraints)

    def search_meshes(self, *, workers: int | None = None, max_axes: int = 2) -> MeshSearch:
        """All meshes of `gpus` GPUs, ranked, and the plan on the best one; for the mesh "auto".

        >>> print(AutoParallel(model, "auto", gpus=8).search_meshes())

        Args:
            workers: processes side by side; by default one a core, at most 4. The plan does not depend on it.
            max_axes: of a mesh, 1 to 3.

        Raises:
            UsageError: the planner has a mesh, or no mesh of so many GPUs splits the model.
            InfeasibleError: no mesh has a plan; and as `optimize`.
        """
        from .mesh_search import search

        return search(self, workers, max_axes)

    def with_mesh(self, mesh: Mesh, *notes: str) -> AutoParallel:
        """The same planner, its graph too, for another mesh and with more notes."""
        other = copy(self)
        other.mesh, other.gpus, other._prepared = mesh, None, None
        other.settings = replace(self.settings, notes=[*self.settings.notes, *notes])
        return other

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
        return self._planned(wanted, wanted)

    def compare(self, plan: Plan | None = None) -> Comparison:
        """The chosen plan beside those people write by hand: DDP, FSDP, HSDP, TP + SP, FSDP x TP.

        Each has the same costs, memory limit and wishes, and is the best of its kind; one that the mesh, the model or
        the wishes do not allow comes with the reason. The chosen plan is the fastest of all that fit.

        Args:
            plan: of this planner, where it is there already.
        """
        chosen = plan or self.optimize()
        others = tuple(self._written(one) for one in plans_by_hand(self._prepare().space, read_plan(chosen)))
        fitting = [one.plan for one in others if one.plan is not None and not one.needs]
        return Comparison(
            min((chosen, *fitting), key=lambda p: p.objective_us * (1 + OPTIMAL_GAP * (p is not chosen))), others
        )

    def _written(self, one: ByHand) -> HandWritten:
        """The best plan of its kind."""
        if one.constraints is None:
            return HandWritten(one.name, None, one.why)
        wanted = self.constraints.beside(one.constraints)
        self._say(f"compare: {one.name}")
        try:
            return HandWritten(one.name, self._planned(wanted, self.constraints), whole=one.whole)
        except UsageError as error:
            return HandWritten(one.name, None, f"{error.message} ({error.at})")
        except InfeasibleError as error:
            return self._without_limit(one, wanted, error)

    def _without_limit(self, one: ByHand, wanted: Constraints, error: InfeasibleError) -> HandWritten:
        """What a plan that does not fit would take, in time and bytes; the error's sentence where that is not why."""
        unlimited = copy(self)
        unlimited.settings = replace(self.settings, memory_limit=UNLIMITED)
        try:
            plan = unlimited._planned(wanted, self.constraints)
        except InfeasibleError:
            return HandWritten(one.name, None, error.message)
        needs = min_row(self._formulate(self._prepare(), wanted).busy, "memory")
        memory = {**plan.memory_bytes, "limit": self.settings.memory_limit}
        return HandWritten(one.name, replace(plan, memory_bytes=memory), needs=int(needs), whole=one.whole)

    def keep(self, layouts: Mapping[str, str]) -> Plan:
        """The best plan in which these parameters lie as an earlier plan had them; not recorded as asked for."""
        wanted = self.constraints
        for name, placement in layouts.items():
            wanted = wanted.pin(glob.escape(name), placement)
        return self._planned(wanted, self.constraints)

    def overlap(self) -> Overlap:
        """The two sums of a step as problems, with the memory limit and what was asked for."""
        return self._formulate(self._prepare(), self.constraints)

    def plan_of(self, choices: tuple[int, ...], overlap: Overlap, proof: Proof | None = None) -> Plan:
        """The plan in which every variable has the option chosen here; nothing is solved.

        Args:
            choices: an option of every variable; they may exceed the memory limit, and a note says so.
            overlap: of this planner.
            proof: what is known of the bound; None for the sum of the cheapest option of each op alone.
        """
        prepared = self._prepare()
        free = Overlap(*(replace(side, rows=(), restrictions=()) for side in (overlap.busy, overlap.waiting)))
        objective = free.step_us(choices)
        proof = proof or Proof(float(sum(cost.min() for cost in prepared.costs)), 1.0)
        bound = min(proof.lower_bound_us, objective)
        status = "optimal" if is_closed(objective, bound) else "feasible"
        solution = Solution(choices, objective, bound, status)
        return self._plan(prepared, self.constraints, Solved(overlap, solution, proof.weight))

    def with_inputs(self, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> AutoParallel:
        """The same planner for other inputs of the same model; the model is captured again when it is asked for.

        Raises:
            UsageError: an input that cannot be planned with.
        """
        other = copy(self)
        other.inputs, other.kwargs = default_inputs(self.model, self.mesh, inputs, kwargs, None, None)
        other._graph = other._prepared = None
        return other

    def with_model(self, model: nn.Module) -> AutoParallel:
        """The same planner for another model with the same inputs; it is captured when it is asked for."""
        other = copy(self)
        other.model = model
        other._graph = other._prepared = None
        return other

    def graph(self) -> Graph:
        """The captured graph, made once."""
        if self._graph is None:
            with Stage(self._say, "capture"):
                captured = capture(
                    self.model,
                    self.inputs,
                    kwargs=self.kwargs,
                    recipe=self.settings.recipe,
                    loss=self.settings.loss,
                    mixed_precision=self.settings.mixed_precision,
                )
                self._graph = recompute(captured, self.settings.recompute)
                self._captured_state = module_state(self.model)
        return self._graph

    def is_as_captured(self) -> bool:
        """Whether the model has the attributes, hooks, submodules and ties that it was captured with."""
        return self._captured_state in ({}, module_state(self.model))

    def space(self) -> Space:
        """The options of every op, made once."""
        return self._prepare().space

    def pricing(self) -> Pricing:
        """The price of every option and redistribution, made once."""
        return self._prepare().pricing

    def _prepare(self) -> Prepared:
        if self.gpus is not None:
            do = "call optimize() or search_meshes(), and make a planner with its plan's mesh"
            raise UsageError(f"the mesh of {self.gpus} GPUs is not chosen yet", at='mesh "auto"', do=do)
        if self._prepared is None:
            graph, settings = self.graph(), self.settings
            self._require_kernels(graph)
            with Stage(self._say, "rules"):
                space = self._expand(graph)
                shape = structure(space)
            with Stage(self._say, "costs"), no_collection():
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

    def _planned(self, wanted: Constraints, asked: Constraints) -> Plan:
        """Solved with the one, recorded with the other."""
        prepared = self._prepare()
        return self._plan(prepared, asked, self._solve(prepared, wanted))

    def _plan(self, prepared: Prepared, asked: Constraints, solved: Solved) -> Plan:
        self._say("plan: assembling")
        plan = assemble(self._request(asked), prepared.pricing, prepared.costs, solved.overlap, solved.solution)
        explainer = Explainer(prepared.space, prepared.shape, solved.overlap, solved.weight, solved.solution)
        live = Live(prepared.pricing, solved.solution.choices, explainer.explain, self)
        return replace(plan, bound_weight=solved.weight, live=live)

    def _solve(self, prepared: Prepared, wanted: Constraints) -> Solved:
        overlap = self._formulate(prepared, wanted)
        with Stage(self._say, "solve"):
            solution, weight = solve_step(overlap, self._search, self.settings.time_limit)
        return Solved(overlap, solution, weight)

    def _formulate(self, prepared: Prepared, wanted: Constraints) -> Overlap:
        with Stage(self._say, "problem"), no_collection():
            limits = restrictions(wanted, prepared.space, prepared.shape)
            row = memory_row(prepared.pricing, self.settings.memory_limit)
            pricing = prepared.pricing
            busy = formulate(prepared.shape, prepared.costs, pricing.table, (row,), limits)
            waiting = formulate(prepared.shape, pricing.waiting_costs(), pricing.waiting_table, (row,), limits)
        return Overlap(busy, waiting)

    def _search(self, problem: Problem, seconds: float | None) -> Solution:
        solution = solve(problem, time_limit=seconds, progress=self._say)
        if solution.status == "infeasible":
            prepared = self._prepare()
            raise infeasible(problem, solution, prepared.space, prepared.shape, self.settings.device.name)
        if not solution.choices and self.settings.time_limit == seconds:
            raise SolveError("no plan was found in the time limit", at=f"time_limit {seconds} s", do="give more time")
        return solution

    def _request(self, wanted: Constraints) -> Request:
        described = describe_inputs(self.inputs, self.kwargs)
        settings = self.settings
        recorded = {**settings.recorded(), "constraints": wanted.recorded()}
        notes = (*settings.notes, *(f"asked for: {text}" for text in wanted.described()))
        return Request(self.name, settings.recipe, described, recorded, settings.memory_limit, notes)


__all__ = ["AutoParallel"]
