"""Keep freed memory in the process: a step frees and takes the same megabytes again and again.

glibc hands free memory at the end of a heap back to the system once it exceeds twice the largest
block that was ever mapped on its own and freed, and the next micro-batch pays for it with page
faults: 5 % of a step of small blocks (benchmarks/throughput).  Freeing one large block raises that
bound to 64 MiB, as it is in any process that once freed a tensor of that size.  Other allocators
are not impressed, and not harmed.
"""

from functools import cache

import torch

_LARGEST_BLOCK_BYTES = (32 << 20) - (64 << 10)
"""Just below 32 MiB, glibc's DEFAULT_MMAP_THRESHOLD_MAX; blocks above teach it nothing."""


@cache
def keep_freed_memory() -> None:
    """Map and free one large block, once in a process; its pages are never touched."""
    torch.empty(_LARGEST_BLOCK_BYTES, dtype=torch.uint8)
