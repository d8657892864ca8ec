"""A planning problem whose memory is counted over time: choose one option per variable at the least sum of costs.

    minimise   sum_v costs[v][x_v]  +  sum_e tables[edges[e].table][x_u, x_w]        (edge e joins u and w)
    subject to sum of usages[v][x_v] over the v with starts[v] <= t < ends[v]  <=  limit      at each time t

`inf` forbids an option or a pair. Costs and usages are not negative. Ten thousands of variables and times are usual, so
the limit is one number and two arrays here, not a row of `Problem` for each time. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .problem import Array, Edge

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TimedProblem:
    """Variables with option costs, pairwise tables, and usage held from a start to before an end.

    Attributes:
        costs, usages: one vector a variable; equal vectors may be the same object.
        edges: at most one a pair, u < w.
        tables: referred to by `Edge.table`.
        starts, ends: one a variable, whole numbers; where they are equal nothing is held.
        limit: of the sum of usages at any time; inf where there is none.
    """

    costs: tuple[Array, ...]
    edges: tuple[Edge, ...]
    tables: tuple[Array, ...]
    usages: tuple[Array, ...]
    starts: Index
    ends: Index
    limit: float

    @property
    def num_variables(self) -> int:
        return len(self.costs)

    def cost(self, choices: Sequence[int]) -> float:
        """Sum of costs of a full choice; inf where an option or a pair is forbidden. The limit is not looked at."""
        total = float(sum(cost[x] for cost, x in zip(self.costs, choices, strict=True)))
        return total + float(sum(self.tables[e.table][choices[e.u], choices[e.w]] for e in self.edges))

    def peak(self, choices: Sequence[int]) -> float:
        """The largest sum of usages at any time."""
        held = np.array([usage[x] for usage, x in zip(self.usages, choices, strict=True)], dtype=float)
        changes = np.zeros(int(self.ends.max(initial=0)) + 1)
        np.add.at(changes, self.starts, held)
        np.add.at(changes, self.ends, -held)
        return float(np.cumsum(changes).max(initial=0.0))
