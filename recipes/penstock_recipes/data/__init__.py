"""The order of samples in an epoch, as a function of (seed, epoch).

So (epoch, batch) is all that a resumed run needs; no generator state is saved.
"""

import hashlib
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError


def require_library(library: str, needed_for: str, extra: str) -> None:
    """Refuse to go on without a library, which comes with an extra of this package.

    Raises:
        ConfigError: it is not installed; the message says how to install it.
    """
    if find_spec(library) is None:
        raise ConfigError(
            f"{needed_for} {library}, which is not installed; "
            f"install it with: pip install 'penstock-recipes[{extra}]'"
        )


def optional_library(module: str, needed_for: str, extra: str) -> Any:
    """Import a module of such a library.

    Raises:
        ConfigError: as `require_library`.
    """
    require_library(module.partition(".")[0], needed_for, extra)
    return import_module(module)


def keyed_generator(*key: object) -> torch.Generator:
    """Return a CPU generator seeded by a digest of `key`; equal keys draw equal numbers."""
    text = ":".join(map(str, key))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return a permutation of range(num_samples): int64, (num_samples,)."""
    return torch.randperm(num_samples, generator=keyed_generator(seed, "order", epoch))


def num_batches(num_samples: int, batch_size: int) -> int:
    """Count the batches of an epoch; the last one may be smaller."""
    return -(-num_samples // batch_size)


def batch_indices(order: Tensor, batch: int, batch_size: int) -> Tensor:
    """Return the samples of batch number `batch`: at most `batch_size` entries of `order`."""
    return order[batch * batch_size : (batch + 1) * batch_size]
