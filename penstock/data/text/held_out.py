"""Which pairs are kept from training: decided by what they say, so that equal pairs stay together.

A pair that stands in the corpus twice, in one language or in two that write it alike, must not be
learnt from in one place and asked for in another.
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
    """Give the part that `group` falls into; whatever has no share goes to training."""
    digest = hashlib.blake2b(f"{seed}:held out:{group}".encode(), digest_size=8).digest()
    drawn = int.from_bytes(digest, "little") / 2**64
    for part, share in shares.items():
        if drawn < share:
            return part
        drawn -= share
    return "train"


def same_text(text: str) -> str:
    """Give what texts have in common that differ in case or in the form of their characters."""
    return unicodedata.normalize("NFKC", text).casefold()


def same_pair(source: str, target: str) -> str:
    """Give what equal pairs have in common, whatever their language."""
    return f"{same_text(source)}\t{same_text(target)}"
