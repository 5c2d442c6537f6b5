"""An edge keeps its messages apart, whatever their kinds and however far ahead they are sent."""

from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from tests.distributed import link_job
from tests.distributed.call import call


@pytest.mark.parametrize(
    "job", [link_job.exchange, link_job.fail_while_waiting, link_job.wait_in_vain]
)
def test_an_edge_between_processes(job: Callable[[penstock.Mesh], None], tmp_path: Path) -> None:
    call(job, (2, 1), tmp_path)
