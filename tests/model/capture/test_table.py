"""The documentation's table has a row for every model under test, and says what the laws say."""

from pathlib import Path

import pytest

from tests.model.capture.any_models.lists import EVERY, REFUSED
from tests.model.capture.any_models.made import AnyModel
from tests.model.capture.any_models.odd import CHAINS
from tests.model.capture.any_models.table import facts

ROWS = {
    cells[0]: cells[1:]
    for line in (Path(__file__).parents[3] / "docs" / "models.md").read_text().splitlines()
    if line.startswith("| ")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def test_every_model_has_its_row() -> None:
    names = [model.name for model in (*EVERY, *REFUSED)]
    assert len(set(names)) == len(names) and set(ROWS) - {"model", "---"} == set(names)


@pytest.mark.parametrize("model", [pytest.param(m, id=m.name) for m in EVERY])
def test_it_says_what_the_laws_check(model: AnyModel) -> None:
    training, evaluation = ROWS[model.name][2:4]
    assert {training, evaluation} <= ({"bit", "close"} if model.rounding else {"bit"})
    assert model.note in ROWS[model.name][-1] and model.rounding in ROWS[model.name][-1]


@pytest.mark.parametrize("model", [pytest.param(m, id=m.name) for m in CHAINS])
def test_it_says_what_a_capture_gives(model: AnyModel) -> None:
    blocks, parameters, _, _, *crossing, _ = ROWS[model.name]
    assert [blocks, parameters, *crossing] == facts(model)
