"""The scripts of docs/examples: the same lines, and files, in one process and in two."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import ROOT

TOGETHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPTS = {
    "transformers_trainer.py": ("accelerate", ["out"], "accuracy"),
    "peft_adapters.py": ("peft", ["out", "lora"], "step 3"),
    "peft_adapters.py ia3": ("peft", ["out", "ia3"], "step 3"),
    "accelerate_loop.py": ("accelerate", [], "step 5"),
    "lightning_module.py": ("lightning", [], "validation"),
    "trl_sft.py": ("trl", ["out"], "validation"),
    "tensorboard_log.py": ("tensorboard", [], "step 5"),
}
"""Scripts: the package that each needs, its arguments, and how a line of its begins."""


SAID = r"^(?:step|accuracy|validation).*$"


def lines_of(
    launcher: tuple[str, ...], script: str, words: list[str], folder: Path, said: str = SAID
) -> list[str]:
    folder.mkdir()
    path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, str(ROOT / "docs" / "examples" / script), *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return re.findall(said, done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_the_same_in_one_process_and_in_two(name: str, tmp_path: Path) -> None:
    package, words, beginning = SCRIPTS[name]
    pytest.importorskip(package, reason=f"{package} is not installed")
    script = name.partition(" ")[0]
    alone = lines_of((), script, words, tmp_path / "one")
    together = lines_of(TOGETHER, script, words, tmp_path / "two")
    assert any(line.startswith(beginning) for line in alone)
    assert together == alone
    if script == "trl_sft.py":
        expected, found = (
            weights_of(tmp_path / name / "out" / "trained") for name in ("one", "two")
        )
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.slow
def test_zero3_keeps_the_bytes_of_fsdp2(tmp_path: Path) -> None:
    script, said = "zero3_beside_fsdp2.py", r"^(?:plain|FSDP2|zero3): .*$"
    plain, theirs, ours = lines_of(TOGETHER, script, [], tmp_path / "two", said)
    assert ours.split()[1:3] == theirs.split()[1:3] == ["264,704", "bytes,"]
    assert plain.endswith("529,408 bytes, differs by 0.0e+00")
    assert float(ours.split()[-1]) < 1e-6
    page = (ROOT / "docs" / "with_x.md").read_text()
    assert '| `sharding="zero3"` | 264,704 |' in page and "| FSDP2 | 264,704 |" in page


@pytest.mark.parametrize(
    ("page", "script"),
    [
        ("with_transformers.md", "transformers_trainer.py"),
        ("with_peft.md", "peft_adapters.py"),
        ("with_others.md", "accelerate_loop.py"),
        ("with_others.md", "lightning_module.py"),
        ("with_others.md", "trl_sft.py"),
        ("with_others.md", "tensorboard_log.py"),
    ],
)
def test_the_code_of_a_page_is_that_of_its_script(page: str, script: str) -> None:
    code = (ROOT / "docs" / "examples" / script).read_text()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert code in blocks
