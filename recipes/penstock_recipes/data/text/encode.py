"""Pairs of texts as tokens, and those as padded tensors."""

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
        """Return rows side by side, shorter ones filled with PAD: int64, (B, T)."""
        spans = zip(self.starts[rows].tolist(), self.starts[rows + 1].tolist(), strict=True)
        found = [self.tokens[start:end] for start, end in spans]
        return pad_sequence(found, batch_first=True, padding_value=PAD).to(torch.int64)


class _Growing:
    """Rows of tokens while they are being collected."""

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
    """Where the pair stands among the pairs of its language: int64, (N,)."""
    sources: TokenRows
    targets: TokenRows
    num_dropped: Mapping[str, int]
    """Pairs of each language that were left out since they are too long."""

    def __len__(self) -> int:
        return len(self.languages_N)

    @property
    def lengths_N2(self) -> Tensor:
        """Tokens of each sample's source and target, as the model sees them: int64, (N, 2)."""
        return torch.stack([self.sources.lengths, self.targets.lengths], dim=1)

    def by_language(self, values: Sequence[Value]) -> dict[str, list[Value]]:
        """Sort what belongs to the samples (`values[n]` to sample n) by language."""
        sorted_values: dict[str, list[Value]] = {language: [] for language in self.languages}
        for number, value in zip(self.languages_N.tolist(), values, strict=True):
            sorted_values[self.languages[number]].append(value)
        return {language: found for language, found in sorted_values.items() if found}


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Samples side by side, shorter ones filled with PAD; all int64.

    `target_in_BT` is what the decoder sees, <|begin|> and the text; `target_out_BT` is what it
    should give, the text and <|end|>.
    """

    source_BS: Tensor
    target_in_BT: Tensor
    target_out_BT: Tensor

    @property
    def num_target_tokens(self) -> int:
        """Tokens to be learnt from: those that are no padding."""
        return num_real_tokens(self.target_out_BT)


def num_real_tokens(targets: Tensor) -> int:
    """Count what is no padding; the weight of a micro-batch's loss."""
    return int((targets != PAD).sum())


def encode_part(
    part: TextPart,
    vocabulary: Vocabulary,
    *,
    max_length: int,
    too_long: Literal["refuse", "drop"] = "refuse",
) -> EncodedPairs:
    """Turn the pairs of a part into tokens, language by language in alphabetical order.

    max_length: Most tokens that the model takes on either side, tag and end included.
    too_long: What happens to pairs that are longer: "refuse", or "drop" with a count.

    Raises:
        ConfigError: a pair is too long and is to be refused, or a language has no tag.
    """
    if too_long not in ("refuse", "drop"):
        raise ConfigError(f'too_long={too_long!r}: must be "refuse" or "drop"')
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
    if too_long == "refuse":
        _refuse(num_dropped, max_length)
    return EncodedPairs(
        languages=languages,
        languages_N=_tensor(numbers),
        positions_N=_tensor(positions),
        sources=sources.finished(),
        targets=targets.finished(),
        num_dropped=num_dropped,
    )


def collate(encoded: EncodedPairs, samples: Tensor) -> TextBatch:
    """Put samples (int64, (B,)) side by side."""
    target_out_BT = encoded.targets.padded(samples)
    begin_B1 = torch.full((len(samples), 1), BOS)
    target_in_BT = torch.cat([begin_B1, target_out_BT[:, :-1]], dim=1)
    target_in_BT[target_in_BT == EOS] = PAD
    return TextBatch(encoded.sources.padded(samples), target_in_BT, target_out_BT)


def _tensor(numbers: "array[int]") -> Tensor:
    return torch.from_numpy(np.array(numbers))


def _refuse(num_too_long: Mapping[str, int], max_length: int) -> None:
    found = {language: count for language, count in num_too_long.items() if count}
    if found:
        counts = ", ".join(f"{language} {count:,}" for language, count in found.items())
        raise ConfigError(
            f"pairs of text are longer than the {max_length} tokens that the model takes "
            f'({counts}); give it a larger maximum, or leave them out with too_long="drop"'
        )
