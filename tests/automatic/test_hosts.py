"""A cluster that is not what the processes run on is refused before anything is planned."""

from typing import Any

import pytest
import torch

from penstock.automatic.parallelize import check_hosts
from penstock.errors import ConfigError
from tests.few_devices import cluster

CPU = ["a", "host a", "cpu", 0]
OTHER = ["b", "host b", "cpu", 0]
SMALL = ["a", "host a", "cuda", 1 << 20]


class Job:
    """Processes that say this of themselves."""

    def __init__(self, *facts: list[Any]) -> None:
        self.facts, self.size = facts, len(facts)

    def gather(self, value: Any, what: str) -> Any:
        assert [type(own) for own in value] == [type(own) for own in self.facts[0]]
        return self.facts


def check(job: Job, *sizes: int, kind: str = "cpu") -> None:
    described = cluster(*sizes, torch_type=kind)
    check_hosts(described, job, torch.device("cpu"))  # type: ignore[arg-type]


def test_what_it_runs_on_may_be_fewer_hosts() -> None:
    check(Job(CPU, CPU, OTHER), 2, 1)
    check(Job(CPU, CPU, CPU), 2, 1)
    check(Job(CPU, OTHER), 1, 1)


@pytest.mark.parametrize(
    ("job", "sizes", "kind", "words"),
    [
        (Job(CPU, OTHER), (2,), "cpu", "ranks 0 and 1 are on one host there, .*two, host a and"),
        (Job(CPU, CPU), (3,), "cpu", "has 3 devices, and there are 2 processes"),
        (Job(CPU, CPU), (2,), "cuda", "rank 0 has a device of kind 'cuda' there, and .*'cpu'"),
        (Job(SMALL, SMALL), (2,), "cuda", "the device of rank 0 has .* there, and 1 MiB here"),
    ],
)
def test_another_cluster_is_refused(
    job: Job, sizes: tuple[int, ...], kind: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check(job, *sizes, kind=kind)
