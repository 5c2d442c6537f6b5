"""What users install: both wheels, in an environment and a folder that have nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TWO_LINES = """
import penstock
import torch
from torch import nn

layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
inputs, targets = torch.randn(32, 8), torch.randint(4, (32,))
pipe = penstock.Pipeline(layers, num_stages=2, num_microbatches=8, loss=nn.CrossEntropyLoss())
loss = pipe.train_step(inputs, targets)
print(f"loss {float(loss):.3f}, {sum(p.grad is not None for p in pipe.parameters())} gradients")
"""
MODEL = """
import torch
from torch import nn

def example():
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return layers, torch.randn(32, 8), torch.randint(4, (32,)), nn.CrossEntropyLoss()
"""


class Installed:  # a fresh environment, and an empty folder in which its commands run
    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "empty", folder / "venv" / "bin"
        self.folder.mkdir()
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        unlike = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PIP_CONSTRAINT")
        kept = {name: value for name, value in os.environ.items() if name not in unlike}
        self.environment = kept | {"OMP_NUM_THREADS": "1"}

    def install(self, *what: str) -> None:
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        self.run("python", "-m", "pip", "install", "--quiet", *constraints, *what)

    def run(self, program: str, *words: str, code: int = 0) -> str:
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
        done = subprocess.run(
            [self.bin / program, *words], cwd=self.folder, env=self.environment, **options
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


def wheel(folder: Path, source: Path) -> str:
    """Build a wheel of a copy of its source, so that nothing is left there; return its path."""
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "tests", "benchmarks", "runs")
    shutil.copytree(source, copy := folder / f"source-{source.name}", ignore=left_out)
    options = ("--quiet", "--no-deps", "-w", str(folder))
    command = [sys.executable, "-m", "pip", "wheel", *options, str(copy)]
    subprocess.run(command, check=True, cwd=folder)
    name = "penstock_recipes" if source.name == "recipes" else "penstock-"
    (path,) = folder.glob(f"{name}*.whl")
    return str(path)


@pytest.mark.slow
def test_both_packages_work_from_their_wheels_alone(tmp_path: Path) -> None:
    library, recipes = wheel(tmp_path, ROOT), wheel(tmp_path, ROOT / "recipes")
    installed = Installed(tmp_path)

    installed.install(library)
    said = installed.run("penstock", "train", "digits", code=2)
    assert said == "penstock: `penstock train` comes with penstock-recipes; " + (
        "pip install penstock-recipes\n"
    )
    assert "4 gradients" in installed.run("python", "-c", TWO_LINES)
    (installed.folder / "mymodel.py").write_text(MODEL)
    assert "EQUAL" in installed.run("penstock", "check", "mymodel:example")
    plan = installed.run("penstock", "plan", "mymodel:example", "--cluster", "h100")
    assert "3 layers as 1 stage x 1 replica on 1 rank" in plan

    installed.install(recipes)
    assert "digits_amoebanet\n" in installed.run("penstock", "recipes")
    short = ("--set", "train.epochs=1", "--set", "model.width=4")
    installed.run("penstock", "train", "digits", *short)
    assert (installed.folder / "runs" / "digits-1" / "report.html").is_file()
