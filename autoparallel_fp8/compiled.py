"""One list of a schedule as a function that Inductor has compiled.

The rank's loop over the items is traced once, on tensors without data: what is left is one graph of aten ops and
functional collectives in the order of the schedule, with no Python between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from .items import starts
from .program import Key
from .rank import Calls, Collectives, run_items
from .same_ranks import lost
from .schedule import Part

Compiled = Callable[[Mapping[Key, Tensor], Mapping[Key, Tensor]], dict[Key, Tensor]]


def compiled(
    part: Part,
    calls: Calls,
    collectives: Collectives,
    held: Mapping[Key, Tensor],
    added: Mapping[Key, Tensor],
) -> Compiled:
    """A function of (held, added) that gives what the part is to give, as `run_items` does.

    Args: as of `run_items`; of `held` and `added` the keys count, and shapes, strides, dtypes and devices.
    """
    read = {key for item in part.items for key in starts(item)} | set(part.ends)
    given = {key: value for key, value in held.items() if key in read}
    function = torch.compile(traced(part, calls, collectives, given, added), fullgraph=True, dynamic=False)
    keys, sums = list(given), list(added)

    def run(held: Mapping[Key, Tensor], added: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        try:
            made = function(*(held[key] for key in keys), *(added[key] for key in sums))
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):  # gloo's own errors have no type
                raise lost("a compiled step", error) from error
            raise
        return dict(zip(part.ends, made, strict=True))

    return run


def traced(
    part: Part,
    calls: Calls,
    collectives: Collectives,
    given: Mapping[Key, Tensor],
    added: Mapping[Key, Tensor],
) -> fx.GraphModule:
    """The part as one graph; its inputs are those given, then those added, in their order."""
    # The tracer below AOTAutograd; torch.compile itself would trace the loop's Python (2.11 to 2.14).
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*tensors: Tensor) -> tuple[Any, ...]:
        start = dict(zip(given, tensors[: len(given)], strict=True))
        more = dict(zip(added, tensors[len(given) :], strict=True))
        made = run_items(part, calls, collectives, start, more)
        return tuple(made[key] for key in part.ends)

    with torch.no_grad():
        graph: fx.GraphModule = make_fx(run, tracing_mode="fake")(*given.values(), *added.values())
    return graph
