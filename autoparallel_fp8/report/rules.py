"""Rules as text: the list of them, and one op's rule with what its kernel demands."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from ..rules import constraints_of, left_out, named_rules, rule_ops
from ..rules.check import rule_name
from ..rules.language import LEFT_OUT_OF_ALL, named_rule
from ..rules.op_names import require_rule
from .text import format_table


def rule_summaries() -> dict[str, str]:
    """Op -> the first line of its rule's docstring, or what the rule returns as it is written.

    Ops that have a rule by name stand behind, whether their package is there or not.
    """
    by_name = {name: _summary(named_rule(name)) for name in named_rules()}
    return {**{str(op): _summary(require_rule(op)) for op in rule_ops()}, **by_name}


def format_rules() -> str:
    """One line an op."""
    return format_table([("op", "rule"), *rule_summaries().items()])


def rule_dict(op: Any) -> dict[str, Any]:
    """One op's rule as plain data: schema, place, text, constraints, and why placements that hold are no rows."""
    function = require_rule(op)
    return {
        "op": str(op),
        "schema": str(op._schema),
        "rule": rule_name(function),
        "text": _text(function),
        "constraints": [_first_line(check) for check in constraints_of(op)],
        "left_out": {like: reason for like, reason in left_out(op).items() if like not in LEFT_OUT_OF_ALL},
    }


def format_rule(op: Any) -> str:
    """Schema, place and text of an op's rule; then its kernel's demands, and what the rule leaves out."""
    rule = rule_dict(op)
    lines = [f"{op}", f"  {rule['schema']}", f"  {rule['rule']}", "", textwrap.indent(rule["text"], "    ")]
    if rule["constraints"]:
        lines += ["", "the kernel wants, on every rank:", *(f"  {text}" for text in rule["constraints"])]
    if rule["left_out"]:
        lines += ["", "no row, though it would hold:"]
        lines += [f"  {pattern}: {reason}" for pattern, reason in rule["left_out"].items()]
    return "\n".join(lines)


def _summary(function: Any) -> str:
    """A line that says what the rule says."""
    documented = _first_line(function)
    if documented:
        return documented
    tree = _parsed(function)
    returned = [node for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value] if tree else []
    if len(returned) == 1 and returned[0].value is not None:
        return " ".join(ast.unparse(returned[0].value).split())
    return rule_name(function)


def _text(function: Any) -> str:
    """The rule's source without its decorators; its docstring where the source is not at hand."""
    tree = _parsed(function)
    if tree is None:
        return inspect.getdoc(function) or rule_name(function)
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    return "\n".join(lines[tree.lineno - 1 :])


def _parsed(function: Any) -> ast.FunctionDef | None:
    """The syntax of a rule that is a function in a file; None of others."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    first = tree.body[0] if tree.body else None
    return first if isinstance(first, ast.FunctionDef) else None


def _first_line(function: Any) -> str:
    return (inspect.getdoc(function) or "").strip().partition("\n")[0]
