"""Published steps are predicted as well as today: the bounds are no goal."""

import pytest

from benchmarks.published import alpa_rows, llama_rows, megatron_rows
from benchmarks.published.layouts import Layout
from benchmarks.published.main import Pair, ordered, summary

TODAY = {
    # one device of a stage: no collective
    ("Llama-7B", "H800", "full", Layout(1, 4, 8, 1)): (0.88, 1.0),
    ("Llama-7B", "A800", "ours", Layout(1, 4, 8, 1)): (1.02, 1.09),
    # stages of two hosts and a half, and of a whole one
    ("Llama-175B", "H800", "ours", Layout(4, 6, 8, 5)): (0.97, 1.04),
    ("Llama-175B", "H800", "ours", Layout(4, 8, 12, 2)): (0.96, 1.04),
    # slices of positions
    ("Llama-175B", "H800", "no", Layout(2, 24, 4, 2, 2)): (0.95, 1.03),
}
"""Bounds of predicted over measured seconds, true today."""


SLOW = "Llama-175B"
"""Its rows take several times as long as those of the smaller model."""


@pytest.mark.parametrize(
    ("key", "bounds"),
    [
        pytest.param(*case, id=str(case[0][-1]), marks=[pytest.mark.slow] * (SLOW in case[0]))
        for case in TODAY.items()
    ],
)
def test_published_layouts_are_predicted_within_todays_bounds(
    key: tuple[str, str, str, Layout], bounds: tuple[float, float]
) -> None:
    found = [
        row
        for row in llama_rows.rows()
        if (row["model"], row["hardware"], row["ckpt"], row.layout) == key
    ]
    assert found
    for row in found:
        assert bounds[0] < row.predicted_s() / row.measured_s < bounds[1]


def test_rows_tell_which_stages_pass_hosts() -> None:
    rows = [row for row in llama_rows.rows() if row["table"] == "fig9"]
    passing = {row.number("gpus") for row in rows if row.layout.on_rank > 8}
    assert {row.number("gpus") for row in rows if row.passes_hosts} == passing
    assert passing == {256, 240, 160, 144, 120}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "bounds"), [("18.4B", (0.88, 0.98)), ("145.6B", (0.85, 0.95))])
def test_gpt_of_megatron_is_predicted_within_todays_bounds(
    model: str, bounds: tuple[float, float]
) -> None:
    (row,) = (row for row in megatron_rows.rows() if row.fields["model"] == model)
    assert bounds[0] < row.predicted_s() / row.measured_s < bounds[1]


@pytest.mark.slow
def test_gpt_of_alpa_recomputes_and_is_predicted_within_todays_bounds() -> None:
    (row,) = (row for row in alpa_rows.rows() if (row.devices, row.system) == (1, "Alpa"))
    predicted = row.predicted_tflops()
    assert predicted is not None
    assert 0.92 < predicted / row.measured_tflops < 1.05


def test_pairs_that_are_predicted_alike_are_not_in_order() -> None:
    pairs = [Pair(1.0, 2.0), Pair(2.0, 2.0), Pair(2.0, 5.0), Pair(4.0, 3.0)]
    assert ordered(pairs) == (3, 5)
    assert summary("some", pairs[:2])["error"] == 0.5
