"""What the left variables of a `Contraction` hold at each time, and what time is worth.

Only times matter at which nothing more can be added: those right before something ends and after something began.
What is held whatever is chosen is taken off the limit; of the rest each piece is a variable's usages from one time to
another.
With a price for each time, the usage of an option costs the sum of prices while it is held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import Array
from ..timed import Index
from .contract import Contraction


@dataclass(frozen=True)
class Timeline:
    """Pieces of usage over times 0, 1, ... `len(limit)`.

    Attributes:
        limit: at each time, what the pieces may hold together; negative where nothing fits.
        variable: of each piece.
        first, last: the times of each piece, `last` not included.
        offset: where the amounts of each piece begin.
        amounts: of each option of each piece, one after the other; the least of a piece is 0.
        piece, option: of each amount its piece, and its option's place among all options of all variables.
        num_options: of all variables.
    """

    limit: Array
    variable: Index
    first: Index
    last: Index
    offset: Index
    amounts: Array
    piece: Index
    option: Index
    num_options: int

    @property
    def num_times(self) -> int:
        return len(self.limit)

    def load(self, choices: Sequence[int] | Index) -> Array:
        """What full choices hold at each time, beyond what is held anyway."""
        return self._over_time(self.amounts[self.offset + np.asarray(choices, dtype=np.int64)[self.variable]])

    def expected_load(self, shares: Array) -> Array:
        """What is held at each time where each option is chosen to a share."""
        held = np.bincount(self.piece, self.amounts * shares[self.option], len(self.variable))
        return self._over_time(held.astype(np.float64))

    def costs(self, prices: Array) -> Array:
        """What each option pays for the time it holds."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        paid = total[self.last] - total[self.first]
        return np.bincount(self.option, self.amounts * paid[self.piece], self.num_options).astype(np.float64)

    def _over_time(self, held: Array) -> Array:
        return _sums(self.first, self.last, held, self.num_times)


def make_timeline(contraction: Contraction) -> Timeline:
    """The timeline of what is left of a problem, without times at which nothing can break the limit."""
    times, pieces = _pieces(contraction)
    left = contraction.left.tolist()
    sizes = [len(contraction.costs[v]) for v in left]
    start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    position = {v: i for i, v in enumerate(left)}
    held = [(position[root], first, last, usage) for (root, first, last), usage in pieces.items()]
    spans = np.array([piece[1:3] for piece in held], dtype=np.int64).reshape(-1, 2)
    least = np.array([piece[3].min(initial=math.inf) for piece in held])
    most = np.array([piece[3].max(initial=-math.inf) for piece in held])
    limit = contraction.problem.limit
    is_tight = _sums(spans[:, 0], spans[:, 1], most, len(times)) > limit
    spans = np.concatenate([[0], np.cumsum(is_tight)]).astype(np.int64)[spans]
    num_times = int(is_tight.sum())
    room = limit - _sums(spans[:, 0], spans[:, 1], least, num_times)
    kept = np.flatnonzero((most > least) & (spans[:, 0] < spans[:, 1]))
    amounts = [held[k][3] - least[k] for k in kept.tolist()]
    lengths = np.array([len(a) for a in amounts], dtype=np.int64)
    offset = np.cumsum(lengths) - lengths
    variable = np.array([held[k][0] for k in kept.tolist()], dtype=np.int64)
    piece = np.repeat(np.arange(len(kept)), lengths)
    option = start[variable][piece] + np.arange(len(piece)) - offset[piece]
    first, last = spans[kept, 0], spans[kept, 1]
    flat = np.concatenate([*amounts, np.zeros(0)])
    return Timeline(room, variable, first, last, offset, flat, piece, option, int(start[-1]))


def _sums(first: Index, last: Index, held: Array, num_times: int) -> Array:
    """At each time the sum of what is held then."""
    n = num_times + 1
    return np.cumsum(np.bincount(first, held, n) - np.bincount(last, held, n))[:-1]


def _pieces(contraction: Contraction) -> tuple[Index, dict[tuple[int, int, int], Array]]:
    """The times that matter, and for each (variable, first, last) of them the usages of its options."""
    problem = contraction.problem
    holds = np.array([bool(u.any()) for u in problem.usages], dtype=bool) & (problem.starts < problem.ends)
    times = _times(problem.starts[holds], problem.ends[holds])
    first = np.searchsorted(times, problem.starts)
    last = np.searchsorted(times, problem.ends)
    pieces: dict[tuple[int, int, int], Array] = {}
    for v, (root, of_root) in enumerate(contraction.stands_for()):
        if holds[v] and first[v] < last[v]:
            usage = problem.usages[v][of_root]
            key = (root, int(first[v]), int(last[v]))
            pieces[key] = pieces[key] + usage if key in pieces else usage
    return times, pieces


def _times(starts: Index, ends: Index) -> Index:
    """For each end that follows a start, the last start before it: no other time holds more than one of these."""
    starts, ends = np.unique(starts), np.unique(ends)
    before = np.searchsorted(starts, ends) - 1
    return np.unique(starts[before[before >= 0]])
