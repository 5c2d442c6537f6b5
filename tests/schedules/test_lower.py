"""Lowering: the same schedule is made and proved once in a process."""

from penstock.schedules import Family, Schedule, one_f_one_b
from penstock.schedules.lower import Lowering, Mode, lower


def test_what_is_lowered_twice_is_looked_up() -> None:
    calls: list[int] = []

    def build(num_stages: int, num_microbatches: int) -> Schedule:
        calls.append(num_microbatches)
        return one_f_one_b(num_stages, num_microbatches)

    def how(*recompute: int) -> Lowering:
        return Lowering(family=Family("mine", build), ranks=(0, 1), recompute=recompute)

    kept = lower(how(), 3)
    assert lower(how(), 3) is kept and calls == [3]
    assert lower(how(0), 3) != kept and lower(how(), 2) != kept
    assert lower(how(), 3, Mode.EVAL) != kept and calls == [3, 3, 2, 3]


def test_what_cannot_be_hashed_is_lowered_again() -> None:
    how = Lowering(family=one_f_one_b, ranks=(0, 1), recompute={0})
    assert lower(how, 2) == lower(how, 2)
    assert lower(how, 2) is not lower(how, 2)
