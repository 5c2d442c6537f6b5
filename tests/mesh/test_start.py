"""The device of a process, if nobody names one."""

from dataclasses import dataclass

import pytest
import torch

from penstock.errors import ConfigError
from penstock.mesh.start import accelerators, device_by_default, process_device


@dataclass(frozen=True)
class Host:
    """A host with accelerators, as torch reports it."""

    kind: str
    count: int
    backend: bool = True

    def pretend(self, patch: pytest.MonkeyPatch) -> None:
        here = torch.device(self.kind) if self.count else None
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: here)
        patch.setattr(torch.accelerator, "device_count", lambda: self.count)
        patch.setattr(torch.distributed, "is_backend_available", lambda name: self.backend)


@pytest.mark.parametrize(
    ("host", "names", "kind"),
    [
        (Host("cuda", 0), (), "cpu"),
        (Host("cuda", 2), ("cuda:0", "cuda:1"), "cuda"),
        (Host("xpu", 2), ("xpu:0", "xpu:1"), "xpu"),
        (Host("cuda", 2, backend=False), ("cuda:0", "cuda:1"), "cpu"),
        (Host("mps", 1), (), "cpu"),
    ],
    ids=str,
)
def test_accelerators_are_taken_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch, host: Host, names: tuple[str, ...], kind: str
) -> None:
    host.pretend(monkeypatch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert accelerators() == names and device_by_default() == kind
    monkeypatch.setenv("LOCAL_RANK", "1")
    taken = process_device(device_by_default())
    assert taken == torch.device("cpu") if kind == "cpu" else torch.device(kind, 1)


def test_more_processes_than_accelerators_are_asked_what_they_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Host("cuda", 2).pretend(monkeypatch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"3 processes on this host, and it has 2 devices of .*"):
        device_by_default()
