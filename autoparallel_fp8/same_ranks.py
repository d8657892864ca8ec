"""Whether all ranks hold the same plan and the same model: each sends digests of its own, and all compare.

Ranks that run different programs wait for each other without end, and replicas that start from different values drift
apart unseen. Both are told here instead, on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import ApplyError
from .materialize import plain

if TYPE_CHECKING:
    from .plan import Plan

_SAMPLE = 64
"""Elements of a tensor that are compared: enough to tell other random numbers, or another checkpoint."""

_CURES = {
    "plan": "plan once, save the plan, and load that file on every rank",
    "choices": "use one version of torch and of this library everywhere",
    "seed": "pass the same seed on every rank",
    "compile": "compile on every rank or on none",
    "check_inputs": "pass the same check_inputs on every rank",
    "model": "build the model alike everywhere",
    "values": "call torch.manual_seed with one seed before building the model, or load one checkpoint everywhere, or "
    "pass a model on the meta device",
}
_SHOWN = {"choices": "restored plan", "values": "values of the model"}


def of_plan(plan: Plan, seed: int, is_compiled: bool, check_inputs: str) -> dict[str, Any]:
    """What must be the same of the plan and how it is applied."""
    return {"plan": _digest(plan.to_json()), "seed": seed, "compile": is_compiled, "check_inputs": check_inputs}


def of_choices(choices: Sequence[int]) -> dict[str, Any]:
    """What must be the same once every rank has made the plan live."""
    return {"choices": _digest(repr(tuple(choices)))}


def of_model(model: nn.Module) -> dict[str, Any]:
    """What must be the same of the model: its parameters and buffers, and a sample of their values."""
    named = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0])
    specs = [(name, tuple(x.shape), str(x.dtype), x.requires_grad, x.is_meta) for name, x in named]
    values = hashlib.sha256()
    for name, x in named:
        if not x.is_meta and x.numel():
            values.update(_sample(plain(name, x)))
    return {"model": _digest(repr(specs)), "values": values.hexdigest()}


def require_same(own: Mapping[str, Any], groups: Sequence[Any] | None) -> None:
    """Compares with the other ranks.

    Args:
        own: what must be the same everywhere, by name.
        groups: as of `gathered`.

    Raises:
        ApplyError: on every rank, where one differs, or one is lost.
    """
    found = gathered(own, groups, "plan")
    first = min(found)
    for name in own:
        differing = [rank for rank in sorted(found) if found[rank][name] != found[first][name]]
        if differing:
            shown = ", ".join(map(str, differing[:4])) + ", ..." * (len(differing) > 4)
            raise ApplyError(
                f"ranks do not have the same {_SHOWN.get(name, name)}: rank {shown} unlike rank {first}",
                at="apply",
                do=_CURES[name],
            )


def gathered(own: Mapping[str, Any], groups: Sequence[Any] | None, where: str) -> dict[int, dict[str, Any]]:
    """What each rank has, by rank.

    Args:
        own: this rank's.
        groups: process groups that together join all ranks (those of a mesh's axes); None for the default one.
        where: what is compared, for the message.

    Raises:
        ApplyError: a rank is lost.
    """
    found = {dist.get_rank(): dict(own)}
    for group in [None] if groups is None else groups:
        others: list[Any] = [None] * dist.get_world_size(group)
        try:
            if len(others) > 1:
                dist.all_gather_object(others, found, group=group)
        except RuntimeError as error:
            raise lost(where, error) from error
        for other in others:
            found.update(other or {})
    return found


def lost(where: str, error: RuntimeError) -> ApplyError:
    """What is said where a collective fails."""
    return ApplyError(
        f"rank {dist.get_rank()} lost the others: {str(error).splitlines()[0]}",
        at=where,
        do="look for the rank that failed first; start all of them again from the last checkpoint",
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sample(x: Tensor) -> bytes:
    """Bytes of elements from all over a tensor."""
    if x.ndim == 0:
        x = x.reshape(1)
    steps = torch.arange(_SAMPLE, device=x.device)
    taken = x[tuple(steps * (7919 + 104729 * d) % size for d, size in enumerate(x.shape))]
    return bytes(taken.contiguous().view(torch.uint8).cpu().numpy())
