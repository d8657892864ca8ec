"""Whether token ids and class numbers are of the model's vocabulary.

One device fails on an index that a table does not have. A rank of several holds a part of the table, and takes a row
that it lacks for another rank's: the sum over ranks would be zeros, and the loss a number like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .errors import UsageError
from .graph import Graph
from .indices import Limit, limits


class InRange:
    """The check of the arguments, as they were passed.

    Args:
        when: "first", "always" or "never", as `same_inputs.CHECKS`. On the CPU, where a look costs next to nothing,
            every call is looked at unless it says never; on a GPU the look waits for the device.
        graph: that was planned.
        where: the forward that takes them, for messages.
    """

    def __init__(self, when: str, graph: Graph, where: str) -> None:
        self.when, self.where = when, where
        self.limits = limits(graph)
        self.seen: set[tuple[str, torch.Size]] = set()

    def check(self, leaves: Mapping[str, Any]) -> None:
        """Looks at every argument that is an index of something.

        Raises:
            UsageError: one has an element that is none.
        """
        for limit in self.limits if self.when != "never" else ():
            value = leaves.get(limit.name)
            part = value.to_local() if isinstance(value, DTensor) else value
            if not isinstance(part, Tensor) or not part.numel():
                continue
            is_known = (limit.name, part.shape) in self.seen
            if part.is_cpu or self.when == "always" or not is_known:
                self._look(limit, part.detach())
        self.seen.update((name, x.shape) for name, x in leaves.items() if isinstance(x, Tensor))

    def _look(self, limit: Limit, part: Tensor) -> None:
        is_wrong = (part < 0) | (part >= limit.size)
        if limit.ignored is not None:
            is_wrong &= part != limit.ignored
        if not bool(is_wrong.any()):
            return
        wrong = int(part[is_wrong][0])
        others = "" if limit.ignored is None else f", and {limit.ignored} for what is not counted"
        raise UsageError(
            f"{limit.name} has {wrong}, and {limit.reader} takes 0 to {limit.size - 1}{others}",
            at=self.where,
            do="make the model's vocabulary as large as the tokenizer's, or mend the data",
        )
