"""Prices for rows: what a unit of a row is worth, so that the row can be dropped and a bound kept.

With a price p >= 0 on a row, p * (left side - limit) is added to the objective. No solution within the row gets
dearer, so the least of the priced problem is a lower bound; the best price makes it the best such bound (Lagrange). The
least is replaced here by a dual bound (`dual.Dual`), which follows changes of price in a few sweeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Problem, evaluate, keeps_rows, row_value
from .ascent import ascend
from .descent import descend
from .dual import Dual
from .fold import Fold, mixed
from .narrow import decode
from .tools import Tools

SWEEPS_PER_PRICE = 5
SWEEPS_AFTER_LIFT = 3  # one mostly settles it
FOLDED_GAIN = 1e-5  # share of the bound that a better price may still bring; what layers leave open is more
MAX_STEPS = 40


def priced(problem: Problem, prices: Sequence[float]) -> Problem:
    """The problem without rows whose objective pays for them instead."""
    costs = list(problem.costs)
    offset = problem.offset
    for row, price in zip(problem.rows, prices, strict=True):
        if price > 0.0:
            offset -= price * (row.bound - row.base)
            for v, coefficients in row.terms.items():
                costs[v] = costs[v] + price * coefficients
    return replace(problem, costs=tuple(costs), rows=(), offset=offset)


@dataclass(frozen=True)
class Priced:
    """A dual of the priced problem at good prices, its bound, and choices met on the way (rows may be broken).

    `is_folded` where they come from the problem's short version (`fold`).
    """

    dual: Dual
    bound: float
    prices: tuple[float, ...]
    candidates: tuple[tuple[int, ...], ...]
    is_folded: bool = False


def find_prices(problem: Problem, tools: Tools) -> Priced:
    """Prices whose dual bound is good, by steps along what the guessed choices break or leave unused.

    One row: bisection between a price that is too low and one that is too high. More rows: a step along the violation,
    long enough to reach the best choices known (Polyak), shortened while it does not help.
    """
    dual = Dual(replace(problem, rows=()))
    for _ in range(4 * SWEEPS_PER_PRICE):
        if not tools.is_late:
            dual.sweep()
    search = _OneRow(problem) if len(problem.rows) == 1 else _ManyRows(problem)
    prices: tuple[float, ...] = (0.0,) * len(problem.rows)
    best_bound, best_prices = -math.inf, prices
    candidates: dict[tuple[int, ...], None] = {}
    for _ in range(MAX_STEPS if problem.rows else 1):
        guess = descend(dual.problem, decode(dual))
        candidates[guess] = None
        bound = dual.bound()
        if bound > best_bound:
            best_bound, best_prices = bound, prices
        prices = search.step(prices, guess, bound)
        if tools.is_late or search.is_done:
            break
        _reprice(dual, problem, prices)
    if prices != best_prices:
        _reprice(dual, problem, best_prices)
    return Priced(dual, dual.bound(), best_prices, tuple(candidates))


def find_prices_short(folded: Fold, tools: Tools) -> Priced:
    """The same for a problem with at most one row, worked out on its short version and lifted.

    What the row holds is counted on all layers. Of the two choices on either side of the best price, some layers take
    the one and the rest the other.
    """
    long = folded.long
    dual = Dual(replace(folded.short, rows=()))
    search = _OneRow(long, FOLDED_GAIN) if long.rows else None
    prices: tuple[float, ...] = (0.0,) * len(long.rows)  # that the dual is at
    fitting: tuple[tuple[float, ...], tuple[int, ...]] | None = None
    broken: tuple[int, ...] | None = None
    for _ in range(MAX_STEPS if search else 1):
        bound = ascend(dual, tools)
        guess = folded.lift_choices(descend(dual.problem, decode(dual)))
        if keeps_rows(long, guess):
            fitting = (prices, guess)
        else:
            broken = guess
        if search is None:
            break
        following = search.step(prices, guess, bound)
        if tools.is_late or search.is_done:
            break
        prices = following
        dual.replace_costs(priced(folded.short, prices))
    if fitting and fitting[0] != prices:
        prices = fitting[0]
        dual.replace_costs(priced(folded.short, prices))
        ascend(dual, tools)
    lifted = folded.lift(dual, priced(long, prices))
    for _ in range(SWEEPS_AFTER_LIFT):
        lifted.sweep()
    candidates = [guess for guess in (broken, fitting and fitting[1]) if guess]
    if broken and fitting:
        candidates.append(mixed(folded, broken, fitting[1], lambda choices: keeps_rows(long, choices)))
    return Priced(lifted, lifted.bound(), prices, tuple(candidates), is_folded=True)


def _reprice(dual: Dual, problem: Problem, prices: Sequence[float]) -> None:
    dual.replace_costs(priced(problem, prices))
    for _ in range(SWEEPS_PER_PRICE):
        dual.sweep()


class _OneRow:
    """Bisection, from the point where the lines of the last two choices cross."""

    def __init__(self, problem: Problem, least_gain: float = 1e-6) -> None:
        self.row, self.free, self.least_gain = problem.rows[0], replace(problem, rows=()), least_gain
        self.low: tuple[float, float, float] | None = None  # price, cost, excess of the row
        self.high: tuple[float, float, float] | None = None
        self.is_done = False

    def step(self, prices: tuple[float, ...], guess: tuple[int, ...], bound: float) -> tuple[float, ...]:
        excess = row_value(self.row, guess) - self.row.bound
        cost = evaluate(self.free, guess)
        if excess > 0:
            self.low = (prices[0], cost, excess)
        else:
            self.high = (prices[0], cost, excess)
        if self.low is None:
            self.is_done = True
            return prices
        if self.high is None:
            start = abs(cost) / max(abs(self.row.bound), excess) if math.isfinite(cost) else 1.0 / max(excess, 1e-9)
            return (prices[0] * 8 or 1e-3 * start or 1e-9,)
        crossing = (self.high[1] - self.low[1]) / (self.low[2] - self.high[2])
        width = self.high[0] - self.low[0]
        to_gain = width * min(self.low[2], -self.high[2])  # the bound cannot rise by more between the two
        self.is_done = width <= 1e-9 * self.high[0] or to_gain <= self.least_gain * abs(bound)
        if not self.low[0] + 0.1 * width < crossing < self.high[0] - 0.1 * width:
            crossing = self.low[0] + 0.5 * width
        return (crossing,)


class _ManyRows:
    """Steps along the violation, averaged over the past (volume algorithm, Barahona and Anbil 2000)."""

    def __init__(self, problem: Problem) -> None:
        self.rows, self.free = problem.rows, replace(problem, rows=())
        self.unit = np.array([max(abs(row.bound), 1e-9) for row in problem.rows])
        self.direction = np.zeros(len(problem.rows))
        self.best, self.length, self.is_done = -math.inf, 0.1, False

    def step(self, prices: tuple[float, ...], guess: tuple[int, ...], bound: float) -> tuple[float, ...]:
        excess = np.array([row_value(row, guess) - row.bound for row in self.rows]) / self.unit
        self.length *= 1.1 if bound > self.best else 0.8
        self.best = max(self.best, bound)
        self.direction = 0.5 * self.direction + 0.5 * excess
        norm = float(np.square(self.direction).sum())
        if norm == 0.0 or (not any(prices) and (excess <= 0).all()):
            self.is_done = True
            return prices
        step = self.length * max(abs(bound), 1e-9) * self.direction / math.sqrt(norm)
        return tuple(np.maximum(0.0, np.array(prices) + step / self.unit).tolist())


def repair(problem: Problem, choices: Sequence[int], prices: Sequence[float]) -> tuple[int, ...]:
    """Choices near the given ones that keep the rows, as far as dearer and dearer rows lead there."""
    choices = tuple(choices)
    scale = [max(price, _typical_price(problem, r)) for r, price in enumerate(prices)]
    factor = 1.0
    for _ in range(12):
        broken = [row_value(row, choices) > row.bound for row in problem.rows]
        if not any(broken):
            break
        now = [price * (factor if is_broken else 1.0) for price, is_broken in zip(scale, broken, strict=True)]
        choices = descend(priced(problem, now), choices)
        factor *= 3.0
    return descend(problem, choices)


def _typical_price(problem: Problem, r: int) -> float:
    """A small price to begin with where the search found none: a millionth of all cost for the whole row."""
    total = sum(float(np.abs(cost[np.isfinite(cost)]).max(initial=0.0)) for cost in problem.costs)
    return 1e-6 * max(total, 1.0) / max(abs(problem.rows[r].bound), 1e-9)
