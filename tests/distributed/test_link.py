"""An edge keeps its messages apart, whatever their kinds and however far ahead they are sent."""

from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from tests.distributed import link_job
from tests.distributed.call import call
from tests.ways import BETWEEN_PROCESSES


@pytest.mark.parametrize("transport", [transport.name for transport in BETWEEN_PROCESSES])
@pytest.mark.parametrize("job", [link_job.exchange, link_job.wait_in_vain])
def test_an_edge_between_processes(
    job: Callable[[penstock.Mesh, str], None], transport: str, tmp_path: Path
) -> None:
    call(job, (2, 1), tmp_path, transport=transport)


def test_a_wait_in_torch_ends_when_a_process_fails(tmp_path: Path) -> None:
    call(link_job.fail_while_waiting, (2, 1), tmp_path, transport="TORCH_DISTRIBUTED")
