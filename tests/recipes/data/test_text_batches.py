"""Sampling by temperature and batches in tokens: laws of the plan, over many corpora."""

import io
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import ConfigError
from penstock_recipes.data.text import (
    MULTILINGUAL_BERT_TEMPERATURE,
    BatchPlan,
    Step,
    epoch_steps,
    language_shares,
    parts_by_length,
)
from penstock_recipes.data.text.sampling import epoch_samples, language_places
from tests.distributed.launch import run_python

LONGEST = 20
SAMPLE = st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST), st.integers(0, 3))
TEMPERATURE = st.sampled_from([0.5, 1.0, MULTILINGUAL_BERT_TEMPERATURE, 5.0, 100.0])
Corpus = tuple[Tensor, Tensor, BatchPlan]
COUNTS = st.lists(st.integers(0, 1000), min_size=1, max_size=8)


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    samples = draw(st.lists(SAMPLE, min_size=1, max_size=60))
    table = torch.tensor(samples, dtype=torch.int64)
    per_part = draw(st.integers(LONGEST, 5 * LONGEST))
    plan = BatchPlan(
        tokens_per_step=draw(st.integers(per_part, 4 * per_part)),
        tokens_per_part=per_part,
        temperature=draw(TEMPERATURE),
        seed=draw(st.integers(0, 5)),
    )
    return table[:, :2], table[:, 2], plan


def flat(steps: list[Step]) -> list[int]:
    return [n for step in steps for part in step for n in part.tolist()]


def padded_tokens(lengths_N2: Tensor, part: Tensor) -> int:
    return len(part) * int(lengths_N2[part].max())


@given(corpora(), st.integers(0, 3))
def test_an_epoch_holds_what_was_sampled_and_nothing_else(corpus, epoch) -> None:
    lengths_N2, languages_N, plan = corpus
    drawn = epoch_samples(
        languages_N,
        temperature=plan.temperature,
        num_places=len(languages_N),
        seed=plan.seed,
        epoch=epoch,
    )
    assert Counter(flat(epoch_steps(lengths_N2, languages_N, plan, epoch))) == Counter(
        drawn.tolist()
    )


@given(corpora())
def test_at_temperature_1_an_epoch_holds_every_sample_once(corpus) -> None:
    lengths_N2, languages_N, plan = corpus
    plan = replace(plan, temperature=1.0)
    assert sorted(flat(epoch_steps(lengths_N2, languages_N, plan, 0))) == list(
        range(len(languages_N))
    )


@given(corpora(), st.integers(0, 3))
def test_no_part_and_no_step_holds_more_tokens_than_it_may(corpus, epoch) -> None:
    lengths_N2, languages_N, plan = corpus
    for step in epoch_steps(lengths_N2, languages_N, plan, epoch):
        tokens = [padded_tokens(lengths_N2, part) for part in step]
        assert min(tokens) > 0 and max(tokens) <= plan.tokens_per_part
        assert sum(tokens) <= plan.tokens_per_step


@given(corpora())
def test_all_steps_but_the_last_have_all_their_parts(corpus) -> None:
    lengths_N2, languages_N, plan = corpus
    steps = epoch_steps(lengths_N2, languages_N, plan, 0)
    assert {len(step) for step in steps[:-1]} <= {plan.parts_per_step}
    assert 0 < len(steps[-1]) <= plan.parts_per_step


@given(corpora())
def test_a_part_takes_all_that_fits_in_order_of_length(corpus) -> None:
    lengths_N2, _, plan = corpus
    parts = parts_by_length(lengths_N2, plan.tokens_per_part)
    order = torch.cat(parts)
    assert sorted(order.tolist()) == list(range(len(lengths_N2)))
    longest = lengths_N2.amax(dim=1)[order]
    assert torch.equal(longest, longest.sort().values)
    for part, following in pairwise(parts):
        one_more = torch.cat([part, following[:1]])
        assert padded_tokens(lengths_N2, one_more) > plan.tokens_per_part


@given(corpora(), st.integers(0, 3))
def test_a_plan_is_the_same_at_every_call_and_draws_from_no_other_generator(corpus, epoch) -> None:
    lengths_N2, languages_N, plan = corpus
    before = torch.random.get_rng_state()
    first = epoch_steps(lengths_N2, languages_N, plan, epoch)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(1)
    again = epoch_steps(lengths_N2, languages_N, plan, epoch)
    assert [list(map(len, step)) for step in again] == [list(map(len, step)) for step in first]
    assert flat(again) == flat(first)


PLAN = """
import torch
from penstock_recipes.data.text import BatchPlan, epoch_steps
lengths = torch.arange(1, 401).reshape(200, 2) % 17 + 1
languages = (torch.arange(200) > 150).to(torch.int64)
plan = BatchPlan(tokens_per_step=300, tokens_per_part=100, seed=7)
steps = epoch_steps(lengths, languages, plan, epoch=3)
print([[part.tolist() for part in step] for step in steps])
"""


def test_another_process_makes_the_same_plan() -> None:
    done = run_python("-c", PLAN)
    here = io.StringIO()
    with redirect_stdout(here):
        exec(PLAN, {})
    assert done.output == here.getvalue() != "[]\n"


def test_epochs_and_seeds_differ() -> None:
    lengths_N2, languages_N = torch.ones(100, 2, dtype=torch.int64), torch.zeros(100).long()

    def order(seed: int, epoch: int) -> list[int]:
        plan = BatchPlan(tokens_per_step=10, tokens_per_part=10, seed=seed)
        return flat(epoch_steps(lengths_N2, languages_N, plan, epoch))

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_parts_of_all_lengths_share_a_step() -> None:
    lengths_N2 = torch.arange(1, 101)[:, None].expand(-1, 2)
    plan = BatchPlan(tokens_per_step=1000, tokens_per_part=100)
    steps = epoch_steps(lengths_N2, torch.zeros(100).long(), plan, 0)
    spans = [max(int(lengths_N2[p].max()) for p in s) - int(lengths_N2[s[0]].max()) for s in steps]
    assert max(spans) > 20


@given(COUNTS.filter(any), TEMPERATURE)
def test_usual_temperatures_have_the_bits_of_the_formula(counts, temperature) -> None:
    """A run that goes on has the shares that it began with."""
    assert pytest.approx(0.7) == 1 / MULTILINGUAL_BERT_TEMPERATURE
    raw = [(n / sum(counts)) ** (1 / temperature) if n else 0.0 for n in counts]
    assert language_shares(counts, temperature) == [weight / sum(raw) for weight in raw]


@pytest.mark.parametrize("temperature", [1e-3, 1e-9, 1e-300, 5e-324])
def test_a_low_temperature_takes_the_largest_languages_alone(temperature: float) -> None:
    assert language_shares([400, 0, 900, 300], temperature) == [0, 0, 1, 0]
    assert language_shares([7, 7, 6], temperature)[:2] == [0.5, 0.5]
    assert language_places([400, 900, 300], temperature, 1600) == [0, 1600, 0]


@pytest.mark.parametrize("temperature", [1e9, 1e308])
def test_a_high_temperature_takes_all_languages_alike(temperature: float) -> None:
    assert language_shares([1, 0, 10**9], temperature) == pytest.approx([0.5, 0, 0.5])


@given(COUNTS.filter(any), TEMPERATURE, st.integers(0, 500))
def test_places_add_up_and_differ_from_the_shares_by_less_than_one(
    counts: list[int], temperature: float, num_places: int
) -> None:
    places = language_places(counts, temperature, num_places)
    assert sum(places) == num_places
    for place, share in zip(places, language_shares(counts, temperature), strict=True):
        assert abs(place - Fraction(share) * num_places) < 1


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), TEMPERATURE)
def test_over_epochs_all_samples_of_a_language_are_seen_equally_often(
    languages: list[int], temperature: float
) -> None:
    languages_N = torch.tensor(languages)
    seen: Counter[int] = Counter(dict.fromkeys(range(len(languages)), 0))
    for epoch in range(5):
        drawn = epoch_samples(
            languages_N, temperature=temperature, num_places=len(languages), seed=1, epoch=epoch
        )
        seen.update(drawn.tolist())
    for language in set(languages):
        counts = {count for n, count in seen.items() if languages[n] == language}
        assert max(counts) - min(counts) <= 1


def plan_of(per_step: int, per_part: int, temperature: float = 1.0) -> BatchPlan:
    return BatchPlan(tokens_per_step=per_step, tokens_per_part=per_part, temperature=temperature)


NOTHING = torch.empty(0, 2).long(), torch.empty(0).long()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: parts_by_length(torch.tensor([[3, 3], [4, 12]]), 10),
            "sample 1 has 12 tokens",
        ),
        (lambda: plan_of(10, 11), "tokens_per_part=11 and tokens_per_step="),
        (lambda: plan_of(10, 0), "tokens_per_part=0 and tokens_per_step="),
        (lambda: plan_of(0, 0), "tokens_per_part=0 and tokens_per_step="),
        (lambda: plan_of(1, 1, 0.0), "temperature=0.0: must be a number above 0"),
        (lambda: plan_of(1, 1, -1.0), "temperature=-1.0: must be a number above 0"),
        (lambda: plan_of(1, 1, float("inf")), "temperature=inf: must be a number above 0"),
        (lambda: plan_of(1, 1, float("nan")), "temperature=nan: must be a number above 0"),
        (lambda: epoch_steps(*NOTHING, plan_of(10, 10), 0), "there is no pair to learn from in"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
