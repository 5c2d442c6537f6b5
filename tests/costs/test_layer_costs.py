"""Prices: measured where that was done, a roofline's elsewhere; between sizes on a line."""

from dataclasses import replace

import pytest

from penstock.costs.layer_costs import layer_costs
from penstock.costs.records import AtSize, LayerSeconds
from penstock.errors import ConfigError
from tests.profiles import DEVICE, OTHER, at_size, profile, seconds

TWO = profile(at_size(4), at_size(8))


def taken(found: AtSize, number: int = 0) -> tuple[float, ...]:
    names = ("forward_s", "recompute_s", "backward_s", "input_s", "weight_s")
    return tuple(getattr(found.seconds(number), name) for name in names)


def of(found: LayerSeconds) -> tuple[float, ...]:
    return found.forward_s, found.recompute_s, found.backward_s, found.input_s, found.weight_s


@pytest.mark.parametrize("size", (4, 8))
def test_a_size_that_was_measured_has_its_own_numbers(size: int) -> None:
    found = layer_costs(TWO, DEVICE, size)
    at = at_size(size)
    assert [taken(found, n) for n in range(2)] == [of(seconds(size))] * 2
    assert found.values == at.values
    assert found.saved == at.saved
    assert found.layer(0).inner_bytes == 100 * size
    assert found.loss is not None
    assert found.loss.inner_bytes == 7 * size
    assert (found.layer(0).num_forward, found.layer(0).num_backward) == (2, 2)


@pytest.mark.parametrize("size", (1, 3, 5, 6, 7, 20))
def test_other_sizes_lie_on_the_line_through_the_two_nearest(size: int) -> None:
    found = layer_costs(profile(at_size(2), at_size(4), at_size(8)), DEVICE, size)
    assert taken(found, 1) == pytest.approx(of(seconds(size)))
    assert found.layer(1).left_bytes == 10 * size
    assert [value.num_bytes for value in found.values] == [4 * size, 8 * size, 64, 8 * size]
    assert found.loss is not None
    assert (found.loss.num_forward, found.loss.num_backward) == (2, 2)


def test_where_one_size_is_known_all_but_weights_and_operators_grows_with_it() -> None:
    found = layer_costs(profile(at_size(4)), DEVICE, 2)
    assert taken(found) == pytest.approx([s / 2 for s in of(seconds(4))])
    assert [value.num_bytes for value in found.values] == [8, 16, 64, 16]
    assert found.layer(0).num_forward == 2


def test_no_size_costs_less_than_nothing() -> None:
    steep = replace(at_size(4), kinds=(replace(at_size(4).kinds[0], seconds=seconds(-0.9)),))
    found = layer_costs(profile(steep, at_size(8)), DEVICE, 1)
    assert min(taken(found)) > 0
    falling = replace(at_size(8), kinds=(replace(at_size(8).kinds[0], seconds=seconds(1)),))
    assert layer_costs(profile(at_size(4), falling), DEVICE, 99).seconds(0).forward_s == 2


def test_busy_seconds_count_where_they_are_asked_for() -> None:
    assert layer_costs(TWO, DEVICE, 4, busy=True).seconds(0).forward_s == 1 + 9 * 4
    kinds = (replace(at_size(4).kinds[0], busy_seconds=None),)
    alone = profile(replace(at_size(4), kinds=kinds))
    assert layer_costs(alone, DEVICE, 4, busy=True).seconds(0).forward_s == 1 + 4


def test_operators_are_priced_on_another_device() -> None:
    found = layer_costs(TWO, OTHER, 4)
    assert taken(found) == (16, 16, 16, 8, 8)


def test_what_was_measured_takes_as_much_longer_elsewhere_as_a_roofline_says() -> None:
    measured = replace(TWO, measured_on=DEVICE.name)
    here, there = layer_costs(measured, DEVICE, 4), layer_costs(measured, OTHER, 4, like=DEVICE)
    for fast, slow in ((here.seconds(n), there.seconds(n)) for n in range(2)):
        assert slow.forward_s == pytest.approx(2 * fast.forward_s)
        assert slow.weight_s == pytest.approx(2 * fast.weight_s)


def test_what_was_not_measured_at_a_size_is_priced() -> None:
    mixed = profile(at_size(4, is_measured=False), at_size(8))
    assert taken(layer_costs(mixed, DEVICE, 4)) == (8, 8, 8, 4, 4)


@pytest.mark.parametrize(
    ("found", "size", "words"),
    [
        (TWO, 0, "microbatch_size=0"),
        (profile(at_size(4, is_measured=False), measured_on=None), 4, "for which device"),
        (
            profile(replace(at_size(4), values=at_size(4).values[:2]), at_size(8)),
            6,
            "other values between layers .* of 4 samples than for those of 8",
        ),
    ],
)
def test_what_cannot_be_priced_is_said(found: object, size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layer_costs(found, None, size)  # type: ignore[arg-type]


def test_a_profile_without_operators_says_that_it_holds_for_one_device_only() -> None:
    bare = at_size(4)
    kind = replace(bare.kinds[0], operators=())
    bare = replace(bare, kinds=(kind,), loss=None)
    assert layer_costs(profile(bare), DEVICE, 4).seconds(0).forward_s == 5
    with pytest.raises(ConfigError, match="measured on a, and its operators were not counted"):
        layer_costs(profile(bare), OTHER, 4)
