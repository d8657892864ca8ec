"""Why a parameter lies where it does: every alternative with what it would cost, or the sentence that forbids it.

The problem is presolved once, without its rows and with the parameter held; then each option is pinned and solved. A
plan that breaks a row (memory) is solved again with the rows. Regrets are exact but where the solver ran out of
time or the step waits for communication (`overlap.py`): then an interval holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .errors import PlanError
from .expansion import Space
from .graph import Ref
from .layout import format_layout
from .overlap import Overlap
from .problem import Problem, Restriction, Solution, evaluate
from .products import format_option
from .solver import presolve, solve, without_options
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
        self.problem = overlap.at(weight)

    def explain(self, name: str) -> Explanation:
        """Alternatives of a parameter, by its name.

        Raises:
            PlanError: the plan has no such parameter.
        """
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

    def _alternatives(self, v: int) -> Iterator[Alternative]:
        layouts = self.shape.sources[v][0]
        chosen = self.solution.choices[v]
        others = [r for r in self.problem.restrictions if r.variable == v]
        pinned = _Pinned(self.problem, v)
        for i, layout in enumerate(layouts):
            local = self.space.local_shape(Ref(v), layout)
            text = format_layout(layout)
            if i == chosen:
                yield Alternative(text, local, (0.0, 0.0), True)
                continue
            forbidding = [r.name for r in others if i not in r.allowed]
            if forbidding:
                yield Alternative(text, local, (math.inf, math.inf), False, f"forbidden by {', '.join(forbidding)}")
                continue
            result = pinned.solve(i)
            if result.status == "infeasible":
                yield Alternative(text, local, (math.inf, math.inf), False, self._why_not(v, i, result.conflict))
                continue
            low = max(0.0, result.lower_bound - self.solution.objective)
            step = self.overlap.step_us(result.choices) if result.choices else math.inf
            compute, communication = self._more(result.choices) if result.choices else (0.0, 0.0)
            regret = (low, max(low, step - self.solution.objective))
            yield Alternative(text, local, regret, False, "", compute, communication)

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
