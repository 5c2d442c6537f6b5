"""The campaign for a card runs on the CPU, shortened; a part that is done is not run again."""

import json

import pytest

from benchmarks.gpu_campaign.__main__ import main
from benchmarks.gpu_campaign.contestants import CONTESTANTS


def test_a_part_is_measured_and_written_and_left_out_afterwards(tmp_path, capsys) -> None:
    arguments = ["--device", "cpu", "--smallest", "--minutes", "0.001", "--folder", str(tmp_path)]
    for part in ("versions", "throughput"):
        main([*arguments, "--only", part, "--commit", "abc"])
    (written,) = tmp_path.glob("*.json")
    found = json.loads(written.read_text())
    assert found["commit"] == "abc"
    rows = {row["name"]: row for row in found["throughput"]["rows"]}
    assert rows.keys() == CONTESTANTS.keys()
    ran = {name for name, row in rows.items() if "remark" not in row}
    assert {name for name in CONTESTANTS if "Penstock" in name or name == "plain torch"} <= ran
    assert all(rows[name]["step_ms"] > 0 and rows[name]["ratio"] > 0 for name in ran)
    table = written.with_suffix(".md").read_text()
    assert all(name in table for name in CONTESTANTS)
    capsys.readouterr()
    main([*arguments, "--only", "throughput"])  # goes on where it was
    assert "throughput:" not in capsys.readouterr().out
    assert json.loads(written.read_text())["throughput"] == found["throughput"]


def test_without_a_card_it_says_how_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cuda:99"])
    assert "--device cpu --smallest shows that it runs" in capsys.readouterr().err
