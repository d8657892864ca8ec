"""Run mypy over the package as it is installed: a built wheel, unpacked into a temporary folder.

mypy does not follow setuptools' package-dir mapping (rules/ -> autoparallel_fp8/rules): it must see the real layout.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*build, "--wheel-dir", folder, str(ROOT)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        unpacked = Path(folder) / "site"
        ZipFile(wheel).extractall(unpacked)
        config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        return subprocess.run(
            [sys.executable, "-m", "mypy", *config, "-p", "autoparallel_fp8"], cwd=unpacked
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
