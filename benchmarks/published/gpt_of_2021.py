"""GPT as Alpa's paper ran it in 2021: attention of products and softmax, in XLA's kernels.

The artifact's model (github.com/alpa-projects/alpa, alpa/model/bert_model.py) runs without dropout
(`deterministic=True` in benchmark/alpa), in float16, with softmax and norms in float16 too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.alpa_paper.subjects import Subject
from penstock.costs.counting.count import record_graph
from penstock.costs.counting.fused_chains import fused
from penstock.costs.counting.graph import Call, Graph
from penstock.costs.records import Operator, Part
from penstock.model.layers import Layers
from penstock.sharding.costs import StateRatio
from penstock_recipes.zoo.attention import Attention

STATE_OF_ALPA = StateRatio(1, 6)
"""Weights and gradients in float16; main weights and two moments of Adam in float32.

`TrainState` with a master copy, alpa/model/model_util.py.
"""
STATE_OF_MEGATRON = StateRatio(1, 8)
"""The same, and a copy of the gradients in float32: 20 bytes a weight.

docs.nvidia.com/megatron-core, developer guide, distributed optimizer: table of bytes.
"""
XLA_MEMORY = 0.9
"""Share of a device's memory that Alpa gives XLA (alpa/global_env.py)."""
_READS_AGAIN = {"softmax": (2, 2), "layer_norm": (1, 2)}
"""Tensors that XLA's kernels of a function read more than one kernel would, forward and backward.

XLA for GPUs begins a kernel after each reduction.  A softmax in one kernel came in 2023, needs
Ampere and was off in July 2024 (openxla/xla, softmax_rewriter_triton.cc, pull request 14962).
A softmax reads its scores for the maximum, for the sum and for the result; a norm reads its input
for two sums and for the result.  A backward reads gradient and value for a sum and the result.
"""


@dataclass(frozen=True)
class AsItRan(Subject):
    """A GPT of the paper as the paper ran it."""

    def model(self) -> tuple[nn.Module, Any]:
        """Return the model with attention of products, without dropout, and a batch."""
        model, inputs = super().model()
        for module in model.modules():
            if isinstance(module, Attention):
                module.__class__ = ProductsAndSoftmax
        return model.eval(), inputs

    def graph(self, layers: Layers, inputs: Any) -> Graph:
        """Return the operators of a micro-batch with the bytes of XLA's kernels."""
        graph = record_graph(layers, inputs)
        return fused(replace(graph, calls=tuple(_read_again(graph))))


class ProductsAndSoftmax(Attention):
    """Attention that writes its scores and weights to memory."""

    def attend(
        self,
        x_BTD: Tensor,
        keys_BHSC: Tensor,
        values_BHSC: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """Attend from x to all keys: the artifact adds a bias to the scores and masks nothing.

        The bias is a row for a sample, a negligible number of bytes, and left out here.
        """
        queries_BHTC = self._by_head(self.query(x_BTD)) * keys_BHSC.shape[-1] ** -0.5
        weights_BHTS = F.softmax(queries_BHTC @ keys_BHSC.transpose(2, 3), dim=-1)
        mixed_BHTC = weights_BHTS @ values_BHSC
        result_BTD: Tensor = self.output(mixed_BHTC.transpose(1, 2).flatten(2))
        return result_BTD


def _read_again(graph: Graph) -> Iterable[Call]:
    for call in graph.calls:
        again = _READS_AGAIN.get(call.function.rpartition(".")[2])
        if again is None:
            yield call
            continue
        num_bytes = graph.tensors[call.takes[0]].num_bytes
        yield replace(call, operators=tuple(_larger(call.operators, num_bytes, again)))


def _larger(
    operators: Iterable[Operator], num_bytes: int, again: tuple[int, int]
) -> Iterable[Operator]:
    for operator in operators:
        if operator.name in ("reduce", "norm"):
            times = again[operator.part is not Part.FORWARD]
            yield replace(operator, num_bytes=operator.num_bytes + times * num_bytes)
        else:
            yield operator
