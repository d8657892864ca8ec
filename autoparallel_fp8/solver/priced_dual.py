"""A lower bound for a problem whose limit binds at many times: prices for times and moved costs, raised together.

With a price of at least 0 for each time, price * (held - limit) is added to the objective: no solution within the limit
gets dearer, so the dual bound of the priced problem, less what the prices get for the limit, is a bound. Between two
sweeps of the dual the prices follow what it would choose: each is multiplied by the exponential of how far its time is
over the limit. Thousands of times take part from the first step on, and those that do not bind fade (mirror ascent,
Beck and Teboulle 2003; sweeps as in `dual`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..problem import Array, Problem
from ..timed import Index
from .dual import Dual
from .flat import colours
from .timeline import Timeline
from .tools import Tools

MAX_LEVELS = 600  # more batches than these make sweeps slow; then colours are swept, which tell less but quickly
TEMPERATURE = 0.1  # of the bound a variable: options this near to the best are shared in
FIRST_STEP, LEAST_STEP, MOST_STEP = 1.0, 0.01, 2.0
PATIENCE = 8  # steps without a better bound before the step is shortened
HIGHEST = 1e9  # of the first price: where nothing keeps the limit, prices would rise for ever
REBUILD = 50  # steps between two sums of moved costs from scratch: rounding does not pile up
ROUNDING = 1e-12  # of what is added up; the bound is lower by it
LEAST_PRICE = 1e-9  # of the largest: a price that is zero could not come back
SETTLE = 10  # sweeps before the first price and after the last


class PricedDual(Dual):
    """A dual whose options also pay for time, and which tells what each option costs in all.

    Attributes:
        seen: cost of each option when its variable was last visited, all that its edges can give collected.
    """

    def __init__(self, problem: Problem) -> None:
        batches = _levels(problem)
        batches = batches if len(batches) <= MAX_LEVELS else colours(problem)
        super().__init__(problem, batches)
        self.seen: Array = self.theta.copy()
        self._paid: Array = np.zeros_like(self.theta)
        options = [np.concatenate([np.arange(self.start[v], self.start[v + 1]) for v in batch]) for batch in batches]
        self._visits = (*zip(self._passes[0], options, strict=True), *zip(self._passes[1], options[::-1], strict=True))
        self._shapes = self._by_shape()

    def sweep(self) -> None:
        for batch, options in self._visits:
            self.collect(batch)
            self.seen[options] = self.theta[options]
            self.spread(batch)

    def price(self, paid: Array) -> None:
        """Let options pay this for time, and no more what they paid before."""
        self.theta += paid - self._paid
        self._paid = paid

    def state(self) -> tuple[Array, Array, Array]:
        """Costs after moving, moved costs, and what options pay for time; `restore` takes them back."""
        return self.theta, self.moved, self._paid

    def restore(self, theta: Array, moved: Array, paid: Array) -> None:
        self.theta, self.moved, self._paid = theta, moved, paid

    def rebuild(self) -> None:
        """The costs of options from scratch: their own, what they pay, and what was moved to them."""
        self.theta = np.concatenate([*self.problem.costs, np.zeros(0)]) + self._paid
        for _, first, second, of_first, of_second in self._shapes:
            np.add.at(self.theta, of_first, self.moved[first])
            np.add.at(self.theta, of_second, self.moved[second])

    def bound(self) -> float:
        """The bound of the priced problem; as `Dual.bound`, for all edges of one shape at once."""
        total = self.problem.offset + float(np.minimum.reduceat(self.theta, self.start[:-1]).sum())
        for tables, first, second, _, _ in self._shapes:
            seen = tables - self.moved[first][:, :, None] - self.moved[second][:, None, :]
            total += float(seen.min(axis=(1, 2)).sum())
        return total

    def shares(self, temperature: float) -> Array:
        """How much each option would be chosen: e-fold less for each `temperature` that it costs more than the best."""
        sizes = np.diff(self.start)
        least = np.repeat(np.minimum.reduceat(self.seen, self.start[:-1]), sizes)
        weight = np.exp((least - self.seen) / max(temperature, 1e-300))
        return weight / np.repeat(np.add.reduceat(weight, self.start[:-1]), sizes)

    def excess(self) -> Array:
        """For each option by how much any solution with it exceeds the bound at least, as in `narrow`."""
        least = np.minimum.reduceat(self.theta, self.start[:-1])
        total = self.theta - np.repeat(least, np.diff(self.start))
        for tables, first, second, of_first, of_second in self._shapes:
            seen = tables - self.moved[first][:, :, None] - self.moved[second][:, None, :]
            seen = seen - seen.min(axis=(1, 2), keepdims=True)
            np.add.at(total, of_first, seen.min(axis=2))
            np.add.at(total, of_second, seen.min(axis=1))
        return total

    def _by_shape(self) -> list[tuple[Array, Index, Index, Index, Index]]:
        """Edges by the shape of their tables: tables, places of both ends in `moved`, and of both in `theta`."""
        shapes: dict[tuple[int, ...], list[int]] = {}
        for number, edge in enumerate(self.problem.edges):
            shapes.setdefault(self.problem.tables[edge.table].shape, []).append(number)
        found = []
        for (n, m), numbers in shapes.items():
            edges = [self.problem.edges[e] for e in numbers]
            ends = self.ends[numbers]
            starts = self.start[np.array([(edge.u, edge.w) for edge in edges], dtype=np.int64)]
            places = [(at[:, :1] + np.arange(n), at[:, 1:] + np.arange(m)) for at in (ends, starts)]
            found.append((np.stack([self.problem.tables[e.table] for e in edges]), *places[0], *places[1]))
        return found


def _levels(problem: Problem) -> list[list[int]]:
    """All variables in batches without edges inside; a sweep over them is one over the variables in order."""
    level = [0] * problem.num_variables
    for edge in sorted(problem.edges, key=lambda edge: (edge.w, edge.u)):
        level[edge.w] = max(level[edge.w], level[edge.u] + 1)
    batches: list[list[int]] = [[] for _ in range(max(level, default=-1) + 1)]
    for v, number in enumerate(level):
        batches[number].append(v)
    return batches


@dataclass
class Ascent:
    """Prices and moved costs on their way up.

    Attributes:
        dual: at the prices of the last step.
        timeline: what options hold.
        prices: of each time, for the next step.
        bound: the best so far; `best_prices` had it.
    """

    dual: PricedDual
    timeline: Timeline
    prices: Array
    best_prices: Array
    bound: float = -math.inf
    step_length: float = FIRST_STEP
    highest: float = math.inf
    _steps: int = 0
    _stale: int = 0
    _rising: int = 0

    @classmethod
    def begin(cls, problem: Problem, timeline: Timeline, tools: Tools) -> Ascent:
        """Sweeps without prices, then a small price for all times alike."""
        dual = PricedDual(problem)
        for _ in range(SETTLE):
            if not tools.is_late:
                dual.sweep()
        bound = dual.bound()
        count = max(1, timeline.num_times)
        size = float(np.abs(timeline.limit).max(initial=1.0)) or 1.0
        prices = np.full(timeline.num_times, 0.1 * max(abs(bound), 1e-6) / size / count)
        highest = HIGHEST * float(prices.max(initial=0.0))
        return cls(dual, timeline, prices, np.zeros(timeline.num_times), bound, highest=highest)

    def step(self) -> float:
        """One sweep at the prices, then the next prices; the bound at these prices, which may be below the best."""
        self._steps += 1
        if self._steps % REBUILD == 0:
            self.dual.rebuild()
        bound = self._sweep_at(self.prices)
        if bound > self.bound:
            self.bound, self.best_prices = bound, self.prices
            self._stale, self._rising = 0, self._rising + 1
        else:
            self._stale, self._rising = self._stale + 1, 0
        if self._stale >= PATIENCE:
            self.step_length, self._stale = max(LEAST_STEP, 0.7 * self.step_length), 0
            self.prices = self.best_prices
        elif self._rising >= 2 * PATIENCE:
            self.step_length, self._rising = min(MOST_STEP, 1.4 * self.step_length), 0
        self.prices = self._next_prices()
        return bound

    def settle(self) -> None:
        """Back to the best prices, with some sweeps for the moved costs to follow."""
        self.dual.rebuild()
        for _ in range(SETTLE):
            self.bound = max(self.bound, self._sweep_at(self.best_prices))

    def at_best(self) -> float:
        """The bound of the dual as it is after `settle`: what `narrow` measures excess from."""
        return self._less_limit(self.best_prices)

    def _sweep_at(self, prices: Array) -> float:
        self.dual.price(self.timeline.costs(prices))
        self.dual.sweep()
        return self._less_limit(prices)

    def _less_limit(self, prices: Array) -> float:
        """The dual's bound less what the prices get for the limit, and less what rounding may have added."""
        priced, paid = self.dual.bound(), float(prices @ self.timeline.limit)
        return priced - paid - ROUNDING * (abs(priced) + abs(paid))

    def _next_prices(self) -> Array:
        if not self.timeline.num_times:
            return self.prices
        count = max(1, self.dual.problem.num_variables)
        shares = self.dual.shares(TEMPERATURE * max(abs(self.bound), 1e-9) / count)
        size = float(np.abs(self.timeline.limit).max()) or 1.0
        excess = np.clip((self.timeline.expected_load(shares) - self.timeline.limit) / size, -1.0, 1.0)
        prices = self.prices * np.exp(self.step_length * excess)
        return np.clip(prices, LEAST_PRICE * prices.max(), self.highest)
