"""Sample the languages of an epoch by their size and a temperature.

With n_l pairs in language l of n in all, a pair of language l is drawn with probability

    p_l  proportional to  (n_l / n) ** (1 / T)

T = 1 samples by size, so that languages with little text are hardly seen.  A high T samples all
languages equally often, so that small texts are repeated many times.

T = 5     in the papers that follow GPipe on the same data (Arivazhagan et al., "Massively
          Multilingual Neural Machine Translation in the Wild", 2019): the default here.
T = 1.43  in multilingual BERT, whose exponent is 0.7.  GPipe's text (section 5) says that it
          samples as multilingual BERT does, and gives no number.

An epoch has as many pairs as the corpus, and language l gets the share p_l of them.  Its samples
come from an endless sequence of permutations of its pairs, which the next epoch continues.  So in
the long run all pairs of a language are seen equally often.  An epoch is a function of (seed,
epoch).
"""

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock_recipes.data import keyed_generator

FOLLOW_UPS_TEMPERATURE = 5.0
"""The temperature of the papers after GPipe."""
MULTILINGUAL_BERT_TEMPERATURE = 1 / 0.7
"""The temperature of multilingual BERT."""


def check_temperature(temperature: float) -> None:
    """Check that a temperature is above 0.

    Raises:
        ConfigError: it is not above 0.
    """
    if not 0 < temperature < math.inf:
        raise ConfigError(
            f"temperature={temperature}: must be a number above 0; 1 takes languages as they "
            f"come, {FOLLOW_UPS_TEMPERATURE:g} is usual"
        )


def language_shares(counts: Sequence[int], temperature: float) -> list[float]:
    """Compute p_l of languages with `counts` pairs; a language without pairs gets 0.

    Raises:
        ConfigError: there is no pair at all, or the temperature is not above 0.
    """
    check_temperature(temperature)
    total = sum(counts)
    if not total:
        raise ConfigError("there is no pair to learn from in any language")
    most = max(counts)
    if (most / total) ** (1 / temperature) < sys.float_info.min:
        total = most  # T is near 0, and all weights would underflow
    raw = [(count / total) ** (1 / temperature) if count else 0.0 for count in counts]
    whole = sum(raw)
    return [weight / whole for weight in raw]


def language_places(counts: Sequence[int], temperature: float, num_places: int) -> list[int]:
    """Divide `num_places` among languages by p_l, to whole numbers by largest remainder."""
    exact = [share * num_places for share in language_shares(counts, temperature)]
    places = [math.floor(number) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: (places[n] - exact[n], n))
    for n in by_remainder[: num_places - sum(places)]:
        places[n] += 1
    return places


def epoch_samples(
    languages_N: Tensor, *, temperature: float, num_places: int, seed: int, epoch: int
) -> Tensor:
    """Return the samples of an epoch, language by language: int64, (num_places,).

    languages_N: The number of each sample's language: int64, (N,).
    """
    counts = torch.bincount(languages_N).tolist()
    places = language_places(counts, temperature, num_places)
    drawn = [
        members[_stretch(len(members), epoch * count, count, (seed, "language", language))]
        for language, count in enumerate(places)
        for members in [(languages_N == language).nonzero().flatten()]
    ]
    return torch.cat(drawn)


def _stretch(size: int, start: int, count: int, key: tuple[object, ...]) -> Tensor:
    """Return entries start..start+count of an endless sequence of permutations of range(size)."""
    if not count:
        return torch.empty(0, dtype=torch.int64)
    laps = range(start // size, (start + count - 1) // size + 1)
    orders = [torch.randperm(size, generator=keyed_generator(*key, lap)) for lap in laps]
    first = start - laps.start * size
    return torch.cat(orders)[first : first + count]
