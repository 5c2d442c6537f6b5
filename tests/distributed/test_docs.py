"""The code in the guide to processes runs, and says the same however many processes there are."""

import re
from pathlib import Path

from tests.distributed.launch import ROOT, run


def test_the_guides_code_gives_the_same_losses_in_one_process_and_in_two(tmp_path: Path) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "processes.md").read_text(), re.DOTALL
    )
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks))
    outputs = [run(world_size, [str(script)])[0].output for world_size in (1, 2)]
    lines = [[line for line in text.splitlines() if ": loss " in line] for text in outputs]
    assert len(lines[0]) == 9
    assert lines[0] == lines[1]
    assert all("utilisation" in text for text in outputs), "no breakdown was printed"
