"""Which pairs are kept from training: decided by what they say, so that equal ones stay together.

A pair that stands in the corpus twice, in one language or in two that write it alike, is not
learnt from in one place and asked for in another.  The translation of a pair that is tested may
well be learnt from other languages: a model that knows Frankreich and Francia, and how Slovak
words look, can find France for Francúzsko.  This asks what languages learn from each other.
"""

import hashlib
import unicodedata
from collections.abc import Mapping

from penstock.errors import ConfigError

from .corpus import PartName


def check_shares(name: str, share: float) -> None:
    """See that `share`, taken once for validation and once for testing, leaves the larger part.

    Raises:
        ConfigError: it does not.
    """
    if not 0 < share < 0.25:
        raise ConfigError(
            f"{name}={share}: give a share between 0 and 0.25, such as 0.05; validation and test "
            "take so much each"
        )


def held_out_part(group: str, shares: Mapping[PartName, float], seed: int) -> PartName:
    """Return the part that `group` falls into; whatever has no share goes to training."""
    digest = hashlib.blake2b(f"{seed}:held out:{group}".encode(), digest_size=8).digest()
    drawn = int.from_bytes(digest, "little") / 2**64
    for part, share in shares.items():
        if drawn < share:
            return part
        drawn -= share
    return "train"


def group_of(source: str, target: str) -> str:
    """Return what a pair shares with those that must fall into the same part: its texts, but for
    case and the form of their characters.
    """
    return "\t".join(unicodedata.normalize("NFKC", text).casefold() for text in (source, target))
