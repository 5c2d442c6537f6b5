"""Group the samples of an epoch into steps and parts, counted in tokens, from (seed, epoch).

A step is too large for memory (the paper's take up to 4 million tokens), so it consists of parts
whose gradients add up.  Padding counts: the size of a part is its rows times its longest text,
source or target, and at most `tokens_per_part`.  Samples of similar length share a part, which
keeps padding small; parts of all lengths share a step.
"""

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock_recipes.data import keyed_generator

from .sampling import FOLLOW_UPS_TEMPERATURE, check_temperature, epoch_samples

Step = tuple[Tensor, ...]
"""The parts of a step: the samples of each, int64, (B,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The sizes of the steps and parts of an epoch.

    Raises:
        ConfigError: a number is out of bounds, or the numbers do not fit each other.
    """

    tokens_per_step: int
    """Most tokens of a step, which has as many parts as fit."""
    tokens_per_part: int
    """Most tokens in memory at once."""
    temperature: float = FOLLOW_UPS_TEMPERATURE
    """The temperature of language sampling; see sampling.py."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if not 1 <= self.tokens_per_part <= self.tokens_per_step:
            raise ConfigError(
                f"tokens_per_part={self.tokens_per_part} and tokens_per_step="
                f"{self.tokens_per_step}: a part needs at least 1 token, and a step at least one "
                "part"
            )

    @property
    def parts_per_step(self) -> int:
        """Number of parts of a step; the last step of an epoch may have fewer."""
        return self.tokens_per_step // self.tokens_per_part


def epoch_steps(
    lengths_N2: Tensor, languages_N: Tensor, plan: BatchPlan, epoch: int
) -> list[Step]:
    """Return the steps of an epoch: the same at every call, in every process.

    lengths_N2: Tokens of each sample's source and target: int64, (N, 2).
    languages_N: The number of each sample's language: int64, (N,).

    Raises:
        ConfigError: there is no sample, or one is longer than a part.
    """
    # Sample the languages, shuffle, group by length, shuffle the parts.
    drawn = epoch_samples(
        languages_N,
        temperature=plan.temperature,
        num_places=len(languages_N),
        seed=plan.seed,
        epoch=epoch,
    )
    shuffled = drawn[_order(len(drawn), plan.seed, "samples", epoch)]
    parts = [
        shuffled[part] for part in parts_by_length(lengths_N2[shuffled], plan.tokens_per_part)
    ]
    order = _order(len(parts), plan.seed, "parts", epoch).tolist()
    return [
        tuple(parts[n] for n in order[start : start + plan.parts_per_step])
        for start in range(0, len(parts), plan.parts_per_step)
    ]


def parts_by_length(lengths_N2: Tensor, tokens_per_part: int) -> list[Tensor]:
    """Put each sample into one part, shortest first; samples of equal lengths stay in order.

    Raises:
        ConfigError: a sample is longer than a part.
    """
    by_shorter = lengths_N2.amin(dim=1).argsort(stable=True)
    longest, by_longer = lengths_N2.amax(dim=1)[by_shorter].sort(stable=True)
    order, lengths = by_shorter[by_longer], longest.tolist()
    if lengths and lengths[-1] > tokens_per_part:
        raise ConfigError(
            f"sample {int(order[-1])} has {lengths[-1]} tokens, and tokens_per_part is "
            f"{tokens_per_part}; make it larger, or drop long text"
        )
    parts, start = [], 0
    while start < len(lengths):
        end = start + _fitting(lengths, start, tokens_per_part)
        parts.append(order[start:end])
        start = end
    return parts


def _fitting(lengths: list[int], start: int, most_tokens: int) -> int:
    """Count the samples from `start` on that make a part; `lengths` ascend."""
    counts = range(1, len(lengths) - start + 1)
    return bisect_right(counts, most_tokens, key=lambda n: n * lengths[start + n - 1])


def _order(size: int, seed: int, what: str, epoch: int) -> Tensor:
    return torch.randperm(size, generator=keyed_generator(seed, what, epoch))
