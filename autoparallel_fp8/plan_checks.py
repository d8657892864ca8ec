"""What a plan file must hold to be read: fields of the declared types, and layouts that are said twice said alike.

A parameter's layout stands in `parameters`, for people and for `to_parallelize`, and at its node, which is what runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from .errors import PlanError

LIVE = {"live"}
"""Fields that no file has."""
NESTED = {"alternatives"}
"""Fields that a file has inside of `parameters`, where they were asked for."""

CHANGED = "the plan file was changed after it was saved: what it says need not be what was planned"
_EDITED = "the file was edited: plan again, and ask for a layout with pin(name, placement)"


def check_data(data: Any, record: type, version: int, where: str) -> None:
    """Parsed JSON has the fields of a plan of this version.

    Raises:
        PlanError: it has not.
    """
    make = "make one with `autoparallel-fp8 plan MODEL --json FILE` or plan.save(path)"
    if not isinstance(data, dict):
        raise PlanError(f"the file holds no plan but a {type(data).__name__}", at=where, do=make)
    required = {f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING}
    missing = sorted(required - set(data))
    if "version" in missing:
        what = "the plan lacks its version" if "nodes" in data else "the file holds no plan"
        raise PlanError(what, at=where, do=make)
    if data["version"] != version:
        raise PlanError(
            f"plan version {data['version']}, but this library reads version {version}", at=where, do="plan again"
        )
    if missing:
        raise PlanError(f"the plan lacks {', '.join(missing)}", at=where, do="plan again")
    for name, kind, shown in (("parameters", dict, "mapping"), ("nodes", list, "list"), ("collectives", list, "list")):
        items = data[name]
        held = items.values() if isinstance(items, dict) else items if isinstance(items, list) else ()
        if not isinstance(items, kind) or not all(isinstance(item, dict) for item in held):
            raise PlanError(f"{name} of the plan is no {shown} of mappings", at=where, do="plan again")


def digest(data: Mapping[str, Any]) -> str:
    """Of a plan as JSON has it, whatever its order and spaces; without the digest itself."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def is_changed(data: Mapping[str, Any]) -> bool:
    """Whether a file says what it did not say when it was saved; one without a digest does not tell."""
    return data.get("digest", digest(data)) != digest(data)


def check_agreement(parameters: Mapping[str, Any], nodes: Iterable[Any], where: str) -> None:
    """A plan's parameters and the nodes that hold them say the same.

    Args:
        parameters: name -> `ParameterPlan`.
        nodes: `NodePlan` of each op and tensor.
        where: the file.

    Raises:
        PlanError: they do not; the message has both.
    """
    held = {node.name: node for node in nodes if node.op == "parameter"}
    for name in sorted(held.keys() ^ parameters.keys()):
        is_known = name in held
        what = "parameters of the plan lacks" if is_known else "nodes of the plan lack"
        raise PlanError(
            f"{what} {name}, which {'a node holds' if is_known else 'parameters has'}", at=where, do=_EDITED
        )
    for name, parameter in parameters.items():
        said, runs = ", ".join(parameter.placements), ", ".join(held[name].output)
        if said != runs:
            raise PlanError(
                f"parameters[{name!r}] of the plan says {said}, and its node says {runs}", at=where, do=_EDITED
            )
        if (parameter.local_shape,) != held[name].local_shapes:
            raise PlanError(
                f"parameters[{name!r}] of the plan is {list(parameter.local_shape)} on a rank, and its node says "
                f"{list(map(list, held[name].local_shapes))}",
                at=where,
                do=_EDITED,
            )


@cache
def _types(record: type) -> dict[str, Any]:
    """Field -> type, without the ones that no file has."""
    hints = get_type_hints(record, localns={"Live": object})
    return {name: hint for name, hint in hints.items() if name not in LIVE}


def check_types(record: Any, prefix: str, where: str) -> None:
    """Every field of a dataclass reads as it is declared.

    Args:
        record: one of a plan's dataclasses.
        prefix: of its fields in messages.
        where: the file.

    Raises:
        PlanError: one does not.
    """
    for name, hint in _types(type(record)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(record, name)
        if not _fits(value, hint):
            shown = str(hint).replace("collections.abc.", "") if get_origin(hint) else hint.__name__
            raise PlanError(
                f"{prefix}{name} of the plan is a {type(value).__name__} that does not read as {shown}",
                at=where,
                do="plan again",
            )


def check_regrets(alternatives: Mapping[str, Iterable[Any]], where: str) -> None:
    """Every alternative has the fields of one, and an interval or none.

    Raises:
        PlanError: one has not.
    """
    for name, found in alternatives.items():
        for i, one in enumerate(found):
            at = f"parameters[{name!r}].alternatives[{i}]"
            check_types(one, f"{at}.", where)
            is_pair = one.regret_us is None or (len(one.regret_us) == 2 and one.regret_us[0] is not None)
            if not is_pair:
                raise PlanError(f"{at}.regret_us of the plan is no [low, high]", at=where, do="plan again")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type as the fields here are declared."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(item, inner[0]) for item in value)
    if kind is not None:  # X | None
        return any(_fits(value, choice) for choice in inner)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint)
