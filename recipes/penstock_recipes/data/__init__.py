"""The order of samples in an epoch: a function of (seed, epoch), so a position is two numbers.

Resuming at (epoch, batch) needs nothing else: no generator state is kept anywhere.
"""

import hashlib

import torch
from torch import Tensor


def keyed_generator(*key: object) -> torch.Generator:
    """Make a CPU generator seeded by a digest of `key`; equal keys draw equal numbers."""
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
