"""The campaign for a card runs on the CPU, shortened; a part that is done is not run again."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu_campaign import graphs
from benchmarks.gpu_campaign.__main__ import main
from benchmarks.gpu_campaign.contestants import CONTESTANTS, Work
from benchmarks.gpu_campaign.measure import kernels_ms
from benchmarks.gpu_campaign.parts import PARTS
from tests.pretend_devices.install import pretended_devices

ON_CPU = ["graphs", "nccl", "throughput", "buckets", "precision", "compile", "calibration"]
"""Parts that measure here what they do on a card; the others start programs with tests."""
QUICK = ["graphs", "calibration"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the quick parts, in one run."""
    return _run(tmp_path_factory.mktemp("campaign"), QUICK)


def _run(folder: Path, parts: list[str]) -> Path:
    main([*_arguments(folder), "--minutes", "15", "--commit", "abc", "--only", *parts])
    return folder


def _arguments(folder: Path) -> list[str]:
    return ["--device", "cpu", "--smallest", "--folder", str(folder)]


def _rows(folder: Path) -> dict[str, dict[str, Any]]:
    (written,) = folder.glob("*.json")
    found = json.loads(written.read_text())
    assert found["commit"] == "abc"
    parts = [part for part in ON_CPU if part in found]
    return {part: {row["name"]: row for row in found[part]["rows"]} for part in parts}


def check_figures(rows: dict[str, dict[str, Any]]) -> None:
    """See that every row has its figures and no error."""
    every = [(part, row) for part, of_part in rows.items() for row in of_part.values()]
    assert [(part, row) for part, row in every if "error" in row] == []
    peers = ("torchgpipe", "torch.dist")
    unmeasured = [
        row
        for part, row in every
        if not (part == "throughput" and row["name"].startswith(peers))
        and not all(row[key] > 0 for key in _TIMES.get(part, ("step_ms",)))
    ]
    assert unmeasured == []


def test_parts_leave_figures_and_no_error(folder: Path) -> None:
    rows = _rows(folder)
    assert [*rows] == QUICK
    check_figures(rows)
    assert {"product bfloat16, 32", "a copy to the host"} <= rows["calibration"].keys()
    assert all(row["remark"] == "no graphs on cpu" for row in rows["graphs"].values())


@pytest.mark.slow
def test_every_other_part_leaves_figures_and_no_error(tmp_path: Path) -> None:
    others = [part for part in ON_CPU if part not in QUICK]
    rows = _rows(_run(tmp_path, others))
    assert [*rows] == others
    check_figures(rows)
    assert rows["throughput"].keys() == CONTESTANTS.keys()
    assert rows["nccl"]["Penstock, 2 processes, 1F1B"]["equal_bits"]
    assert all(abs(r["first_loss"] - r["last_loss"]) > 0 for r in rows["precision"].values())
    assert [row["num_graphs"] > 0 for row in rows["compile"].values()] == [True, False] * 3


_TIMES = {
    "calibration": (),
    "graphs": ("eager_step_ms", "eager_host_ms"),
    "buckets": ("during_backward_ms", "after_backward_ms"),
    "compile": ("step_ms", "first_step_s"),
}
"""Figures of the rows of a part, if not the time of a step alone."""


def test_a_part_that_is_done_is_left_out_and_the_table_has_all(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*_arguments(folder), "--only", "graphs", "--commit", "abc"])
    said = capsys.readouterr().out
    assert "graphs:" not in said
    assert all(name in said for part in _rows(folder).values() for name in part)


def test_a_part_that_takes_too_long_is_killed_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu_campaign.__main__.GRACE_S", 0.0)
    main([*_arguments(tmp_path), "--only", "graphs", "--minutes", "0.001", "--commit", "abc"])
    (written,) = tmp_path.glob("*.json")
    part = json.loads(written.read_text())["graphs"]
    assert not part["is_whole"]
    assert part["rows"][-1]["error"].startswith("ended with -9")


class Numbers(Work):
    """Layers of numbers: a pretended GPU runs what it captures, on inputs with no values yet."""

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(self.width, self.width), nn.Dropout(self.dropout))
        layers = [first, nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(16, 16), nn.Tanh()]
        return nn.Sequential(*layers).to(self.device)

    def words(self) -> Tensor:
        drawn = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, self.width, generator=drawn).to(self.device)


@pytest.mark.parametrize("spoilt", [False, True])
def test_graphs_are_compared_with_eager_steps(
    spoilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 0)
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr("benchmarks.gpu_campaign.contestants.loss", nn.functional.mse_loss)
    cases = {name: case for name, case in graphs.CASES.items() if name.endswith("recompute")}
    monkeypatch.setattr(graphs, "CASES", cases)
    if spoilt:  # by a graph whose random numbers are those of its first replay
        seed = "penstock.runtime.graphs.GraphGenerators.seed"
        monkeypatch.setattr(seed, lambda self, streams: None)
    with pretended_devices(1):
        work = Numbers.smallest(torch.device("cuda", 0))
        (row,) = graphs.rows(work, time.monotonic() + 60)
    assert "error" not in row and "remark" not in row, row
    assert row["equal_bits"] is not spoilt
    assert all(row[key] > 0 for key in ("step_ms", "host_ms", "eager_step_ms"))


def test_kernels_of_a_cpu_are_none() -> None:
    model = nn.Linear(2, 2)
    step = lambda: model(torch.ones(1, 2)).sum().backward()  # noqa: E731
    assert kernels_ms(model, step, torch.device("cpu")) is None


def test_every_part_has_a_share_of_the_minutes() -> None:
    assert sum(part.share for part in PARTS.values()) == pytest.approx(1.0)


def test_without_a_card_it_says_how_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cuda:99"])
    assert "--device cpu --smallest shows that it runs" in capsys.readouterr().err
