"""What of the paper's tables is predicted, and the parts that predict it."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from benchmarks.gpipe_paper import breakdown, largest, throughput
from benchmarks.gpipe_paper.cells import MET, MISSED, Cell, Compared, targets_line
from benchmarks.gpipe_paper.cuts import as_many_blocks, by_flops
from benchmarks.gpipe_paper.models import amoebanet, deepened, transformer
from benchmarks.gpipe_paper.orders import agree, crossover_line, discordant
from benchmarks.gpipe_paper.paper_step import Setting, Step, paper_schedule
from benchmarks.gpipe_paper.planned import planned
from benchmarks.gpipe_paper.published import THROUGHPUT_GPU, THROUGHPUT_TPU
from benchmarks.gpipe_paper.throughput import OVER_K_2, TABLE_2, TABLE_3
from penstock import Cluster


@cache
def transformers() -> tuple[Cell, ...]:
    return tuple(throughput.transformers())


@cache
def amoebanets() -> tuple[Cell, ...]:
    return tuple(throughput.amoebanets())


def missed(cells: Sequence[Cell]) -> list[str]:
    return [f"{cell.table} {cell.model} {cell.what}" for cell in cells if cell.verdict == MISSED]


def of_table(cells: Sequence[Cell], table: str) -> list[Cell]:
    return [cell for cell in cells if cell.table == table]


def aligned(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Name the cells of one K or one M that are in another order than published."""
    return [
        (a.what, b.what)
        for a, b in discordant(cells)
        if set(a.what.split(", ")) & set(b.what.split(", "))
    ]


def test_the_papers_schedule_recomputes_everywhere_and_runs_back_from_the_last_micro_batch() -> (
    None
):
    schedule = paper_schedule(2, 2, ())
    assert [" ".join(map(str, program)) for program in schedule.programs] == [
        "0f0 0f1 0R1 0B1 0R0 0B0",
        "1f0 1f1 1R1 1B1 1R0 1B0",
    ]


def test_a_deepened_profile_is_that_of_the_deeper_model() -> None:
    deep, shallow = transformer(4).profile((1,)), transformer(3).profile((1,))
    assert deepened(shallow, 1).sizes == deep.sizes
    assert deepened(shallow, 1).layers == deep.layers
    assert deepened(shallow, 1).weights == deep.weights
    assert deepened(shallow, 1).spans == deep.spans


def test_blocks_are_dealt_out_as_in_the_published_configuration() -> None:
    profile = transformer(13).profile((1,))
    assert as_many_blocks(profile, 2) == (8, 8)  # embedding and 7; 6, norm and head
    assert as_many_blocks(profile, 1) == (16,)
    headless = transformer(13, has_head=False).profile((1,))
    assert as_many_blocks(headless, 2) == (8, 6)
    assert headless.sizes[0].loss is None


def test_table_1_of_transformers_is_predicted() -> None:
    cells = largest.transformers()
    assert not missed(cells)
    assert sum(cell.verdict == MET for cell in cells) == 5 + 4


def test_tables_2_and_3_are_predicted_of_transformers_where_their_settings_are_known() -> None:
    cells = transformers()
    assert not missed(cells)
    assert [(c.table, c.what) for c in cells if c.verdict == MET] == [
        *((TABLE_2, "K = 4, M = 1"), (TABLE_2, "K = 8, M = 1"), (OVER_K_2, "K = 4, M = 32")),
        *((OVER_K_2, "K = 8, M = 32"), (TABLE_3, "K = 4, M = 32"), (TABLE_3, "K = 8, M = 32")),
    ]


def test_transformers_gain_from_devices_and_micro_batches_in_the_papers_order() -> None:
    assert not aligned(of_table(transformers(), TABLE_2))
    assert not discordant(of_table(transformers(), TABLE_3))


def test_no_batch_lets_a_pipeline_exceed_its_bound_as_the_paper_has_it_at_m_4() -> None:
    of_m_4 = [c for c in of_table(transformers(), TABLE_2) if c.what.endswith("M = 4")]
    for cell, bound in zip(of_m_4, (1.60, 2.29, 2.91), strict=True):
        assert cell.published is not None
        assert cell.published > bound


def test_computation_is_predicted_within_its_target() -> None:
    cells = breakdown.breakdown(has_amoebanet=False)
    assert cells[0].verdict == MET
    shares = [c.predicted for c in cells if c.what != breakdown.RATIO and c.predicted is not None]
    assert sum(shares) == pytest.approx(1)


def test_the_transformer_of_8_devices_fits_as_planned() -> None:
    found = planned(8)
    assert not missed(found.cells)
    fullest = next(cell for cell in found.cells if cell.what == "fullest device, GiB")
    assert fullest.predicted is not None
    assert fullest.predicted < 16


@pytest.mark.slow
def test_the_transformer_of_128_devices_fits_as_planned() -> None:
    assert not missed(planned(128).cells)


@pytest.mark.slow
def test_amoebanets_are_predicted_where_micro_batches_are_many() -> None:
    cells = amoebanets()
    assert not missed(cells)
    assert sum(cell.verdict == MET for cell in cells) == 4
    assert not aligned(of_table(cells, TABLE_2))
    assert not discordant(of_table(cells, TABLE_3))


@pytest.mark.slow
def test_which_model_gains_more_is_predicted_with_many_micro_batches() -> None:
    for table, wanted in ((TABLE_2, "6 of 8"), (TABLE_3, "2 of 2")):
        both = [of_table(cells, table) for cells in (amoebanets(), transformers())]
        assert wanted in crossover_line(*both)


@pytest.mark.slow
def test_an_amoebanet_is_cut_by_flops_with_all_its_layers() -> None:
    profile = amoebanet(3, 32, image=64).profile((2,))
    partition = by_flops(profile, 4)
    assert sum(partition) == len(profile.layers)
    step = Step(Setting(profile, Cluster.load("p100-pcie-8"), partition, 4, 8))
    assert step.samples_per_s > 0
    assert len(step.activation_bytes) == len(partition)


def cell(published: float, predicted: float, target: float = 0.1, **others: Any) -> Cell:
    told = {"published": published, "predicted": predicted, "target": target, **others}
    return Cell(table="t", model="m", what="w", **told)


def test_a_target_counts_both_ways() -> None:
    assert [cell(2, x).verdict for x in (1.79, 1.81, 2.19, 2.21)] == [MISSED, MET, MET, MISSED]
    assert cell(2, 2.0, target=0.0).verdict == MET
    assert cell(0.5, 0.57, 0.08, by=Compared.BY_DIFFERENCE).verdict == MET
    assert targets_line([cell(1, 1), cell(1, 2)]) == "Targets: 1 of 2 are met; missed: m w."


def test_orders_agree_where_both_rise() -> None:
    assert agree(cell(1, 1), cell(2, 1.1))
    assert not agree(cell(1, 1), cell(2, 0.9))


def test_published_tables_are_whole() -> None:
    assert [len(cells) for cells in THROUGHPUT_TPU.values()] == [9, 9]
    assert [len(cells) for cells in THROUGHPUT_GPU.values()] == [3, 3]
