"""Every test starts from the same seeds, on one intra-op thread, and draws the same examples."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# No deadline: how long an example takes says nothing of whether it is right.
settings.register_profile("penstock", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("penstock")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed every global random number generator, so that a test gives the same result alone."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
