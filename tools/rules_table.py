"""Makes docs/rules.md: what every rule allows, what was tried to prove it, and what it leaves out and why.

    python tools/rules_table.py            # writes the file
    python tools/rules_table.py --check    # exit 1 and what differs where the file is not what this makes

All but the numbers of PyTorch's calls follows from the rules and the tests' own samples. These numbers come from
`build/proof`, which `make proof` leaves behind, and where there is none stay as they stand in the file.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from autoparallel_fp8.rules import AxisRow, Dims, Signature, find_rule, left_out, named_rules, rule_ops  # noqa: E402
from autoparallel_fp8.rules.language import LEFT_OUT_OF_ALL, named_rule  # noqa: E402
from op_samples import all_samples  # noqa: E402
from split_ops import Ways, ways_of  # noqa: E402

FILE, PROOF = ROOT / "docs" / "rules.md", ROOT / "build" / "proof"
OWN_SIZES = (2, 3, 4)
SLACK = 0.1
"""Share by which the number of calls may differ: other processors and versions run other ops inside of an op."""
COLUMNS = (
    "op", "dims, and what the rule says", "rows on one axis", "samples here", "PyTorch's", "axes", "local programs",
    "holds too, and why it is no row",
)  # fmt: skip

INTRODUCTION = """# Rules

What one mesh axis may do to each op. This file is made by `make rules-table`; tests hold that it is up to date.

- **Dims**: the tensors read, an arrow, the tensors made, each with a word a dim: equal words are split together. `_`
  stays whole, `(h g)` is a dim made of two, `.` a tensor without dims. Of several calls the one with most rows stands.
- **Rows**: `R` whole on every rank, `S(0)` dim 0 split (`S(0.1)` at its second factor), `P(sum)` and `P(max)` a part of
  a sum or maximum. That everything may be whole is implied. Rows for scales that are each rank's own are not shown.
- **Tried**: every row of every sample is split, run on each rank, joined and held against the unsplit op: bit for bit
  where the op rounds nothing. Samples here (`tests/op_samples.py`) run on axes of 2, 3 and 4 and on two axes; PyTorch's
  are all calls of the op in PyTorch's own op tests, forward and backward, on axes of 2 to 5 and a fifth of them on two
  axes (`make proof`).
  *Axes* are the sizes on which something was split.
- **Holds too**: all other placements of the op's tensors are tried as well. Those that would give the right result
  and are no row are listed as a pattern, with the reason.
"""


class Tried(NamedTuple):
    """PyTorch's calls of an op that the proof has run, and the axis sizes on which one of them was split."""

    samples: int
    sizes: tuple[int, ...]


def table(tried: dict[str, Tried]) -> str:
    """The whole file, given the proof's numbers of each op."""
    lines = [_line(op, tried.get(str(op))) for op in rule_ops()]
    own = sum(len(samples) for samples in all_samples().values())
    total = sum(tried[str(op)].samples for op in rule_ops() if str(op) in tried)
    counts = f"{len(lines)} ops, {own} samples written here, {total} calls of PyTorch's op tests."
    general = "".join(f"For every op, `{like}` is no row: {reason}.\n" for like, reason in LEFT_OUT_OF_ALL.items())
    by_name = [f"- `{name}`: {inspect.getdoc(named_rule(name)) or ''}".split("\n")[0] for name in named_rules()]
    general += "\nRules by name, of ops that exist where their package registers them (`import torchao`):\n\n"
    general += "\n".join(by_name) + "\n"
    head = [_cells(COLUMNS), _cells("---" for _ in COLUMNS)]
    return "\n".join([INTRODUCTION, counts, "", general, *head, *lines, ""])


def _line(op: Any, tried: Tried | None) -> str:
    samples = all_samples()[op]
    ways = [ways_of(sample) for sample in samples]
    widest = max(range(len(ways)), key=lambda i: len(_plain(ways[i].axis_rows)))
    rule = find_rule(op)
    assert rule is not None
    signature = rule(ways[widest].call)
    words = (inspect.getdoc(rule) or "").split("\n")[0]
    sizes = {size for one in ways for size in OWN_SIZES if _splits(one, size)}
    programs = {name for one in ways for name in _programs(rule(one.call))}
    reasons = {like: reason for like, reason in left_out(op).items() if like not in LEFT_OUT_OF_ALL}
    return _cells(
        (
            f"`{op}`",
            f"`{format_signature(signature)}`" + (f"<br>{words}" if words else ""),
            "<br>".join(f"`{format_row(row)}`" for row in _plain(ways[widest].axis_rows)) or "none",
            str(len(samples)),
            str(tried.samples) if tried and tried.samples else "–",
            " ".join(map(str, sorted(sizes | set(tried.sizes if tried else ())))) or "–",
            ", ".join(f"`{name}`" for name in sorted(programs)) or "–",
            "<br>".join(f"`{like}`: {reason}" for like, reason in reasons.items()) or "–",
        )
    )


def _cells(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _plain(rows: Iterable[AxisRow]) -> list[AxisRow]:
    """Rows without scales of each rank's own, and without the one where all is whole."""
    placed = [(row, {p.kind for p in (*row.operands, *row.results)}) for row in rows]
    return [row for row, kinds in placed if not kinds & set("FVQ") and kinds != {"R"}]


def _splits(ways: Ways, size: int) -> bool:
    options = ways.kind((size,)).options
    return any(p.kind == "S" for o in options for layout in (*o.operands, *o.results) for p in layout)


def _programs(signature: Signature) -> set[str]:
    finer = _programs(signature.finer) if signature.finer else set()
    return finer | set(signature.local.values())


def format_row(row: AxisRow) -> str:
    """`S(1) x S(0) -> P(sum)`."""
    left, right = " x ".join(map(str, row.operands)), ", ".join(map(str, row.results))
    return f"{left} -> {right}" if left else right


def format_signature(signature: Signature) -> str:
    """`m k, k n -> m n`."""
    left, right = (", ".join(map(_format_dims, tensors)) for tensors in (signature.operands, signature.results))
    return f"{left} -> {right}" if left else f"-> {right}"


def _format_dims(dims: Dims) -> str:
    words = ["_" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims]
    return " ".join(words) or "."


# ---- the proof's numbers ---------------------------------------------------------------------------------------------


def tried_in(text: str) -> dict[str, Tried]:
    """The numbers that stand in the file."""
    found = {}
    for line in text.splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if line.startswith("| `"):
            count, sizes = cells[5].strip(), cells[6].split()
            found[cells[1].strip(" `")] = Tried(
                int(count) if count.isdigit() else 0, tuple(map(int, filter(str.isdigit, sizes)))
            )
    return found


def tried_by_proof(folder: Path) -> dict[str, Tried]:
    """The numbers that the proof has left behind."""
    made = {path.name.removesuffix(".json"): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {op: Tried(one["samples"], tuple(one["sizes"])) for op, one in made.items()}


def differing(old: dict[str, Tried], new: dict[str, Tried]) -> list[str]:
    """What the proof tried otherwise than the file says, in sentences."""
    found = []
    for op, now in new.items():
        before = old.get(op, Tried(0, ()))
        is_near = abs(now.samples - before.samples) <= SLACK * max(before.samples, 10)
        if not is_near or not {*now.sizes} <= {*before.sizes}:
            found.append(f"{op}: {now.samples} calls on axes {now.sizes}, not {before.samples} on {before.sizes}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes docs/rules.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is out of date")
    is_check = parser.parse_args().check
    text = FILE.read_text() if FILE.exists() else ""
    old, new = tried_in(text), tried_by_proof(PROOF)
    if not is_check:
        FILE.write_text(table({**old, **new}))
        return 0
    wrong = differing(old, new) + ([] if table(old) == text else [f"{FILE.name} is not what the rules say"])
    if wrong:
        print("\n".join(wrong), "run `make rules-table`, and look at what changed", sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
