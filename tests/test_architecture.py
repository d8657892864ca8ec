"""The structure holds: stages import only stages before them, and the public names are the ones listed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import autoparallel_fp8

ROOT = Path(__file__).resolve().parent.parent

# One row a stage, in the order of the pipeline; a file may import from its own row and those above it. A file that
# needs more than its folder's row allows has one of its own, "folder.file".
STAGES = [
    ["errors", "cores", "files"],
    ["graph", "mesh", "problem", "timed", "plan_text"],
    ["layout", "parts", "indices", "mesh_candidates", "workers"],
    ["ops", "garbage", "modules", "module_state", "quiet", "progress", "progress_line"],
    ["iopddl"],
    ["integrations", "recipes", "models", "capture"],
    ["rules"],
    ["integrations.dtensor"],  # our rules, for people without a plan
    ["capture.recompute"],  # which ops are heavy, rules say
    ["factors"],
    ["reach", "own_scales"],
    ["fitting"],
    ["products", "redistribute"],
    ["expansion"],
    ["structure"],
    ["cost_models"],
    ["formulate", "constraints", "memory"],
    ["solver"],
    ["overlap", "live"],
    ["regrets", "plan_checks"],
    ["plan"],
    ["mesh_ranking"],
    ["assemble", "explain", "op_options"],
    ["plan_reading", "plan_diff"],
    ["by_hand", "compare"],
    ["tensor_styles"],
    ["shard_units"],
    ["export_notes", "export"],
    ["program", "lower", "shards", "shrink", "widen", "saving", "schedule", "items", "ordering", "late_reductions"],
    ["rank_steps", "in_memory"],
    ["rank"],
    ["reread"],
    ["placements", "materialize"],
    ["same_ranks", "same_model"],
    ["process_groups", "local_inputs", "held_tensors", "module_tree", "compiled", "runner", "same_inputs", "in_range"],
    ["parallel_module"],
    ["simulate", "simulate_plan", "reference", "inputs", "input_text"],
    ["verify", "settings", "infeasible", "same_choices"],
    ["report"],
    ["api"],
    ["restore", "mesh_search"],
    ["apply"],
    ["plan_argument", "solve_command", "cli_options"],
    ["cli", "operand_text"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(STAGES) for name in names}
LATE = {
    ("plan", "report"),
    ("api", "mesh_search"),
    ("mesh_ranking", "report"),
    ("plan", "explain"),
    ("plan", "verify"),
    ("plan", "restore"),
    ("plan", "apply"),
    ("plan", "same_model"),
    ("plan", "parallel_module"),
    ("plan", "export"),
    ("plan", "plan_diff"),
    ("plan_diff", "report"),
    ("compare", "report"),
    ("live", "explain"),
    ("explain", "report"),
    ("verify", "report"),
    ("op_options", "report"),
    ("rules", "op_options"),  # `rules.options`
}  # views of their own data, imported when asked for
NO_TORCH = ["problem", "timed", "iopddl", "formulate", "plan", "solver", "solve_command", "overlap", "regrets"]


def stage_of(*module: str) -> str:
    """The row of a module, given its path below the package: its own, or its folder's."""
    own = ".".join(module[:2])
    return own if own in LEVEL else module[0]


def stage_files() -> list[tuple[str, Path]]:
    inside = ROOT / "autoparallel_fp8"
    files = [(stage_of(*p.relative_to(inside).with_suffix("").parts), p) for p in inside.rglob("*.py")]
    files += [(folder, p) for folder in ("rules", "cost_models") for p in (ROOT / folder).glob("*.py")]
    return sorted((stage, p) for stage, p in files if stage != "__init__")


def imported(path: Path) -> set[str]:
    """Modules of this package that a file imports, as names below the package."""
    inside = ROOT / "autoparallel_fp8" in path.parents
    package = ["autoparallel_fp8", *path.relative_to(ROOT / "autoparallel_fp8" if inside else ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = [*base, *(node.module or "").split(".")] if node.module else base
            if full and full[0] == "autoparallel_fp8":
                found |= {stage_of(*full[1:], alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize(("stage", "path"), stage_files(), ids=lambda value: getattr(value, "name", value))
def test_a_stage_imports_only_stages_before_it(stage: str, path: Path) -> None:
    """Data flows one way: no file knows of a later stage."""
    assert stage in LEVEL, f"give {path.name} its row in STAGES"
    for name in imported(path):
        late = LEVEL.get(name, -1) > LEVEL[stage] and (stage, name) not in LATE
        assert not late, f"{path.name} imports {name}, a later stage"


@pytest.mark.parametrize("name", NO_TORCH)
def test_problem_and_plan_stages_do_not_know_torch(name: str) -> None:
    """From the problem on, everything is plain numbers."""
    for stage, path in stage_files():
        if stage == name:
            tree = ast.parse(path.read_text())
            modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
            modules |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
            assert not any(module.split(".")[0] == "torch" for module in modules), path.name


def test_only_solve_imports_the_solver() -> None:
    """PuLP is one file's business."""
    users = [
        path.name
        for _, path in stage_files()
        if "import pulp" in path.read_text() or "import highspy" in path.read_text()
    ]
    assert len(users) <= 1


def test_public_names() -> None:
    """What users may rely on; a new name is a decision."""
    assert sorted(autoparallel_fp8.__all__) == [
        "ApplyError",
        "AutoParallel",
        "AutoParallelError",
        "CaptureError",
        "CostError",
        "DeviceProfile",
        "InfeasibleError",
        "Plan",
        "PlanError",
        "ProblemError",
        "RuleError",
        "SolveError",
        "Topology",
        "UsageError",
        "options",
    ]


def test_importing_the_library_does_not_import_dynamo() -> None:
    """It takes ten times as long as all of this library: capture brings it, and what plans nothing does without."""
    code = "import sys, autoparallel_fp8, autoparallel_fp8.cli; print('torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
