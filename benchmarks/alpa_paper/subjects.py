"""What Alpa's paper measures (Zheng et al. 2022, section 8): models, devices, FLOPs of a step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from penstock import Cluster
from penstock.costs.counting.count import record_graph
from penstock.costs.counting.graph import Graph
from penstock.costs.records import Part
from penstock.model.capture.capture import resolve_layers
from penstock.model.layers import Layers
from penstock.planner.arguments import Model
from penstock.planner.mesh_task import MeshTask
from penstock.runtime.microbatches import first_microbatch
from penstock.runtime.planning import facts_of
from penstock_recipes.zoo.gpt_family import GPT_SIZES, gpt

from .gshard import GSHARD_SIZES, gshard_moe
from .wide_resnet import WIDE_RESNET_SIZES, wide_resnet

GPT, MOE, RESNET = "GPT", "GShard MoE", "Wide-ResNet"
DEVICES = (1, 2, 4, 8, 16, 32, 64)
ALPAS, NEWEST = "p3.16xlarge", "dgx-b200"
"""Alpa's hosts, and those of the newest preset."""
LENGTH, GROUP, IMAGE = 1024, 2048, 224
MICROBATCHES = {
    GPT: (512, 128, 128, 128, 64, 128, 1024),
    MOE: (512, 32, 32, 32, 16, 128, 64),
    RESNET: (24, 24, 24, 24, 32, 32, 38),
}
"""M of the plans in Alpa's code, by number of devices: benchmark/alpa/suite_auto_gpt.py,
suite_auto_moe.py and suite_wresnet.py of alpa-projects/alpa.
"""
NAMES = {GPT: tuple(GPT_SIZES), MOE: tuple(GSHARD_SIZES), RESNET: tuple(WIDE_RESNET_SIZES)}


@dataclass(frozen=True)
class Subject:
    """A model of the paper, and the number of devices that it is measured on."""

    table: str
    name: str
    num_devices: int
    num_microbatches: int

    @property
    def batch_size(self) -> int:
        """Samples of a step: sequences, or images."""
        if self.table != RESNET:
            return 1024
        return 1520 if self.name == "13B" else 1536

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * LENGTH

    def task(self, cluster: str) -> MeshTask:
        """Return what is to be planned, on a share of a host of a preset or on several."""
        with torch.device("meta"):
            model, inputs = self.model()
        layers = resolve_layers(model, inputs[:2])
        return MeshTask(
            model=Model(facts_of(layers), layers.spans),
            names=[step.path for step in layers],
            graph_of=cache(lambda number: self.graph(layers, first_microbatch(inputs, number))),
            cluster=cluster_of(cluster, self.num_devices),
            batch_size=self.batch_size,
            num_microbatches=self.num_microbatches,
        )

    def graph(self, layers: Layers, inputs: Any) -> Graph:
        """Return the operators of a micro-batch, as PyTorch runs them today."""
        return record_graph(layers, inputs)

    def model(self) -> tuple[nn.Module, Any]:
        """Return the model and a batch of inputs."""
        if self.table == RESNET:
            return wide_resnet(self.name), torch.zeros(self.batch_size, 3, IMAGE, IMAGE)
        make: Callable[..., nn.Module] = gpt if self.table == GPT else gshard_moe
        words = torch.zeros(self.batch_size, LENGTH, dtype=torch.long)
        return make(self.name, tied=False).half(), words

    def flops(self, graph: Graph, num_microbatches: int) -> float:
        """Return the FLOPs of a step as Alpa counts them, each forward twice for recompute."""
        if self.table == GPT:
            return _gpt_flops(self.tokens, **GPT_SIZES[self.name])
        if self.table == MOE:
            return _moe_flops(self.tokens, **GSHARD_SIZES[self.name])
        products = [x for call in graph.calls for x in call.operators if x.dims]
        forwards = [x for x in products if x.part is Part.FORWARD]
        return num_microbatches * sum(float(x.flops) * x.count for x in (*products, *forwards))


def _gpt_flops(
    tokens: int, num_layers: int, width: int, num_heads: int, num_words: int = 51_200
) -> float:
    blocks = 96 * tokens * width**2 * num_layers * (1 + LENGTH / (6 * width))
    return blocks + 6 * tokens * width * num_words


def _moe_flops(
    tokens: int,
    num_layers: int,
    width: int,
    num_heads: int,
    num_experts: int,
    num_words: int = 32_000,
) -> float:
    attention = 8 * tokens * width**2 + 4 * tokens * LENGTH * width
    dense = 4 * 8 * tokens * width**2
    experts = 8 * 8 * tokens * width**2
    gate = 2 * tokens * width * num_experts + 4 * tokens * GROUP
    dispatch = 8 * tokens * width * GROUP
    pair = 2 * attention + dense + experts + gate + dispatch
    return 4 * pair * num_layers / 2 + 6 * tokens * width * num_words


def cluster_of(name: str, num_devices: int) -> Cluster:
    """Return the first devices of a preset's host, or several of its hosts."""
    one = Cluster.load(name)
    (host,) = one.hosts
    if num_devices > len(host.devices):
        return one.times(num_devices // len(host.devices))
    cards = min(host.cards, num_devices)
    return replace(one, hosts=(replace(host, devices=host.devices[:num_devices], cards=cards),))


def subjects(tables: tuple[str, ...], kind: type[Subject] = Subject) -> Iterator[Subject]:
    """Yield the models of tables as subjects of a `kind`, on one device first."""
    for table in tables:
        for row in zip(NAMES[table], DEVICES, MICROBATCHES[table], strict=True):
            yield kind(table, *row)
