"""Any module, cut at random places, computes what it computes whole, to the bit."""

from collections.abc import Iterator

import pytest

from penstock.model.capture.inputs import EVERYWHERE, ROUTED
from tests.model.capture.any_models.lists import EVERY
from tests.model.capture.any_models.made import AnyModel
from tests.model.capture.any_models.odd import CHAINS
from tests.model.capture.running import (
    WAYS,
    Found,
    Way,
    assert_close,
    assert_equal,
    run,
    whole,
)

FEW = ["gpt2", "t5", "whisper, layers dropped", "resnet", "unet", "branching", "in place"]
FEW += ["albert", "high resolution", "labels of classes"]
"""What differs most, for every run beside the small ones, in one of the few ways in turn."""
SLOW = ["resnet", "albert", "high resolution", "labels of classes"]
"""Of these, what quick runs of small models do too: one block called again, settings made in the
first forward, branches.
"""
FEW_WAYS = (WAYS[1], WAYS[2])
OF_ROUTED = [way for way in WAYS if way.inputs == ROUTED]
OF_GIVEN = [way for way in WAYS if way.inputs == EVERYWHERE]


def ways_of(number: int, model: AnyModel) -> set[Way]:
    """Return all ways for what differs most; of each kind of inputs one in turn for the others."""
    turns = {OF_ROUTED[number % len(OF_ROUTED)], OF_GIVEN[number % len(OF_GIVEN)]}
    return set(WAYS) if model.name in FEW else set(FEW_WAYS) if model in CHAINS else turns


def pairs() -> Iterator[object]:
    for number, model in enumerate(EVERY):
        few = (model.name in FEW and model.name not in SLOW) or model in CHAINS
        for way in WAYS:
            if way not in ways_of(number, model) or (model.routed and way.inputs != ROUTED):
                continue  # the latter is refused: see test_any_module.py
            marks = [] if few and way == FEW_WAYS[number % 2] else [pytest.mark.slow]
            yield pytest.param(model, way, id=f"{model.name}-{way}", marks=marks)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a first block
@pytest.mark.parametrize(("model", "way"), list(pairs()))
def test_a_model_computes_the_same_cut_and_whole(model: AnyModel, way: Way) -> None:
    found, expected = run(model, way), whole(model)
    assert_alike(model, found, expected)


def assert_alike(model: AnyModel, found: Found, expected: Found) -> None:
    """Compare bits; gradients that are rounded otherwise, where the model says why."""
    compare = assert_close if model.rounding else assert_equal
    assert_equal(found.outputs, expected.outputs)
    compare(found.in_evaluation, expected.in_evaluation)
    compare(found.in_training, expected.in_training)
