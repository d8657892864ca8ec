"""Reads one device profile (TOML) with every key checked; knows the form of the file, not its meaning.

A number is written `key = { value = 80e9, source = "data sheet" }`. `base = "h200"` starts from a shipped profile, of
which `name`, `aliases` and `cuda_names` are not taken over; `without = ["scale_up.pair_efficiency"]` drops keys or
tables of the base. Keys are spelled with dots below, `peak_flops.bfloat16`. Every complaint is a `UsageError` that
names file and key.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from autoparallel_fp8.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_OWN_KEYS = ("name", "aliases", "cuda_names", "base", "without")


class ProfileFile:
    """The keys of one profile; each is to be asked for once, `finish` complains about the rest.

    Args:
        path: the TOML file.
        profile_dir: folder of the shipped profiles, where `base` is looked up.

    Raises:
        UsageError: the file cannot be read, is no TOML, or its base is no shipped profile.
    """

    def __init__(self, path: Path, profile_dir: Path) -> None:
        self.path = path
        self.sources: dict[str, str] = {}
        self._values = _read(path, profile_dir)
        self._known: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key, or any key of a table of that name, is there."""
        return any(name == key or name.startswith(key + ".") for name in self._values)

    def text(self, key: str) -> str:
        value = self._take(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{key} is {value!r}, not a text", key)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._take(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{key} is {value!r}, not a list of texts", key)
        return tuple(value)

    def number(self, key: str, *, at_most: float = float("inf")) -> float:
        """The value of a number, its source noted in `sources`; above 0 and at most `at_most`."""
        entry = self._take(key)
        if not isinstance(entry, dict):
            do = f'write {key.rsplit(".", 1)[-1]} = {{ value = {entry}, source = "where it comes from" }}'
            raise self.error(f"{key} has no source", key, do)
        value, source = entry.get("value"), entry.get("source")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"{key} is {value!r}, not a number", key)
        if not 0 < value <= at_most or value == float("inf"):
            limit = "" if at_most == float("inf") else f" and at most {at_most:g}"
            raise self.error(f"{key} is {value:g}; it must be above 0{limit}", key)
        if not isinstance(source, str) or not source.strip():
            raise self.error(f"{key} has no source", key, "add source = with the page or the command it comes from")
        if stray := set(entry) - {"value", "source"}:
            raise self.error(f"{key} has an unknown part {min(stray)!r}", key, "only value and source belong there")
        self.sources[key] = source
        return float(value)

    def whole(self, key: str) -> int:
        value = self.number(key)
        if value != int(value):
            raise self.error(f"{key} is {value:g}, not a whole number", key)
        return int(value)

    def table(
        self, key: str, names: tuple[str, ...] | None = None, *, at_most: float = float("inf")
    ) -> dict[str, float]:
        """The numbers of a table by name, in file order.

        Args:
            key: the table.
            names: the names it may hold; None allows any.
            at_most: limit of every number.
        """
        found = [name for name in self._values if name.startswith(key + ".")]
        if not found:
            raise self.error(f"table [{key}] is missing or empty", key)
        for name in found:
            short = name[len(key) + 1 :]
            if names is not None and short not in names:
                raise self.error(f"unknown key {name}", name, _did_you_mean(short, names))
        return {name[len(key) + 1 :]: self.number(name, at_most=at_most) for name in found}

    def finish(self) -> None:
        """Complains about the first key that nobody asked for."""
        for name in self._values:
            if name not in self._known:
                raise self.error(f"unknown key {name}", name, _did_you_mean(name, tuple(self._known)))

    def error(self, message: str, key: str, do: str | None = None) -> UsageError:
        return UsageError(message, at=f"{self.path}: {key}", do=do)

    def _take(self, key: str) -> Any:
        self._known.add(key)
        if key not in self._values:
            raise self.error(f"key {key} is missing", key, 'add it, or start from a shipped profile: base = "h200"')
        return self._values[key]


def _read(path: Path, profile_dir: Path) -> dict[str, Any]:
    """Dotted key -> number entry, text or list; the base's keys first."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the device profile: {error.strerror}", at=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the device profile is not valid TOML: {error}", at=str(path)) from error
    own = _flat(raw)
    base, without = own.pop("base", None), own.pop("without", [])
    if base is None:
        return own
    shipped = tuple(sorted(file.stem for file in profile_dir.glob("*.toml")))
    if base not in shipped:
        raise UsageError(
            f"base {base!r} is no shipped profile", at=f"{path}: base", do=_did_you_mean(str(base), shipped)
        )
    start = {
        key: value for key, value in _read(profile_dir / f"{base}.toml", profile_dir).items() if key not in _OWN_KEYS
    }
    for drop in without:
        hit = [key for key in start if key == drop or key.startswith(f"{drop}.")]
        if not hit:
            raise UsageError(f"without names {drop!r}, which {base} does not have", at=f"{path}: without")
        for key in hit:
            del start[key]
    return {**start, **own}


def _flat(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, dict) and not value.keys() & {"value", "source"}:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _did_you_mean(word: str, known: tuple[str, ...]) -> str:
    close = get_close_matches(word.lower(), known, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}known: {', '.join(sorted(known))}"
