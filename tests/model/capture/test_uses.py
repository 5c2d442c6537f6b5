"""What a user does with a captured model beside training it: features, odd weights, keywords."""

import copy
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import penstock
from penstock import Pipeline
from penstock.errors import BatchError, BoundaryError, CutError, RecomputeError
from penstock.model.capture.inputs import EVERYWHERE, ROUTED
from penstock.torch_private import fake_tensors
from tests.model.capture.any_models.chain import WIDTH, Chain, inputs, of_blocks
from tests.model.capture.any_models.made import DECODER, words
from tests.model.capture.running import assert_equal, assert_trains_as_whole, gradients, loss
from tests.side_by_side import same_bits


def in_parts(called: Callable[..., Tensor], size: int, *batch: Tensor) -> Tensor:
    """Give what a call gives for micro-batches of `size`: kernels may round otherwise for more."""
    return torch.cat([called(*part) for part in zip(*(x.split(size) for x in batch), strict=True)])


@pytest.mark.parametrize("num_stages", [1, 3])
def test_what_blocks_give_is_kept_beside_the_output(num_stages: int) -> None:
    model, x = Chain(), inputs(6)
    layers = penstock.capture(model, x, keep=["blocks.0", "blocks.1"])
    with Pipeline(
        layers, num_stages=num_stages, num_microbatches=3, loss=loss, threads_per_stage=1
    ) as pipe:
        output, features = pipe.eval_step(x)
        pipe.train_step(x, x)  # whose loss is given the output alone
    first = in_parts(model.blocks[0], 2, x)
    assert list(features) == ["blocks.0", "blocks.1"]
    assert torch.equal(features["blocks.0"], first)
    assert torch.equal(features["blocks.1"], in_parts(model.blocks[1], 2, first))
    assert torch.equal(output, in_parts(model, 2, x))


class InOrder(Chain):  # uses its keyword arguments in the order in which they are given
    def forward(self, **given: Tensor) -> Tensor:  # type: ignore[override]  # on purpose
        x = torch.zeros(())
        for block, value in zip(self.blocks, given.values(), strict=False):
            x = block(value + x)
        return x


def test_keyword_arguments_keep_their_order() -> None:
    x = inputs(4)
    given = {"second": x, "first": x * 2}
    found = penstock.capture(InOrder(), given, blocks=["blocks.0", "blocks.1"])
    assert "are the model's, to the bit" in str(found)


class Masked(Chain):  # takes arguments by position, by name, and by both
    def forward(self, ids: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        for block in self.blocks:
            ids = block(ids).tanh() * (1.0 if mask is None else mask)
        return ids * scale


class Gathering(Chain):
    """Takes any number of arguments, one of them under a name that a position has too."""

    def forward(  # type: ignore[override]  # on purpose
        self, x: Tensor, /, *more: Tensor, **named: Any
    ) -> Tensor:
        for block, value in zip(self.blocks, more, strict=False):
            x = block(x) * value
        return self.blocks[2](x) * named["scale"] + named["x"]


CALLS: dict[str, Callable[..., Tensor]] = {
    "by name": lambda called, x, mask: called(ids=x, mask=mask),
    "in another order": lambda called, x, mask: called(scale=2.0, mask=mask, ids=x),
    "by position": lambda called, x, mask: called(x, mask),
    "by both": lambda called, x, mask: called(x, mask=mask, scale=2.0),
    "without what may be left out": lambda called, x, _: called(ids=x),
}
EXAMPLES = {
    "a mapping": lambda x, mask: {"ids": x, "mask": mask},
    "a tuple": lambda x, mask: (x, mask),
    "both": lambda x, mask: {0: x, "mask": mask},
}


def compare_calls(pipe: Pipeline, model: nn.Module, call: Callable[..., Tensor]) -> None:
    """Compare calls of a pipeline of two micro-batches with the model's own: outputs of
    `eval_step` and of the module form, and the gradients of weights and of inputs.
    """
    batch = [x.requires_grad_() for x in (inputs(6), inputs(6).cos())]
    model.zero_grad()
    parts = [call(model, *halves) for halves in zip(*(x.split(3) for x in batch), strict=True)]
    expected = torch.cat(parts)
    for part in parts:
        part.square().sum().backward()
    wanted = [leaf.grad for leaf in (*model.parameters(), *batch)]
    for leaf in (*model.parameters(), *batch):
        leaf.grad = None
    with torch.no_grad():
        assert torch.equal(call(pipe.eval_step, *batch), expected)
    output = call(pipe, *batch)
    assert torch.equal(output, expected)
    output.square().sum().backward()
    found = [leaf.grad for leaf in (*model.parameters(), *batch)]
    assert all(map(same_bits, found, wanted))


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_a_captured_model_is_called_as_the_model_is(example: Callable[..., Any]) -> None:
    model = Masked()
    options: dict[str, Any] = {"num_microbatches": 2, "loss": loss, "threads_per_stage": 1}
    with Pipeline(
        model, num_stages=3, example_inputs=example(inputs(6), inputs(6).cos()), **options
    ) as pipe:
        for call in CALLS.values():
            compare_calls(pipe, model, call)
        x, mask = inputs(6), inputs(6).cos()
        given = [{"mask": mask, "ids": x}, (x, mask), {0: x, "mask": mask}]
        losses = [pipe.train_step(value) for value in given]
        outputs = [pipe.eval_step(value) for value in given]
        assert len({float(found) for found in losses}) == 1
        assert all(torch.equal(found, in_parts(model, 3, x, mask)) for found in outputs)
        with pytest.raises(TypeError, match="multiple values for argument 'ids'"):
            pipe.eval_step(x, ids=x)
        with pytest.raises(CutError, match=r"the key 2: .*numbers 0, 1, .* has 1"):
            pipe.eval_step({0: x, 2: mask})


@pytest.mark.parametrize("where", [ROUTED, EVERYWHERE])
def test_positions_without_a_name_and_names_without_a_position_are_kept_apart(where: str) -> None:
    model, x = Gathering(), inputs(6)
    example = {0: x, 1: x.cos(), 2: x.sin(), "x": x.exp(), "scale": 3.0}
    layers = penstock.capture(model, example, inputs=where)

    def call(called: Callable[..., Tensor], x: Tensor) -> Tensor:
        return called(x, x.cos(), x.sin(), scale=3.0, x=x.exp())

    expected = in_parts(lambda part: call(model, part), 3, x)
    with Pipeline(layers, num_stages=3, num_microbatches=2, threads_per_stage=1) as pipe:
        for called in (pipe, pipe.eval_step):
            assert torch.equal(call(called, x), expected)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class ByFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Through.apply(x, self.weight)


class SharedFunction(Chain):
    """Calls a block on two stages whose weight goes through a function of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = ByFunction(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 0, 2):
            x = x + self.blocks[number](x).tanh()
        return x


class SparseWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", [SharedFunction, SparseWords])
def test_gradients_of_weights_of_all_kinds_are_the_models(kind: type[nn.Module]) -> None:
    x = torch.arange(8).view(4, 2) if kind is SparseWords else inputs(4)
    assert_trains_as_whole(kind(), x, num_microbatches=2)


def detector() -> tuple[nn.Module, dict[str, Any]]:
    """Make a DETR, which is given as many boxes as each image has."""
    pytest.importorskip("scipy", reason="transformers matches boxes with it")
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 24], depths=[1, 1], layer_type="basic"
    )
    backbone.out_features = ["stage2"]
    sides = ("encoder", "decoder")
    options: dict[str, Any] = {"use_timm_backbone": False, "use_pretrained_backbone": False}
    options |= {"backbone_config": backbone, "d_model": 32, "num_queries": 6, "num_labels": 5}
    options |= {"auxiliary_loss": True}
    given: dict[str, Any] = dict(
        **{f"{side}_layers": 2 for side in sides},
        **{f"{side}_ffn_dim": 48 for side in sides},
        **{f"{side}_attention_heads": 4 for side in sides},
        **options,
    )
    config = transformers.DetrConfig(**given)
    labels = [
        {"class_labels": torch.arange(n), "boxes": 0.3 + 0.4 * torch.rand(n, 4)}
        for n in (1, 3, 2, 4)
    ]
    images = torch.randn(4, 3, 32, 32)
    return transformers.DetrForObjectDetection(config), {"pixel_values": images, "labels": labels}


def boxes(found: Any) -> list[Tensor]:
    auxiliary = (tensor for each in found.auxiliary_outputs for tensor in each.values())
    return [found.logits, found.pred_boxes, found.last_hidden_state, *auxiliary]


def states(found: Any) -> list[Tensor]:
    return [found.logits, *found.hidden_states]


UNJOINED: dict[str, Callable[[Any], Any]] = {
    r"output.router_logits\[1\].*\(14, 4\)": lambda f: f.router_logits[1].mean(),
    r"DynamicCache": lambda f: f.past_key_values[0],
}


def routing() -> tuple[nn.Module, dict[str, Any]]:
    """Make a mixture of experts that gives what its routers say of each word of the batch."""
    options: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    options |= {"output_router_logits": True, "output_hidden_states": True}
    config = transformers.MixtralConfig(**{**DECODER, "num_hidden_layers": 3}, **options)
    batch = {"input_ids": words(4), "labels": words(4), "use_cache": True}
    return transformers.MixtralForCausalLM(config), batch


@pytest.mark.parametrize(
    ("make", "scalars", "joined", "unjoined"),
    [
        (detector, lambda found: {"loss": found.loss, **found.loss_dict}, boxes, {}),
        (routing, lambda f: {"loss": f.loss, "aux_loss": f.aux_loss}, states, UNJOINED),
    ],
    ids=["detr", "mixtral"],
)
def test_outputs_of_all_kinds_are_those_of_the_model(make, scalars, joined, unjoined) -> None:
    torch.manual_seed(0)
    model, batch = make()
    whole = copy.deepcopy(model.eval())
    halves = [
        whole(**{name: v if type(v) is bool else v[part] for name, v in batch.items()})
        for part in (slice(0, 2), slice(2, 4))
    ]
    for half in halves:
        (half.loss / 2).backward()
    with Pipeline(
        model, num_stages=2, num_microbatches=2, example_inputs=batch, threads_per_stage=1
    ) as pipe:
        evaluated, called = pipe.eval_step(batch), pipe(**batch)
        called.loss.backward()
    assert_equal(gradients(model), gradients(whole))
    for found in (evaluated, called):
        assert type(found) is type(halves[0]) and str(type(found).__name__) in repr(found)
        one, other = map(scalars, halves)
        for name, value in scalars(found).items():
            torch.testing.assert_close(value, one[name] / 2 + other[name] / 2)
        for tensor, *parts in zip(joined(found), *map(joined, halves), strict=True):
            assert torch.equal(tensor, torch.cat(parts))
        for message, use in unjoined.items():
            with pytest.raises((BoundaryError, CutError), match=message):
                use(found)


class Force(nn.Linear):  # returns a gradient of what it computes
    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = super().forward(x).tanh().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


class ForceAnywhere(Force):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


class Asserting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert torch.is_grad_enabled(), "no gradients"
        return super().forward(x)


@pytest.mark.parametrize("kind", [Force, Asserting])
def test_a_model_that_needs_gradients_in_evaluation_is_told_what_to_do(kind: Any) -> None:
    message = r"Made runs with gradients and not without.*torch\.enable_grad\(\)"
    with pytest.raises(CutError, match=message):
        penstock.capture(of_blocks(kind), inputs())


def test_what_it_is_told_to_do_helps() -> None:
    layers = penstock.capture(of_blocks(ForceAnywhere), inputs())
    assert str(layers).endswith("are the model's, to the bit")


def fake() -> Tensor:
    with fake_tensors():
        return torch.zeros(2, WIDTH)


def on_meta() -> Tensor:
    return torch.zeros(2, WIDTH, device="meta")


@pytest.mark.parametrize("make, where", [(fake, "under FakeTensorMode"), (on_meta, "on the meta")])
def test_inputs_without_values_are_refused(make: Any, where: str) -> None:
    message = rf"inputs hold a tensor of shape \(2, 4\) .*{where}.* Give tensors with values"
    with pytest.raises(BatchError, match=message):
        penstock.capture(Chain(), make())
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pipe = Pipeline(layers, num_stages=2, threads_per_stage=1, num_microbatches=1)
    with pipe, pytest.raises(BatchError, match=message):
        pipe.eval_step(make())


class ByName(Chain):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x["x"] if isinstance(x, dict) else x)


@pytest.mark.parametrize("is_argument", [True, False])
def test_a_read_only_view_of_a_dict_is_a_mapping_like_any_other(is_argument: bool) -> None:
    view: Any = MappingProxyType({"x": inputs(2)})
    given = (view,) if is_argument else view
    model = ByName()
    with Pipeline(
        model, num_stages=2, example_inputs=given, threads_per_stage=1, num_microbatches=1
    ) as pipe:
        assert torch.equal(pipe.eval_step(given), model(inputs(2)))


def test_an_embedding_that_changes_its_weight_is_named_where_it_is_computed_again() -> None:
    layers = nn.Sequential(nn.Embedding(5, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH))
    message = r"nn\.Embedding\(max_norm=\.\.\.\), leave out max_norm"
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "threads_per_stage": 1}
    pipe = Pipeline(layers, loss=lambda y, _: y.square().mean(), **options)
    with pipe, pytest.raises(RecomputeError, match=message):
        pipe.train_step(torch.arange(4))
