"""How much slower the step gets when a variable takes another option: an interval for many options at once.

    low    a bound: the dual of the two sums' mix, memory priced, and around each option a window (`solver.windows`)
    high   a plan: the choices in hand with the window's best choices, led back to the whole problem and added up

Both hold whatever the windows find; they only get closer. The interval is mostly a point. Where a plan breaks the
memory limit, changes elsewhere that save memory are added, cheapest a byte first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .overlap import Overlap
from .problem import OPTIMAL_GAP, Array, Problem, Row, Solution, evaluate, row_value
from .solver import presolve
from .solver.ascent import LAST_GAIN, ascend
from .solver.conflict import without_costs
from .solver.descent import descend
from .solver.dual import Dual
from .solver.nearby import Changed, added_costs, added_terms, back_to, lead_back, options_left
from .solver.prices import find_prices, priced
from .solver.tools import Outcome, Tools
from .solver.windows import Found, look_around

NEAR, FAR = (8, 3), (100, 12)  # variables in a window and sweeps, at first and for what that leaves open
MAX_FAR = 100  # options that are looked at again
OPEN = 1e-5  # of the step: a wider interval is looked at again
MAX_SAVERS = 200  # changes elsewhere that are tried to make room for one option

Option = tuple[int, int]
"""A variable and one of its options."""


@dataclass(frozen=True)
class Interval:
    """The regret of an option, in microseconds.

    Attributes:
        low: no plan with it is less slower; inf where no plan has it.
        high: the plan found is so much slower; inf where none was found.
        changes: what that plan changes in the smaller problem; None where none was found.
    """

    low: float
    high: float
    changes: Mapping[int, int] | None = None

    @property
    def width(self) -> float:
        return 0.0 if self.low == self.high else self.high - self.low


@dataclass(frozen=True)
class _Trials:
    """Changes of the smaller problem, what they change of the whole, the step and the rows they lead to."""

    changes: list[Mapping[int, int]]
    changed: Changed
    steps: Array
    excess: list[Array]  # of each row, above its bound where positive

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        """Which trials keep all rows."""
        kept = np.ones(len(self.changes), dtype=bool)
        for excess in self.excess:
            kept &= excess <= 0
        return kept


class Neighbourhood:
    """The problem of a plan, reduced to what its variables in question see; answers for any of their options.

    Args:
        overlap: the two sums, with rows and restrictions.
        weight: of their mix that proves the plan's bound.
        solution: the plan.
        variables: that may be asked about.
    """

    def __init__(self, overlap: Overlap, weight: float, solution: Solution, variables: Iterable[int]) -> None:
        self.overlap, self.solution = overlap, solution
        self.mixed, self.variables = overlap.at(weight), tuple(variables)
        self.rows: tuple[Row, ...] = self.mixed.rows
        self.small, self.undo = presolve(replace(self.mixed, rows=()), held=self.variables)
        self.dual = self._raised()
        if self.rows and solution.objective - self.dual.bound() > OPTIMAL_GAP * abs(solution.objective):
            self._pay_for_rows()
        self.base = self._base()

    def _raised(self) -> Dual:
        dual = Dual(self.small)
        ascend(dual, _tools(), LAST_GAIN)
        return dual

    def _pay_for_rows(self) -> None:
        """Go on with the rows at their prices, which are looked for with fewer variables held; kept where it helps."""
        with_rows, _ = presolve(self.mixed)
        if not with_rows.rows or not with_rows.num_variables:
            return
        found = dict(zip([row.name for row in with_rows.rows], find_prices(with_rows, _tools()).prices, strict=True))
        prices = [found.get(row.name, 0.0) for row in self.rows]
        before = self.small, self.undo, self.dual
        self.small, self.undo = presolve(priced(self.mixed, prices), held=self.variables)
        self.dual = self._raised()
        if self.dual.bound() <= before[2].bound():
            self.small, self.undo, self.dual = before

    def _base(self) -> tuple[int, ...]:
        """The plan's choices in the smaller problem, or choices near to them."""
        start = back_to(self.undo, self.solution.choices, lambda k: int(np.argmin(self.small.costs[k])))
        near = [tuple(start), descend(self.small, start)]
        full = [self.undo(choices) for choices in near]
        first, second = map(self.overlap.step_us, full)
        return near[1] if second < first else near[0]

    @cached_property
    def _where(self) -> dict[int, int]:
        """Variable -> its number in the smaller problem."""
        return {v: k for k, v in enumerate(self.undo.kept)}

    @cached_property
    def _left(self) -> dict[int, dict[int, int]]:
        """Variable -> option -> its number in the smaller problem, where it has one."""
        return options_left(self.undo, {v: len(self.mixed.costs[v]) for v in self.variables})

    def intervals(self, options: Iterable[Option], *, is_thorough: bool = False) -> dict[Option, Interval]:
        """The regret of each option; low and high are inf where no plan has it.

        Args:
            options: of the variables that this was made for.
            is_thorough: look at every option far around at once.
        """
        asked = list(options)
        found = {key: Interval(math.inf, math.inf) for key in asked}
        possible = [(v, x) for v, x in asked if x in self._left[v]]
        found.update(self._look(possible, *(FAR if is_thorough else NEAR)))
        if not is_thorough:
            wide = [key for key in possible if self._is_open(found[key])]
            wide = sorted(wide, key=lambda key: -found[key].width)[:MAX_FAR]
            for key, again in self._look(wide, *FAR).items():
                found[key] = _both(found[key], again)
        unfit = self._unfit([key for key in possible if found[key].high == math.inf > found[key].low])
        return {**found, **dict.fromkeys(unfit, Interval(math.inf, math.inf))}

    def _unfit(self, options: Sequence[Option]) -> list[Option]:
        """Those of the options whose least left side of a row is above its bound already, by the same kind of bound."""
        unfit: dict[Option, None] = {}
        for row in self.rows if options else ():
            small, undo = presolve(_only_row(self.mixed, row), held=self.variables)
            dual, where = Dual(small), {v: k for k, v in enumerate(undo.kept)}
            ascend(dual, _tools(), LAST_GAIN)
            left = options_left(undo, {v: len(self.mixed.costs[v]) for v in self.variables})
            asked: dict[int, list[int]] = {}
            for v, x in options:
                asked.setdefault(where[v], []).append(left[v][x])
            around = look_around(dual, descend(small), asked, size=FAR[0] // 2, sweeps=NEAR[1])
            least = {(v, x): around[where[v], left[v][x]].bound for v, x in options}
            unfit.update(dict.fromkeys(option for option in options if least[option] > row.bound))
        return list(unfit)

    def _is_open(self, interval: Interval) -> bool:
        return interval.width > OPEN * abs(self.solution.objective)

    def _look(self, options: Sequence[Option], size: int, sweeps: int) -> dict[Option, Interval]:
        if not options:
            return {}
        asked: dict[int, list[int]] = {}
        for v, x in options:
            asked.setdefault(self._where[v], []).append(self._left[v][x])
        around = look_around(self.dual, self.base, asked, size=size, sweeps=sweeps)
        keys = [(self._where[v], self._left[v][x]) for v, x in options]
        trials = self._try([around[key].changes for key in keys])
        intervals = [self._interval(around[key], trials, k) for k, key in enumerate(keys)]
        repaired = self._make_room(trials, [centre for centre, _ in keys])
        return {
            option: _both(interval, repaired[k]) if k in repaired else interval
            for k, (option, interval) in enumerate(zip(options, intervals, strict=True))
        }

    def _try(self, changes: list[Mapping[int, int]]) -> _Trials:
        full, changed = lead_back(self.undo, self.base, changes)
        sums = []
        for side in (self._free.busy, self._free.waiting):
            sums.append(evaluate(side, full) + added_costs(side, full, changed, len(changes)))
        excess = [
            row_value(row, full) + added_terms(row.terms, full, changed, len(changes)) - row.bound for row in self.rows
        ]
        return _Trials(changes, changed, np.maximum(*sums), excess)

    def _interval(self, around: Found, trials: _Trials, k: int) -> Interval:
        """What trial k shows, beside the bound that its window gives."""
        plan = self.solution.objective
        if around.bound == math.inf:
            return Interval(math.inf, math.inf)
        low = max(0.0, around.bound - plan)
        if not trials.fits[k] or not math.isfinite(trials.steps[k]):
            return Interval(low, math.inf)
        high = max(0.0, float(trials.steps[k]) - plan)
        return Interval(min(low, high), high, trials.changes[k])

    def choices(self, interval: Interval) -> tuple[int, ...]:
        """All choices of the plan that gives an interval its high end."""
        assert interval.changes is not None, "an interval without a plan has no choices"
        return self.undo([interval.changes.get(k, x) for k, x in enumerate(self.base)])

    def _make_room(self, trials: _Trials, centres: Sequence[int]) -> dict[int, Interval]:
        """For trials that break the one row there is: with changes of other trials that make room, if that does.

        A trial's own centre stays as it is, also where that is the base's option and so no change.
        """
        if len(self.rows) != 1 or trials.fits.all():
            return {}
        excess = trials.excess[0]
        less = self._excess_of_base - excess  # what each trial saves
        dearer = np.maximum(0.0, trials.steps - self._free.step_us(self._full_base))
        savers = [int(k) for k in np.argsort(dearer / np.maximum(less, 1e-9), kind="stable") if less[k] > 0]
        savers = [k for k in savers if math.isfinite(trials.steps[k])]
        merged: dict[int, dict[int, int]] = {}
        for k in np.flatnonzero(~trials.fits & np.isfinite(trials.steps)).tolist():
            changes = _with_savings(trials.changes, k, centres[k], float(excess[k]), savers, less)
            if changes is not None:
                merged[k] = changes
        if not merged:
            return {}
        again = self._try(list(merged.values()))
        nothing = Found(-math.inf, {})
        return {k: self._interval(nothing, again, position) for position, k in enumerate(merged)}

    @cached_property
    def _free(self) -> Overlap:
        """The two sums without rows; what the base and the trials choose is allowed anyway."""
        busy, waiting = self.overlap.busy, self.overlap.waiting
        return Overlap(*(replace(side, rows=(), restrictions=()) for side in (busy, waiting)))

    @cached_property
    def _full_base(self) -> tuple[int, ...]:
        return self.undo(self.base)

    @cached_property
    def _excess_of_base(self) -> float:
        return row_value(self.rows[0], self._full_base) - self.rows[0].bound


def _only_row(problem: Problem, row: Row) -> Problem:
    """What is allowed, at the row's left side as cost."""
    allowed = without_costs(problem)
    costs = tuple(cost + row.terms[v] if v in row.terms else cost for v, cost in enumerate(allowed.costs))
    return replace(allowed, costs=costs, rows=(), offset=row.base)


def _with_savings(
    changes: Sequence[Mapping[int, int]], k: int, centre: int, excess: float, savers: Sequence[int], less: Array
) -> dict[int, int] | None:
    """The changes of trial k and of others, until the excess is gone; no two touch one variable, none the centre."""
    merged = dict(changes[k])
    for saver in [s for s in savers if s != k][:MAX_SAVERS]:
        if excess > 0 and not (merged.keys() | {centre}) & changes[saver].keys():
            merged.update(changes[saver])
            excess -= float(less[saver])
    return merged if excess <= 0 else None


def _both(first: Interval, second: Interval) -> Interval:
    """What two intervals of one option say together."""
    best = first if first.high <= second.high else second
    low = max(first.low, second.low)
    return Interval(min(low, best.high), best.high, best.changes)


def _tools() -> Tools:
    """For bounds and prices, which run no program."""
    return Tools(lambda problem, deadline, relaxed: Outcome(None, -math.inf))
