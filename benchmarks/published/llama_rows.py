"""The rows of llama_h800.tsv: what was measured, and what is predicted for the same layout."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

import penstock
from penstock.costs.cluster import Cluster, Link

from .layouts import Layout, rows_of, step_s
from .llama import llama

FILE = Path(__file__).with_name("llama_h800.tsv")
_PRESETS = {"H800": "dgx-h100", "A800": "dgx-a100"}
"""The presets with the same chip; its NVLink and its cards are replaced."""
_REACHED = 0.9
"""Share of a link's rate in the presets: the middle of 80 and 100 %."""
_NVLINK, _CARD = 200e9, 12.5e9
"""Bytes a second each way, by the source: NVLink of both, and a card of 100 Gbit/s."""


@dataclass(frozen=True)
class Row:
    """A measured step of a layout."""

    fields: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.fields[name]

    def number(self, name: str) -> int:
        """Return a column that holds a whole number."""
        return int(self[name])

    @property
    def measured_s(self) -> float:
        """Seconds of the step."""
        return float(self["step_s"])

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Layers, width, width of the MLP, heads."""
        num_layers, width, ff_width, heads = (int(x[1:]) for x in self["shape"].split())
        return num_layers, width, ff_width, heads

    @property
    def layout(self) -> Layout:
        """The layout of devices and layers."""
        return Layout(*map(self.number, ("tp", "pp", "vp", "dp", "cp")))

    @property
    def cluster(self) -> Cluster:
        """The hosts that it ran on."""
        return cluster_of(self["hardware"], self.number("gpus"))

    @property
    def passes_hosts(self) -> bool:
        """Tell if some stage is on several hosts."""
        return self.layout.passes_hosts(self.cluster)

    def predicted_s(self) -> float:
        """Return the seconds of the step of the same layout."""
        profile = profile_of(self.sizes, self.layout.data, self.number("seq"))
        is_again = self["ckpt"] == "full"
        layout = self.layout.parallelism(self.number("M"), recomputes=is_again)
        return step_s(profile, self.cluster, layout)


def rows() -> Iterator[Row]:
    """Yield the rows of the table."""
    yield from map(Row, rows_of(FILE))


@cache
def profile_of(
    sizes: tuple[int, int, int, int], num_samples: int, length: int
) -> penstock.Profile:
    """Return the counted layers of a Llama."""
    words = torch.zeros(num_samples, length, dtype=torch.long, device="meta")
    return penstock.profile(llama(*sizes), words, measure=False)


def _at_rate(link: Link, bytes_per_s: float) -> Link:
    """Return a link with another rate; those of collectives keep their shares of it."""
    times = bytes_per_s / link.bytes_per_s
    ring, in_switch = link.collective_bytes_per_s, link.sum_bytes_per_s
    return replace(
        link,
        bytes_per_s=bytes_per_s,
        collective_bytes_per_s=None if ring is None else ring * times,
        sum_bytes_per_s=None if in_switch is None else in_switch * times,
    )


@cache
def cluster_of(hardware: str, num_devices: int) -> Cluster:
    """Return hosts of eight H800 or A800, or a part of one host."""
    one = Cluster.load(_PRESETS[hardware])
    (host,) = one.hosts
    rates = {"nvlink": _NVLINK * _REACHED, "network": _CARD * _REACHED}
    links = {name: _at_rate(link, rates[name]) for name, link in one.links.items()}
    count, rest = divmod(num_devices, len(host.devices))
    part = replace(host, devices=host.devices[:rest], cards=rest) if rest else host
    hosts = (replace(part, count=max(1, count)),)
    return replace(one, name=f"{num_devices} {hardware}", hosts=hosts, links=links)
