"""Why a parameter lies where it does: every alternative with what it would cost, or the sentence that forbids it.

Of all parameters at once: an interval for each alternative, from a bound and a plan near the chosen one (`regrets.py`).
Of one parameter: where the interval leaves something open, the option is pinned and solved, the problem presolved once
without its rows and with the parameter held; a plan that breaks a row (memory) is solved again with the rows. Regrets
are exact then but where the solver ran out of time or the step waits for communication (`overlap.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from .errors import PlanError
from .expansion import Space
from .graph import Ref
from .layout import format_layout
from .overlap import Overlap
from .plan import AlternativePlan, Plan
from .plan_text import numbers_of, pattern_of
from .problem import OPTIMAL_GAP, Problem, Restriction, Solution, evaluate
from .products import format_option
from .regrets import Interval, Neighbourhood
from .solver import is_impossible, presolve, solve, without_options
from .structure import Structure

SECONDS = 20.0  # for one alternative
_THIS = "the alternative"


@dataclass(frozen=True)
class Alternative:
    """One layout of a parameter.

    Attributes:
        placements: as text.
        local_shape: on one rank.
        regret_us: how much slower the best plan with it is; (bound, found) where the solver ran out of time; inf where
            no plan has it.
        chosen: the plan takes it.
        compute_us, communication_us: how much more of each the best plan found with it has; the optimizer's time counts
            with communication.
        note: what forbids it, if anything.
    """

    placements: str
    local_shape: tuple[int, ...]
    regret_us: tuple[float, float]
    chosen: bool
    note: str = ""
    compute_us: float = 0.0
    communication_us: float = 0.0


@dataclass(frozen=True)
class Overview:
    """Every parameter's alternatives, in the order of its layouts, each with an interval of what it would cost.

    Attributes:
        axes: of the mesh, in its order.
        alternatives: parameter -> all its layouts, the chosen one too.
    """

    axes: tuple[str, ...]
    alternatives: Mapping[str, tuple[Alternative, ...]]

    def __str__(self) -> str:
        from .report.explain import format_overview

        return format_overview(self)


@dataclass(frozen=True)
class Explanation:
    """All alternatives of one parameter, best first, and what kernels refuse of the ops that read it."""

    name: str
    shape: tuple[int, ...]
    alternatives: tuple[Alternative, ...]
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        from .report.explain import format_explanation

        return format_explanation(self)


class Explainer:
    """Answers for one solved problem."""

    def __init__(self, space: Space, shape: Structure, overlap: Overlap, weight: float, solution: Solution) -> None:
        self.space, self.shape, self.overlap, self.solution = space, shape, overlap, solution
        self.problem, self.weight = overlap.at(weight), weight
        self._pinned: dict[int, _Pinned] = {}

    def explain(self, name: str | None) -> Explanation | Overview:
        """Alternatives of a parameter, by its name; of all for None.

        Raises:
            PlanError: the plan has no such parameter.
        """
        if name is None:
            return self.overview()
        v = self._variable(name)
        spec = self.space.graph.nodes[v].outputs[0]
        found = sorted(self._alternatives(v), key=lambda a: (not a.chosen, a.regret_us))
        return Explanation(self.space.graph.nodes[v].target, spec.shape, tuple(found), tuple(self._refused(v)))

    def _variable(self, name: str) -> int:
        nodes = self.space.graph.nodes
        name = dict(self.space.graph.aliases).get(name, name)
        for v, node in enumerate(nodes):
            if node.kind == "parameter" and node.target == name:
                return v
        close = [node.target for node in nodes if node.kind == "parameter" and name in node.target][:4]
        hint = f"did you mean {', '.join(close)}?" if close else "name one as plan.parameters has it"
        raise PlanError(f"the plan has no parameter {name!r}", do=hint)

    def overview(self) -> Overview:
        """The alternatives of every parameter, each with an interval; nothing is solved again."""
        asked = [(v, x) for v in self._parameters for x in self._allowed(v)]
        intervals = self._neighbourhood.intervals(asked)
        sentences: dict[object, tuple[str, str]] = {}
        found = {
            self.space.graph.nodes[v].target: tuple(self._overviewed(v, intervals, sentences)) for v in self._parameters
        }
        return Overview(self.space.mesh.names, found)

    def _overviewed(
        self, v: int, intervals: Mapping[tuple[int, int], Interval], sentences: dict[object, tuple[str, str]]
    ) -> Iterator[Alternative]:
        name = self.space.graph.nodes[v].target
        for x, text, local in self._layouts(v):
            if x == self.solution.choices[v]:
                yield Alternative(text, local, (0.0, 0.0), True)
                continue
            interval = intervals.get((v, x), Interval(math.inf, math.inf))
            note = ""
            if interval.low == math.inf:
                key = (pattern_of(name), x, x in self._allowed(v))
                note = _of_layer(name, *sentences.setdefault(key, (name, self._sentence(v, x))))
            yield Alternative(text, local, (interval.low, interval.high), False, note)

    @cached_property
    def _parameters(self) -> tuple[int, ...]:
        return tuple(v for v, node in enumerate(self.space.graph.nodes) if node.kind == "parameter")

    @cached_property
    def _neighbourhood(self) -> Neighbourhood:
        return Neighbourhood(self.overlap, self.weight, self.solution, self._parameters)

    def _layouts(self, v: int) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """Number, text and local shape of each layout."""
        for x, layout in enumerate(self.shape.sources[v][0]):
            yield x, format_layout(layout), self.space.local_shape(Ref(v), layout)

    def _forbidding(self, v: int, option: int) -> list[str]:
        return [r.name for r in self.problem.restrictions if r.variable == v and option not in r.allowed]

    def _allowed(self, v: int) -> list[int]:
        """Options other than the chosen one that no wish for this parameter forbids."""
        count, chosen = len(self.problem.costs[v]), self.solution.choices[v]
        return [x for x in range(count) if x != chosen and not self._forbidding(v, x)]

    def _alternatives(self, v: int) -> Iterator[Alternative]:
        intervals = self._neighbourhood.intervals([(v, x) for x in self._allowed(v)], is_thorough=True)
        for x, text, local in self._layouts(v):
            forbidding = self._forbidding(v, x)
            if x == self.solution.choices[v]:
                yield Alternative(text, local, (0.0, 0.0), True)
            elif forbidding:
                yield Alternative(text, local, (math.inf, math.inf), False, f"forbidden by {', '.join(forbidding)}")
            elif intervals[v, x].width <= OPTIMAL_GAP * self.solution.objective and intervals[v, x].changes is not None:
                regret, choices = intervals[v, x].high, self._neighbourhood.choices(intervals[v, x])
                yield Alternative(text, local, (regret, regret), False, "", *self._more(choices))
            else:
                yield self._solved(v, x, text, local, intervals[v, x])

    def _solved(self, v: int, x: int, text: str, local: tuple[int, ...], near: Interval) -> Alternative:
        """The alternative by solving with it pinned; the better of both bounds, and of both plans."""
        if v not in self._pinned:
            self._pinned[v] = _Pinned(self.problem, v)
        result = self._pinned[v].solve(x)
        if result.status == "infeasible":
            return Alternative(text, local, (math.inf, math.inf), False, self._why_not(v, x, result.conflict))
        plan = self.solution.objective
        high = self.overlap.step_us(result.choices) - plan if result.choices else math.inf
        choices = result.choices
        if near.changes is not None and near.high < high:
            high, choices = near.high, self._neighbourhood.choices(near)
        low = max(0.0, result.lower_bound - plan, near.low if near.low < math.inf else 0.0)
        more = self._more(choices) if choices else (0.0, 0.0)
        return Alternative(text, local, (low, max(low, high)), False, "", *more)

    def _sentence(self, v: int, option: int) -> str:
        """What forbids an option that no plan has, found without solving."""
        forbidding = self._forbidding(v, option)
        if forbidding:
            return f"forbidden by {', '.join(forbidding)}"
        pin = Restriction(_THIS, v, (option,))
        if is_impossible(replace(self.problem, restrictions=(pin,), rows=())):
            return self._why_not(v, option, ())
        for other in self.problem.restrictions:
            if is_impossible(replace(self.problem, restrictions=(pin, other), rows=())):
                return f"it cannot hold together with {other.name}"
        names = [r.name for r in self.problem.restrictions]
        if self.problem.rows:
            return " and ".join(["no plan has it within the memory limit", *names])
        return f"it cannot hold together with {', '.join(names)}" if names else "no plan has it"

    def _why_not(self, v: int, option: int, conflict: tuple[str, ...]) -> str:
        """What an option that no plan has cannot hold together with."""
        rows = [row.name for row in self.problem.rows if row.name in conflict]
        others = [name for name in conflict if name not in (_THIS, *rows)]
        if rows:
            return " and ".join(["no plan has it within the memory limit", *others])
        if others:
            return f"it cannot hold together with {', '.join(others)}"
        pin = Restriction(_THIS, v, (option,))
        return f"no plan has it: {dead_end(self.space, self.shape, replace(self.problem, restrictions=(pin,)))}"

    def _more(self, choices: tuple[int, ...]) -> tuple[float, float]:
        """Compute and communication of these choices above the plan's."""
        here, there = (self._split(x) for x in (choices, self.solution.choices))
        return here[0] - there[0], here[1] - there[1]

    def _split(self, choices: tuple[int, ...]) -> tuple[float, float]:
        busy, waiting = self.overlap.busy, self.overlap.waiting
        pairs = zip(busy.costs, waiting.costs, choices, strict=True)
        return float(sum(a[x] - b[x] for a, b, x in pairs)), evaluate(waiting, choices)

    def _refused(self, v: int) -> Iterator[tuple[str, str]]:
        """(op and option, sentence) for the ops that read the parameter or what derives from it alone."""
        nodes = self.space.graph.nodes
        derived = {v}
        seen: set[tuple[str, str]] = set()
        for i, node in enumerate(nodes):
            reads = {ref.node for ref in node.reads()}
            if not reads & derived:
                continue
            if node.from_parameters:
                derived.add(i)
            kind = self.space.kind(i)
            for refusal in kind.refused:
                option = f"{node.op_name} as {format_option(refusal)}"
                if (refusal.sentence, node.op_name) not in seen:
                    seen.add((refusal.sentence, node.op_name))
                    yield f"{node.name}: {option}", refusal.sentence


def recorded(overview: Overview) -> dict[str, tuple[AlternativePlan, ...]]:
    """What a plan file says of every alternative; times are rounded outwards, to a nanosecond."""
    return {
        name: tuple(_recorded(a) for a in alternatives if not a.chosen)
        for name, alternatives in overview.alternatives.items()
    }


def overview_of(plan: Plan) -> Overview:
    """The other way, of a plan that was written with its alternatives."""
    found = {}
    for name, alternatives in plan.alternatives.items():
        chosen = Alternative(", ".join(plan.parameters[name].placements), (), (0.0, 0.0), True)
        found[name] = (chosen, *(_read(a) for a in alternatives))
    return Overview(tuple(plan.mesh), found)


def _read(alternative: AlternativePlan) -> Alternative:
    low, high = alternative.regret_us or (math.inf, math.inf)
    regret = (math.inf if low is None else low, math.inf if high is None else high)
    return Alternative(", ".join(alternative.placements), (), regret, False, alternative.why)


def _recorded(alternative: Alternative) -> AlternativePlan:
    placements = tuple(alternative.placements.split(", "))
    low, high = alternative.regret_us
    if low == math.inf:
        return AlternativePlan(placements, None, alternative.note)
    least = math.floor(low * 1e3 + 1e-3) / 1e3
    most = math.ceil(high * 1e3 - 1e-3) / 1e3 if math.isfinite(high) else None
    return AlternativePlan(placements, (least, most))


def _of_layer(name: str, first: str, sentence: str) -> str:
    """The sentence of a parameter of another layer, for this one's."""
    apart = [(a, b) for a, b in zip(numbers_of(first), numbers_of(name), strict=True) if a != b]
    return re.sub(rf"\b{apart[0][0]}\.", f"{apart[0][1]}.", sentence) if len(apart) == 1 else sentence


def dead_end(space: Space, shape: Structure, problem: Problem) -> str:
    """The op, or what else, that the problem's restrictions leave without a layout."""
    variables = {variable.name: variable for variable in shape.variables}
    found = []
    for name in without_options(problem):
        node = space.graph.nodes[variables[name].node]
        is_op = node.kind == "op" and variables[name].role == "node"
        where = f", {node.module}" if node.module else ""
        found.append(f"op {name} ({node.op_name}, {node.phase}{where})" if is_op else f"{node.kind} {name}")
    have = "have" if len(found) > 1 else "has"
    return f"{', '.join(found)} {have} no layout that goes with it" if found else "no layouts of the ops go with it"


class _Pinned:
    """A problem solved with each option of one variable in turn."""

    def __init__(self, problem: Problem, v: int) -> None:
        self.problem, self.v = problem, v
        self.small, self.undo = presolve(replace(problem, rows=()), held=(v,))
        self.where = self.small.names.index(problem.names[v])
        count, start = len(self.small.costs[self.where]), [0] * self.small.num_variables
        self.left = {self.undo((*start[: self.where], k, *start[self.where + 1 :]))[v]: k for k in range(count)}

    def solve(self, option: int) -> Solution:
        """The best choices with the option; status "infeasible", with the conflict, where there are none."""
        if option not in self.left:
            return self._solve_whole(option, replace(self.problem, rows=()))
        pin = Restriction(_THIS, self.where, (self.left[option],))
        free = solve(replace(self.small, restrictions=(pin,)), time_limit=SECONDS)
        if free.status == "infeasible":
            return self._solve_whole(option, replace(self.problem, rows=()))
        if not free.choices:
            return free
        choices = self.undo(free.choices)
        if math.isfinite(evaluate(self.problem, choices)):
            return replace(free, choices=choices)
        held = self._solve_whole(option, self.problem)
        return replace(held, lower_bound=max(held.lower_bound, free.lower_bound))

    def _solve_whole(self, option: int, problem: Problem) -> Solution:
        pin = Restriction(_THIS, self.v, (option,))
        return solve(replace(problem, restrictions=(*problem.restrictions, pin)), time_limit=SECONDS)
