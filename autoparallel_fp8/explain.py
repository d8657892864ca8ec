"""Why a parameter lies where it does: every alternative with what it would cost, or the sentence that forbids it.

An alternative's regret is exact: the problem is presolved once with the parameter kept, then solved again with each of
its options pinned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .errors import PlanError
from .graph import Ref
from .layout import format_layout
from .options import Space, format_option
from .problem import Problem, Restriction, Solution
from .solver import presolve, solve
from .structure import Structure


@dataclass(frozen=True)
class Alternative:
    """One layout of a parameter.

    Attributes:
        placements: as text.
        local_shape: on one rank.
        regret_us: how much slower the best plan with it is; (bound, found) where the solver ran out of time; inf where
            no plan has it.
        chosen: the plan takes it.
        note: what forbids it, if anything.
    """

    placements: str
    local_shape: tuple[int, ...]
    regret_us: tuple[float, float]
    chosen: bool
    note: str = ""


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

    def __init__(self, space: Space, shape: Structure, problem: Problem, solution: Solution) -> None:
        self.space, self.shape, self.problem, self.solution = space, shape, problem, solution

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
        small, undo = presolve(self.problem, held=(v,))
        where = small.names.index(self.problem.names[v])
        start = [0] * small.num_variables
        left = {undo((*start[:where], k, *start[where + 1 :]))[v]: k for k in range(len(small.costs[where]))}
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
            if i not in left:
                yield Alternative(text, local, (math.inf, math.inf), False, "no plan has it")
                continue
            pinned = replace(small, restrictions=(Restriction(text, where, (left[i],)),))
            result = solve(pinned, time_limit=20.0)
            low = max(0.0, result.lower_bound - self.solution.objective)
            high = max(low, result.objective - self.solution.objective)
            note = "no plan has it within the memory limit" if result.status == "infeasible" else ""
            yield Alternative(text, local, (math.inf, math.inf) if note else (low, high), False, note)

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
