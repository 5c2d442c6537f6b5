"""The source archive holds the package, and no tests: they need all of the repository."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def test_the_source_archive_holds_the_package_and_no_tests(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("penstock", "tests"):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skipped)
    command = [sys.executable, "-c", BUILD, "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert not [name for name in names if name.startswith("tests")]
    kinds = ("*.py", "py.typed", "page.*", "presets/*/*.toml")
    ours = [path for kind in kinds for path in (tmp_path / "penstock").rglob(kind)]
    assert {path.relative_to(tmp_path).as_posix() for path in ours} <= names
