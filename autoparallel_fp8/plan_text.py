"""Names and placements of a plan's parameters as text, equal layers in one: what reports and exports share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def placement_text(placements: Sequence[str], split: Mapping[str, Sequence[str]]) -> str:
    """As the plan's table prints it.

    >>> placement_text(("S(0)", "S(0)"), {"0": ("tp", "dp")})
    'S(0), S(0) (dim 0 by tp then dp)'
    """
    orders = [f"dim {dim} by {' then '.join(axes)}" for dim, axes in split.items() if len(axes) > 1]
    return ", ".join(placements) + (f" ({'; '.join(orders)})" if orders else "")


def pattern_of(name: str) -> str:
    """Equal for equal layers.

    >>> pattern_of("layers.3.wq.weight")
    'layers.#.wq.weight'
    """
    return re.sub(r"\d+", "#", name)


def numbers_of(name: str) -> tuple[int, ...]:
    """What `pattern_of` leaves out.

    >>> numbers_of("layers.3.experts.12.w")
    (3, 12)
    """
    return tuple(int(number) for number in re.findall(r"\d+", name))


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours in one.

    >>> ranges((0, 1, 3)), ranges((7,))
    ('{0-1,3}', '7')
    """
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(f"{a}-{b}" if a != b else str(a) for a, b in runs) + "}"


def fold(pattern: str, numbers: Iterable[Sequence[int]]) -> str:
    """The names of several layers as one.

    >>> fold("layers.#.w", [(0,), (1,), (2,)])
    'layers.{0-2}.w'
    """
    for column in zip(*numbers, strict=True):
        pattern = pattern.replace("#", ranges(sorted(set(column))), 1)
    return pattern
