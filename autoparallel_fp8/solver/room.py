"""How much room each time has left under the limit, and which options of a variable fit in it.

The usages of a variable are steps over time: between two of its breakpoints every option holds the same. So whether an
option fits is asked once a step, of the tightest time in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..problem import Array
from ..timed import Index
from .timeline import Timeline


@dataclass(frozen=True)
class _Profile:
    """What a variable holds: `held[s, x]` from time `breaks[s]` to before `breaks[s + 1]` where option x is chosen."""

    breaks: Index
    held: Array


class Room:
    """The times of full choices, kept up to date as choices change.

    Attributes:
        choices: of each variable.
        left: at each time, the limit less what is held; negative where the limit is broken.
    """

    def __init__(self, timeline: Timeline, choices: Index, sizes: Index) -> None:
        self._timeline, self._sizes = timeline, sizes
        order = np.argsort(timeline.variable, kind="stable")
        counts = np.bincount(timeline.variable, minlength=len(sizes))
        self._pieces = np.split(order, np.cumsum(counts)[:-1]) if len(sizes) else []
        self._profiles: dict[int, _Profile] = {}
        self.reset(choices)

    def reset(self, choices: Index) -> None:
        self.choices = choices.copy()
        self.left: Array = self._timeline.limit - self._timeline.load(choices)

    @property
    def broken_by(self) -> float:
        """By how much the limit is broken at the worst time; 0 where it is kept."""
        return max(0.0, -float(self.left.min(initial=0.0)))

    def fits(self, v: int) -> npt.NDArray[np.bool_]:
        """Options that break no time's limit, and make no broken one worse; the option chosen always does."""
        profile = self._profile(v)
        if not len(profile.held):
            return np.ones(self._sizes[v], dtype=bool)
        begin = profile.breaks[0]
        tightest = np.minimum.reduceat(self.left[begin : profile.breaks[-1]], profile.breaks[:-1] - begin)
        more = profile.held - profile.held[:, self.choices[v], None]
        return np.asarray((more <= np.maximum(tightest, 0.0)[:, None]).all(axis=0))

    def change(self, v: int, option: int) -> None:
        profile = self._profile(v)
        if len(profile.held):
            more = profile.held[:, option] - profile.held[:, self.choices[v]]
            self.left[profile.breaks[0] : profile.breaks[-1]] -= np.repeat(more, np.diff(profile.breaks))
        self.choices[v] = option

    def held_at(self, v: int, times: Index) -> Array:
        """What each option of v holds at these times: [times, options]."""
        profile = self._profile(v)
        if not len(profile.held):
            return np.zeros((len(times), int(self._sizes[v])))
        step = np.searchsorted(profile.breaks, times, side="right") - 1
        is_inside = (step >= 0) & (step < len(profile.held))
        return np.where(is_inside[:, None], profile.held[np.clip(step, 0, len(profile.held) - 1)], 0.0)

    def held_at_all(self, v: int) -> Array:
        """What the option chosen for v holds at every time."""
        profile, held = self._profile(v), np.zeros(len(self.left))
        if len(profile.held):
            steps = np.repeat(profile.held[:, self.choices[v]], np.diff(profile.breaks))
            held[profile.breaks[0] : profile.breaks[-1]] = steps
        return held

    def active_at(self, time: int) -> Index:
        """Variables that hold something at a time, or may."""
        line = self._timeline
        return np.unique(line.variable[(line.first <= time) & (time < line.last)])

    def _profile(self, v: int) -> _Profile:
        if v not in self._profiles:
            self._profiles[v] = self._make_profile(v)
        return self._profiles[v]

    def _make_profile(self, v: int) -> _Profile:
        line, pieces, size = self._timeline, self._pieces[v], int(self._sizes[v])
        breaks = np.unique(np.concatenate([line.first[pieces], line.last[pieces]]))
        if not len(pieces):
            return _Profile(breaks, np.zeros((0, size)))
        changes = np.zeros((len(breaks), size))
        amounts = line.amounts[line.offset[pieces][:, None] + np.arange(size)]
        np.add.at(changes, np.searchsorted(breaks, line.first[pieces]), amounts)
        np.add.at(changes, np.searchsorted(breaks, line.last[pieces]), -amounts)
        return _Profile(breaks, np.cumsum(changes, axis=0)[:-1])
