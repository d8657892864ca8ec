"""Rules of installed packages, found by the entry-point group `autoparallel_fp8.rules`.

    [project.entry-points."autoparallel_fp8.rules"]
    my_ops = "my_package.rules"              # a module that registers when it is imported
    more = "my_package.rules:register"       # or a function that registers when it is called

They are loaded once, when rules are first asked about. A package that fails is warned about and leaves no rule behind;
one that replaces a rule is said so.
"""

from __future__ import annotations

import warnings
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from .language import _LEFT_OUT, _NAMED, _RULES

GROUP = "autoparallel_fp8.rules"
_notes: list[str] | None = None  # of the packages that are loaded; None before


def load_plugins() -> tuple[str, ...]:
    """Registers the rules of installed packages, the first time; sentences about what failed or was replaced."""
    global _notes
    if _notes is None:
        _notes = []  # before the work: a package may ask for options itself while it registers
        for entry in sorted(entry_points(group=GROUP), key=lambda e: (_package(e), e.name, e.value)):
            _notes += _load(entry)
        for note in _notes:
            warnings.warn(note, stacklevel=3)
    return tuple(_notes)


def _load(entry: EntryPoint) -> list[str]:
    before, left_out, named = dict(_RULES), dict(_LEFT_OUT), dict(_NAMED)
    try:
        loaded = entry.load()
        if callable(loaded):
            loaded()
        elif not isinstance(loaded, ModuleType):
            raise TypeError(f"{entry.value} is a {type(loaded).__name__}, neither a module nor a function")
    # A package's own code may raise anything, and may even leave; planning goes on without it.
    except (Exception, SystemExit) as error:
        for registry, kept in ((_RULES, before), (_LEFT_OUT, left_out), (_NAMED, named)):
            _restore(registry, kept)
        lines = str(error).splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return [f"rules of {_package(entry)} ({entry.value}) are not loaded: {reason}"]
    replaced = [op for op, function in before.items() if _RULES[op] is not function]
    if not replaced:
        return []
    whose = sorted({_module(before[op]) for op in replaced})
    names = ", ".join(sorted(map(str, replaced)))
    return [f"{_package(entry)} ({entry.value}) replaces the rule of {names} ({', '.join(whose)})"]


def _restore(registry: Any, kept: Any) -> None:
    registry.clear()
    registry.update(kept)


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unnamed package"


def _module(function: object) -> str:
    return str(getattr(function, "__module__", function))
