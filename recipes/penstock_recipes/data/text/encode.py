"""Encode pairs of texts as tokens, and collate them into padded tensors."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from penstock.errors import ConfigError

from .corpus import TextPart
from .vocabulary import BOS, EOS, PAD, Vocabulary

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of tokens end to end: row n is `tokens[starts[n]:starts[n + 1]]`."""

    tokens: Tensor
    """int32."""
    starts: Tensor
    """int64, (N + 1,)."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row: int64, (N,)."""
        return self.starts.diff()

    def padded(self, rows: Tensor) -> Tensor:
        """Stack rows, padded with PAD: int64, (B, T)."""
        spans = zip(self.starts[rows].tolist(), self.starts[rows + 1].tolist(), strict=True)
        chosen = [self.tokens[start:end] for start, end in spans]
        return pad_sequence(chosen, batch_first=True, padding_value=PAD).to(torch.int64)


class _Growing:
    """Builds `TokenRows` row by row."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._starts = array("q", [0])

    def append(self, row: Sequence[int]) -> None:
        self._tokens.extend(row)
        self._starts.append(len(self._tokens))

    def finished(self) -> TokenRows:
        return TokenRows(_tensor(self._tokens), _tensor(self._starts))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPairs:
    """Pairs of texts as tokens: sample n is one pair of `languages[languages_N[n]]`."""

    languages: tuple[str, ...]
    languages_N: Tensor
    """int64, (N,)."""
    positions_N: Tensor
    """Position of the pair among the pairs of its language: int64, (N,)."""
    sources: TokenRows
    targets: TokenRows
    num_dropped: Mapping[str, int]
    """Pairs of each language that were left out as too long."""

    def __len__(self) -> int:
        return len(self.languages_N)

    @property
    def lengths_N2(self) -> Tensor:
        """Tokens of each sample's source and target, as the model sees them: int64, (N, 2)."""
        return torch.stack([self.sources.lengths, self.targets.lengths], dim=1)

    def by_language(self, values: Sequence[Value]) -> dict[str, list[Value]]:
        """Group the values of the samples (`values[n]` of sample n) by language."""
        groups: dict[str, list[Value]] = {language: [] for language in self.languages}
        for number, value in zip(self.languages_N.tolist(), values, strict=True):
            groups[self.languages[number]].append(value)
        return {language: group for language, group in groups.items() if group}


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A batch of samples, padded with PAD; all int64.

    The decoder reads `target_in_BT`, <|begin|> and the text.  It predicts `target_out_BT`, the
    text and <|end|>.
    """

    source_BS: Tensor
    target_in_BT: Tensor
    target_out_BT: Tensor

    @property
    def num_target_tokens(self) -> int:
        """Number of target tokens, without padding."""
        return num_real_tokens(self.target_out_BT)


def num_real_tokens(targets: Tensor) -> int:
    """Count the tokens that are no padding, the weight of a micro-batch's loss."""
    return int((targets != PAD).sum())


def encode_part(
    part: TextPart,
    vocabulary: Vocabulary,
    *,
    max_length: int,
    too_long: Literal["refuse", "drop"] = "refuse",
) -> EncodedPairs:
    """Encode the pairs of a part as tokens, language by language in alphabetical order.

    max_length: Most tokens of either side, tag and end included.
    too_long: "refuse" longer pairs, or "drop" and count them.

    Raises:
        ConfigError: a pair is too long with "refuse", or a language has no tag.
    """
    if too_long not in ("refuse", "drop"):
        raise ConfigError(f'too_long={too_long!r}: must be "refuse" or "drop"')
    # Encode language by language, without pairs that are too long.
    languages = tuple(sorted(part))
    numbers, positions = array("q"), array("q")
    sources, targets = _Growing(), _Growing()
    num_dropped = dict.fromkeys(languages, 0)
    for number, language in enumerate(languages):
        pairs = part[language]
        encoded = zip(
            vocabulary.encode_sources(pairs.sources, language),
            vocabulary.encode_targets(pairs.targets),
            strict=True,
        )
        for position, (source, target) in enumerate(encoded):
            if max(len(source), len(target)) > max_length:
                num_dropped[language] += 1
                continue
            numbers.append(number)
            positions.append(position)
            sources.append(source)
            targets.append(target)
    # Refuse them all in one message.
    if too_long == "refuse" and any(num_dropped.values()):
        counts = ", ".join(f"{name} {count:,}" for name, count in num_dropped.items() if count)
        raise ConfigError(
            f"pairs of text are longer than the {max_length} tokens that the model takes "
            f'({counts}); give it a larger maximum, or leave them out with too_long="drop"'
        )
    return EncodedPairs(
        languages=languages,
        languages_N=_tensor(numbers),
        positions_N=_tensor(positions),
        sources=sources.finished(),
        targets=targets.finished(),
        num_dropped=num_dropped,
    )


def collate(encoded: EncodedPairs, samples: Tensor) -> TextBatch:
    """Make a batch of samples (int64, (B,))."""
    target_out_BT = encoded.targets.padded(samples)
    begin_B1 = torch.full((len(samples), 1), BOS)
    target_in_BT = torch.cat([begin_B1, target_out_BT[:, :-1]], dim=1)
    target_in_BT[target_in_BT == EOS] = PAD
    return TextBatch(encoded.sources.padded(samples), target_in_BT, target_out_BT)


def _tensor(numbers: "array[int]") -> Tensor:
    return torch.from_numpy(np.array(numbers))
