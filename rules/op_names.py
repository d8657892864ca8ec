"""Ops by name: `"aten.mm.default"`, `"aten.mm"`, `"mm"`, with or without `torch.ops.` in front."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch

from ..errors import RuleError, UsageError
from .language import HEAVY_OPS, Rule, find_rule, named_rules, rule_ops


def find_op(op: Any) -> Any:
    """The overload or the packet of overloads that the user names.

    >>> find_op("mm"), find_op("aten::add.Tensor")
    (<OpOverloadPacket(op='aten.mm')>, <OpOverload(op='aten.add', overload='Tensor')>)

    Args:
        op: an overload or a packet, which come back as they are, or a name. A name without a namespace is looked for
            among the ops that have a rule, then in aten.

    Raises:
        UsageError: there is no such op; close names are in the message.
    """
    if isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return op
    if not isinstance(op, str):
        raise UsageError(
            f"{getattr(op, '__name__', op)!s} is a {type(op).__name__}, not an op",
            at="op",
            do='pass an overload such as torch.ops.aten.mm.default, or a name such as "aten.mm"',
        )
    parts = op.strip().removeprefix("torch.ops.").replace("::", ".").split(".")
    for words in (parts, *([space, *parts] for space in _namespaces())):
        if 2 <= len(words) <= 3 and all(word.isidentifier() for word in words):
            found = _packet(words[0], words[1])
            if found is not None and len(words) == 2:
                return found
            if found is not None and words[2] in found.overloads():
                return getattr(found, words[2])
            if found is not None:
                do = f"its overloads are {', '.join(found.overloads())}"
                raise UsageError(f"{found} has no overload {words[2]!r}", at=f"op {op!r}", do=do)
    known = [name for name in named_rules() if ".".join(parts) in (name, name.rpartition(".")[0])]
    if known:
        package = known[0].partition(".")[0]
        raise UsageError(
            f"{known[0]} has a rule, but the op is not here: it exists where {package} registers it",
            at=f"op {op!r}",
            do=f"import {package} first, on a machine for which it has the op",
        )
    close = close_ops(op)
    do = f"did you mean {', '.join(close)}? " if close else ""
    raise UsageError(f"no op is called {op!r}", at="op", do=f"{do}`autoparallel-fp8 rules` lists those with a rule")


def require_rule(op: Any, rewritten: Sequence[str] = ()) -> Rule:
    """The rule of an overload.

    Args:
        op: the overload, or a packet of which no overload has a rule.
        rewritten: names of the ops that capture makes of the call, where it is known.

    Raises:
        RuleError: it has none; what capture makes of it or close names are in the message.
    """
    function = find_rule(op)
    if function is not None:
        return function
    if rewritten:
        raise RuleError(
            f"no rule for {op}, and a plan needs none: capture writes this call as {', '.join(rewritten)}",
            at="op; no plan has it",
            do=f"ask about these instead, such as {_weightiest(rewritten)}",
        )
    if _is_rewritten(op):
        raise RuleError(
            f"no rule for {op}, and a plan needs none: capture writes it in simpler ops",
            at="op; no plan has it",
            do="give a call of it, with --shapes or to options(...): the answer names the ops that it becomes",
        )
    close = close_ops(str(op))
    do = f"ops with a rule: {', '.join(close)}; or " if close else ""
    raise RuleError(
        f"no rule for {op}",
        at="op; in a plan it runs replicated",
        do=f"{do}register one with autoparallel_fp8.rules.rule",
    )


def _weightiest(names: Sequence[str]) -> str:
    """The name that tells most: of a long op, else of one with a rule."""
    heavy, known = set(map(str, HEAVY_OPS)), set(map(str, rule_ops()))
    return min(names, key=lambda name: (name not in heavy, name not in known))


def _is_rewritten(op: Any) -> bool:
    from ..capture.rewritten import is_rewritten  # traces: imported where a rule is missing

    overloads = [op] if isinstance(op, torch._ops.OpOverload) else [getattr(op, name) for name in op.overloads()]
    return any(map(is_rewritten, overloads))


def overloads_with_rules(name: str) -> tuple[Any, ...]:
    """The overload of that name, or all of the op that have a rule.

    Raises:
        UsageError: no such op.
        RuleError: no rule.
    """
    found = find_op(name)
    if isinstance(found, torch._ops.OpOverload):
        require_rule(found)
        return (found,)
    ops = tuple(op for op in rule_ops() if op.overloadpacket is found)
    if not ops:
        require_rule(found)
    return ops


def close_ops(name: str) -> list[str]:
    """Up to three ops with a rule whose names are like this one: another overload of it first.

    Namespace and overload are left out of the comparison: they would make any two names alike.
    """
    known = list(map(str, rule_ops()))
    words = name.strip().removeprefix("torch.ops.").replace("::", ".").split(".")
    bare = words[1] if len(words) > 1 else words[0]
    same = [full for full in known if full.split(".")[1] == bare]
    packets = {full.split(".")[1]: full.rpartition(".")[0] for full in known}
    close = get_close_matches(bare, packets, n=3, cutoff=0.76 if len(bare) > 3 else 0.5)
    return list(dict.fromkeys([*same, *(packets[match] for match in close)]))[:3]


def _namespaces() -> list[str]:
    """Those of ops that have a rule, aten first."""
    return list(dict.fromkeys(["aten", *(str(op).split(".")[0] for op in rule_ops())]))


def _packet(namespace: str, name: str) -> Any:
    found = getattr(getattr(torch.ops, namespace, None), name, None)
    return found if isinstance(found, torch._ops.OpOverloadPacket) else None
