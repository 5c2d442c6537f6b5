"""A model's own loss takes the result of its last layer in slices, and is the unsplit model's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from penstock import Mesh, Pipeline
from penstock.planner.placement import Placement
from penstock.runtime.pipeline_module import parts_of
from tests.distributed.call import call
from tests.sharding.test_loss import ALONE, LENGTH, TARGETS, WORDS, Sizes

NUM_WORDS = 100_003
"""So many that the exchanges of a divided loss cost less than to gather logits; an odd number."""
WHOLE = {count * length * NUM_WORDS for count in (4, 3) for length in (LENGTH, LENGTH - 1)}
"""Elements of the logits of each micro-batch, with and without the last position."""
COUNT = torch.tensor(29.0, dtype=torch.float64)


def causal(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Tensor:
    """Compute transformers' loss, whose logits become float32, in float64."""
    logits = logits.double()
    later = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1).to(logits.device)
    how = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(logits.view(-1, vocab_size), later, ignore_index=-100, reduction=how)
    return loss if num_items_in_batch is None else loss / num_items_in_batch.to(loss.device)


class Own(nn.Module):
    """Computes a loss of logits in a way of its own between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(NUM_WORDS, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, NUM_WORDS)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self.found(self.head(self.mix(self.words(words)).tanh()), labels)

    def found(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        shifted = logits[:, :-1].contiguous()
        with torch.no_grad():
            size = logits.square().mean()
        loss = F.cross_entropy(shifted.flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits, "size": size}


class Casts(Own):
    """Runs a part of its loss without the autocast around it."""

    def found(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        shares = torch.linspace(0, 1 / NUM_WORDS, NUM_WORDS)
        with torch.autocast("cpu", enabled=False):
            exact = logits.float() @ shares
        found = super().found(logits, labels)
        lower = logits.float() @ shares
        more = {"exact": exact, "lower": lower + (lower.dtype is torch.bfloat16)}
        return found | more | {"loss": found["loss"] + exact.mean()}


class Reads(Own):
    """Reads the value of its loss in evaluation."""

    def found(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().found(logits, labels)
        more = 0.0 if self.training else found["loss"].item()
        return found | {"loss": found["loss"] * (1 + more)}


class Changes(Own):
    """Changes what it has made of its logits in place; it needs whole ones."""

    def found(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scaled, half = logits * 2, logits / 2
        scaled.mul_(half.abs().max())
        return super().found(scaled + half, labels)


class Watches(Own):
    """Looks at the gradient of logits that it has used before; it needs whole ones."""

    def found(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        size, found = logits.square().mean(), super().found(logits, labels)
        if not logits.requires_grad:
            return found
        logits.register_hook(lambda gradient: gradient / gradient.norm())
        (gradient,) = torch.autograd.grad(found["loss"], logits, create_graph=True)
        return found | {"loss": found["loss"] + size + gradient.square().sum()}


class Turns(Own):
    """Drops logits, and changes a view of some that it has used in the second micro-batch."""

    def found(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if len(logits) == 3:
            doubled = logits * 2
            flat = doubled.flatten(0, 1)
            doubled[:, :, 5].zero_()
            logits = flat.view(logits.shape)
        return super().found(F.dropout(logits, 0.1, self.training), labels)


def made(name: str) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": NUM_WORDS}
    torch.manual_seed(0)
    if name == "llama":
        sizes |= {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
        for path in [path for path, _ in model.named_modules() if path.endswith("norm")]:
            model.set_submodule(path, nn.RMSNorm(12, eps=1e-6))  # its own one computes in float32
    elif name == "gpt2":
        sizes |= {"n_embd": 12, "n_head": 2, "n_layer": 2, "n_positions": 8, "use_cache": False}
        model = GPT2LMHeadModel(GPT2Config(**sizes))
    elif name == "casts":
        return Casts()
    else:
        kinds: Any = {"picks": Own} | {
            kind.__name__.lower(): kind for kind in (Own, *NEED_WHOLE, Reads)
        }
        return kinds[name]().double()
    model.loss_function = causal
    return model.double()


def picked(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    return output["loss"]


def batch_of(name: str) -> dict[str, Any]:
    if name in ("llama", "gpt2"):
        batch = {"input_ids": WORDS, "labels": TARGETS}
        return batch | {"num_items_in_batch": COUNT} if name == "llama" else batch
    labels = TARGETS if name in ("own", "picks") else TARGETS.clamp(min=0)
    return {"words": WORDS, "labels": labels}


def stepped(name: str, **options: Any) -> dict[str, Any]:
    """Train a step; return the loss, gradients, outputs, and if whole logits were seen."""
    batch = batch_of(name)
    example = {k: v[:4] if v.dim() else v for k, v in batch.items()}
    model, how = made(name), options | ({"loss": picked} if name == "picks" else {})
    pipe = Pipeline(model, example_inputs=example, num_microbatches=2, **how)
    with Sizes() as sizes, torch.autocast("cpu", torch.bfloat16, enabled=name == "casts"):
        targets = (TARGETS,) if name == "picks" else ()
        found: dict[str, Any] = {"loss": pipe.train_step(batch, *targets)}
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    found |= parts_of(pipe).shards.whole(gradients) if pipe.sharding else gradients
    with torch.autocast("cpu", torch.bfloat16, enabled=name == "casts"):
        output = pipe.eval_step(batch)
    every = (output or {}).items()
    found |= {f"output {key}": own[..., ::1009] if own.dim() else own for key, own in every}
    return {"values": found, "sizes": sizes.seen & WHOLE}


NEED_WHOLE = (Changes, Watches, Turns)
HEAD = {"plan": "auto", "head.weight": "S(0)"}
QUICK = (
    *(("llama", "context"), ("llama", "megatron")),
    *(("picks", HEAD), ("casts", HEAD), ("reads", HEAD)),
    *((kind.__name__.lower(), HEAD) for kind in NEED_WHOLE),
)
EVERY = *QUICK, ("gpt2", "context"), ("own", HEAD)


def in_shards(mesh: Mesh, every: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [
        stepped(name, mesh=mesh, sharding=how) | {"name": name, "how": str(how)}
        for name, how in every
    ]


@pytest.mark.parametrize(
    ("placement", "every"),
    [
        (Placement.of(range(1), num_shards=2), QUICK),
        pytest.param(Placement.of(range(1), num_shards=2), EVERY, marks=pytest.mark.slow),
        pytest.param(Placement.of(range(2), num_shards=2), EVERY, marks=pytest.mark.slow),
    ],
    ids=["2 shards", "2 shards, every model", "2 stages of 2 shards"],
)
def test_a_models_own_loss_is_the_unsplit_one_and_nobody_holds_whole_logits(
    placement: Placement, every: tuple[tuple[str, Any], ...], tmp_path: Path
) -> None:
    alone = {name: stepped(name, **ALONE) for name, _ in every}
    of_ranks = call(in_shards, placement, tmp_path, every=every, timeout_s=300.0)
    for rank, of_rank in enumerate(of_ranks):
        is_last = rank >= len(of_ranks) - placement.most_shards
        for found in of_rank:
            check(found, alone[found["name"]], is_last=is_last)


def check(found: dict[str, Any], wanted: dict[str, Any], *, is_last: bool) -> None:
    """Check a step in shards; `is_last`: the process runs the last stage."""
    case = found["name"], found["how"]
    needs_whole = is_last and any(k.__name__.lower() == found["name"] for k in NEED_WHOLE)
    # With whole weights, a head as narrow as these is quicker computed whole than exchanged.
    assert wanted["sizes"], case
    assert bool(found["sizes"]) == needs_whole or found["how"] == "context", case
    for name, value in found["values"].items():
        if value is not None:  # the last stage has the output
            own = wanted["values"][name]
            atol = 1e-3 if found["name"] == "casts" else 1e-12
            assert torch.allclose(value, own, rtol=0, atol=atol), (*case, name)
