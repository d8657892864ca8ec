"""The examples of README.md and docs/writing-rules.md run, and print what stands beside them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WRITING, README = ROOT / "docs" / "writing-rules.md", ROOT / "README.md"


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a file in a language, "" for those without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def run(*command: str, at: Path) -> str:
    """Standard output of a Python process in this folder."""
    places = os.pathsep.join([str(at), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command], cwd=at, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": places}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the walk-through, where Python finds it, with the metadata that an installer makes of its toml."""
    folder = tmp_path_factory.mktemp("package")
    for text in (*blocks(WRITING, "python"), *blocks(WRITING, "toml")):
        name = text.split("\n")[0].removeprefix("# ")
        (folder / name).write_text(text)
    group, entry = re.findall(r'entry-points\."(.+)"\]\n(.+)', (folder / "pyproject.toml").read_text())[0]
    info = folder / "my_ops-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-ops\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry.replace(chr(34), '')}\n")
    return folder


def test_the_command_of_the_walk_through_prints_what_stands_there(package: Path) -> None:
    """Found by its entry point alone."""
    (shown,) = (text for text in blocks(WRITING, "") if text.startswith("$ autoparallel-fp8 "))
    command, _, wanted = shown.partition("\n")
    arguments = re.findall(r'"[^"]*"|\S+', command.removeprefix("$ autoparallel-fp8 "))
    found = run("-m", "autoparallel_fp8.cli", *(text.strip('"') for text in arguments), at=package)
    assert found == wanted


def test_the_plan_of_the_walk_through(package: Path) -> None:
    """Strict, so that forward and backward op have rules; the answer is proven."""
    assert "proven optimal" in run("plan.py", at=package)


def test_the_ops_of_the_walk_through_are_split_right(package: Path) -> None:
    """Each row of both rules gives the unsplit result, forward and backward."""
    code = """
import torch
from autoparallel_fp8.rules.plugins import load_plugins
from split_ops import Sample, kind_of, problems
load_plugins()
ops = torch.ops.my_ops
x, grad, gain = (torch.randn(shape, dtype=torch.float64) for shape in ((8, 12), (8, 12), (12,)))
for op, args in ((ops.gated.default, (x, gain)), (ops.gated_backward.default, (grad, x, gain))):
    sample = Sample(op, args, rtol=1e-9, atol=1e-9)
    kind = kind_of(sample, (2,))
    print(len(kind.options), list(problems(sample, kind, (2,))))
got = torch.autograd.gradcheck(ops.gated, (x.requires_grad_(), gain.requires_grad_()))
print(got)
"""
    path = package / "held.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n{code}")
    assert run("held.py", at=package) == "4 []\n4 []\nTrue\n"


def test_the_example_of_one_op_prints_what_stands_there(tmp_path: Path) -> None:
    """In README, under its code."""
    (code,) = (text for text in blocks(README, "python") if "import options" in text)
    text = README.read_text()
    shown = re.match(r"\n*```\n(.*?)```", text[text.index(code) + len(code) + len("```") :], re.DOTALL)
    assert shown is not None
    (tmp_path / "example.py").write_text(code)
    assert run("example.py", at=tmp_path) == shown[1]
