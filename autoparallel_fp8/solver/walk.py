"""Choices within the limit: prices lead there, room is used up.

A walk changes prices until what is cheapest beside the others keeps the limit: they rise where it is broken and fall
where there is room. Then variables take better options one at a time as far as the room allows, at true costs.
"""

from __future__ import annotations

import math

import numpy as np

from ..problem import Array
from ..timed import Index
from .flat import Flat
from .room import Room
from .timeline import Timeline
from .tools import Tools

WALK_STEPS = 60
DESCENT_PASSES = 20
RISE, FALL = 2.0, 0.5  # of a price's logarithm, for a time that is over, or under, by the whole limit
FIRST_RISE, LONGER, MOST_RISE = 0.05, 1.1, 1.0  # added to it where over at all; grows while a walk does not arrive
HIGHEST = 1e12  # of the highest price at first: a walk whose prices get there does not arrive
FIRST_PRICE = 1e-6  # of all prices, for a time that had none


class Best:
    """The best full choices within the limit so far; `cost` is inf where there are none."""

    def __init__(self, flat: Flat, timeline: Timeline) -> None:
        self._flat, self._timeline = flat, timeline
        self.choices: Index | None = None
        self.cost = math.inf

    def offer(self, choices: Index) -> bool:
        """Take choices that keep the limit and cost less; whether they do."""
        cost = self._flat.cost(choices)
        if cost < self.cost and is_within(self._timeline, choices):
            self.choices, self.cost = choices.copy(), cost
            return True
        return False


def is_within(timeline: Timeline, choices: Index) -> bool:
    return bool((timeline.load(choices) <= timeline.limit).all())


def walk(flat: Flat, room: Room, timeline: Timeline, prices: Array, start: Index, best: Best, tools: Tools) -> None:
    """Offer `best` the choices within the limit that a walk from these prices and choices meets."""
    size = float(np.abs(timeline.limit).max(initial=0.0)) or 1.0
    choices, prices = start, prices.copy()
    if not prices.any():
        prices = prices + max(abs(flat.cost(start)) if math.isfinite(flat.cost(start)) else 1.0, 1e-6) * 1e-6 / size
    rise, most = FIRST_RISE, HIGHEST * float(prices.max(initial=0.0))
    for _ in range(WALK_STEPS):
        if tools.is_late:
            break
        choices = flat.descend(choices, flat.costs + timeline.costs(prices), DESCENT_PASSES)
        over = (timeline.load(choices) - timeline.limit) / size
        if not (over > 0).any():
            room.reset(choices)
            use_room(flat, room, tools)
            best.offer(room.choices)
            choices, rise = room.choices.copy(), FIRST_RISE
        risen = np.maximum(prices, FIRST_PRICE * prices.sum()) * np.exp(RISE * np.clip(over, 0.0, 1.0) + rise)
        prices = np.where(over > 0, risen, prices * np.exp(FALL * np.clip(over, -0.3, 0.0)))
        if prices.max(initial=0.0) > most:
            break
        rise = min(MOST_RISE, LONGER * rise)


def use_room(flat: Flat, room: Room, tools: Tools, passes: int = DESCENT_PASSES) -> None:
    """Variables take options that cost less and fit, those that gain most first, until none does."""
    for _ in range(passes):
        changed = 0
        for colour in flat.colours:
            total = flat.beside(colour, room.choices, flat.costs)
            now = total[colour.segment + room.choices[colour.variables]]
            gain = now - np.minimum.reduceat(total, colour.segment)
            gain[np.isnan(gain)] = 0.0
            eager = np.flatnonzero(gain > 0)
            for position in eager[np.argsort(-gain[eager], kind="stable")].tolist():
                v = int(colour.variables[position])
                own = total[colour.segment[position] :][: flat.sizes[v]]
                own = np.where(room.fits(v), own, np.inf)
                option = int(own.argmin())
                if own[option] < now[position]:
                    room.change(v, option)
                    changed += 1
        if not changed or tools.is_late:
            break
