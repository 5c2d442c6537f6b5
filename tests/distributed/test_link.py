"""An edge keeps its messages apart, whatever their kinds and however far ahead they are sent."""

from pathlib import Path

from tests.distributed import link_job
from tests.distributed.call import call


def test_messages_of_changing_kinds_arrive_as_they_left(tmp_path: Path) -> None:
    call(link_job.exchange, (2, 1), tmp_path)
