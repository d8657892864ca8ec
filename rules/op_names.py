"""Ops by name: `"aten.mm.default"`, `"aten.mm"`, `"mm"`, with or without `torch.ops.` in front."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import torch

from ..errors import RuleError, UsageError
from .language import Rule, find_rule, rule_ops


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
    close = close_ops(op)
    do = f"did you mean {', '.join(close)}? " if close else ""
    raise UsageError(f"no op is called {op!r}", at="op", do=f"{do}`autoparallel-fp8 rules` lists those with a rule")


def require_rule(op: Any) -> Rule:
    """The rule of an overload.

    Raises:
        RuleError: it has none; close names are in the message.
    """
    function = find_rule(op)
    if function is None:
        close = close_ops(str(op))
        do = f"ops with a rule: {', '.join(close)}; or " if close else ""
        raise RuleError(
            f"no rule for {op}",
            at="op; in a plan it runs replicated",
            do=f"{do}register one with autoparallel_fp8.rules.rule",
        )
    return function


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
    """Up to three ops with a rule whose names are like this one: another overload of it first."""
    known = {str(op): op for op in rule_ops()}
    words = name.strip().removeprefix("torch.ops.").replace("::", ".")
    packets = {full.rpartition(".")[0] for full in known}
    packet = words.rpartition(".")[0]
    same = [full for full in known if packet == full.rpartition(".")[0] or full.split(".")[1] == words]
    short = {full.split(".", 1)[1]: full for full in known} | {packet.split(".", 1)[1]: packet for packet in packets}
    close = get_close_matches(words, [*known, *packets], n=3, cutoff=0.75)
    close += [short[match] for match in get_close_matches(words.removeprefix("aten."), short, n=3, cutoff=0.7)]
    return list(dict.fromkeys([*same, *close]))[:3]


def _namespaces() -> list[str]:
    """Those of ops that have a rule, aten first."""
    return list(dict.fromkeys(["aten", *(str(op).split(".")[0] for op in rule_ops())]))


def _packet(namespace: str, name: str) -> Any:
    found = getattr(getattr(torch.ops, namespace, None), name, None)
    return found if isinstance(found, torch._ops.OpOverloadPacket) else None
