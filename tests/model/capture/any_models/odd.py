"""What is odd, and cut all the same: hand-made chains, and odd uses of usual models."""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .chain import WIDTH, Chain, UsedTwice, between, inputs
from .filling import FILLING
from .handwritten import EXPERTS
from .made import TEXT, AnyModel, Made, decoder, encoder, hugging_face, masked, uncached, words


@dataclass
class Pair:  # what goes from block to block
    value: Tensor
    scale: float


class PairBlock(nn.Linear):
    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]  # on purpose
        return Pair(super().forward(pair.value) * pair.scale, pair.scale / 2)


class Pairs(Chain):
    kinds = (PairBlock,) * 3

    def forward(self, x: Tensor) -> Tensor:
        pair = Pair(x, 2.0)
        for block in self.blocks:
            pair = block(pair)
        return pair.value


class Scaled(Chain):
    """Scales what later blocks give by a value without dimensions, made after the first one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        scale = x.square().mean()
        for block in self.blocks[1:]:
            x = block(x) * scale
        return x


class InPlace(Chain):
    """Changes values between blocks in place, also through a view, and uses them later."""

    def between(self, x: Tensor, number: int) -> Tensor:
        x += 1
        x.mul_(0.5)
        x[:, number] = 0.0
        return x


class Shifting(Chain):
    """Makes a value from its input, changes it in place, and needs it for its last block only."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = x[:, :-1]
        shifted.masked_fill_(shifted == 0, 0.5)
        for block in self.blocks[:-1]:
            x = block(x)
            if x.sum() > 1e9:
                x = x / 2
        return x + self.blocks[-1](shifted)


class Twice(Chain):  # calls one block again and again
    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = x + block(x).tanh()
        return x


class Double(torch.autograd.Function):  # gives twice its input, and three times the gradient
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3


class Picking(Chain):  # takes as many rows as the values say
    def between(self, x: Tensor, number: int) -> Tensor:
        if number == 1:
            chosen = x[x[:, 0] > x[:, 0].min()]
            x = x + chosen.mean(0).nan_to_num() * chosen.shape[0]
        return x


class WithToken(Chain):
    """Reads parameters between blocks where nothing routed takes part, and its own mode."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.linspace(0, 1, WIDTH))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.full((WIDTH,), 0.5))

    def between(self, x: Tensor, _number: int) -> Tensor:
        token = self.token.exp().expand(len(x), -1)
        x = x + token * (2.0 if self.training else 1.0)
        return x * self.scale.exp() + self.offset


class Checkpoints(Chain):  # has each block, or two of them, in an activation checkpoint of its own
    def __init__(self, *, reentrant: bool, together: bool) -> None:
        super().__init__()
        self.reentrant, self.together = reentrant, together
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        run = partial(checkpoint, use_reentrant=self.reentrant)
        if self.together:
            x = self.blocks[0](x)
            return run(lambda y: self.blocks[2](self.blocks[1](y).tanh() * self.scale), x)
        x = self.blocks[0](x)
        for block in (self.blocks[1], self.blocks[2]):
            x = x + run(block, x).sigmoid()
        return x


class TiedCheckpoints(Checkpoints):  # its last block has the weight of the first one
    def __init__(self) -> None:
        super().__init__(reentrant=False, together=False)
        self.blocks[2].weight = self.blocks[0].weight


class DroppingCheckpoints(Checkpoints):
    """Two blocks in a checkpoint, with dropout inside and between them."""

    def __init__(self) -> None:
        super().__init__(reentrant=False, together=True)
        self.blocks[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4))
        self.blocks[2] = nn.Sequential(nn.Dropout(0.4), nn.Linear(WIDTH, WIDTH))


class WhileLoop(Chain):  # doubles as long as the values say so
    def between(self, x: Tensor, _number: int) -> Tensor:
        while x.abs().sum() < 5:
            x = x * 2
        return x


class ByNumpy(Chain):
    """Looks at values through NumPy, and uses what it found after later blocks, too."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0
        for block in self.blocks:
            x = block(x) * scale
            array = x.detach().numpy()
            scale = float(array.max() - array.min())
        return x


@torch.library.custom_op("penstock_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _scaled_backward(ctx: Any, gradient: Tensor) -> Any:
    return gradient * ctx.factor, None


def _keep_factor(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.factor = inputs[1]


scaled.register_autograd(_scaled_backward, setup_context=_keep_factor)


def by_library(_: Chain, x: Tensor, number: int) -> Tensor:
    return scaled(x, 1.5) if number else torch.ops.penstock_tests.scaled(x, 0.5)


def reshaped(_: Chain, x: Tensor, number: int) -> Tensor:
    pairs = x.reshape(len(x), 2, WIDTH // 2).permute(0, 2, 1)
    repeated = pairs[:, :, None].expand(-1, -1, 3, -1).mean(2)
    return torch.einsum("bij->bji", repeated).reshape(len(x), WIDTH)


def masked_by_sign(_: Chain, x: Tensor, number: int) -> Tensor:
    mask = torch.ones(x.shape)
    mask[x < 0] = 0.1
    return x * mask


def typed(_: Chain, x: Tensor, number: int) -> Tensor:
    """Ask for types, and for other ones."""
    assert x.type() == "torch.FloatTensor"
    return x.type(torch.float64).exp().type_as(x)


def hooked(kind: type[Chain] = Chain) -> Chain:
    made = kind()
    made.blocks[0].register_forward_hook(lambda _module, _inputs, output: output * 2)
    return made


def compiled() -> Chain:
    made = Chain()
    for block in made.blocks:
        block.compile(backend="eager")
    return made


def frozen() -> Chain:
    made = Chain()
    made.blocks[0].requires_grad_(False)
    return made


class TensorHook(Chain):  # changes gradients between blocks
    def between(self, x: Tensor, _number: int) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return x


class ByGradient(Chain):
    """Goes another way where gradients are recorded, and needs other values there."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        if x.requires_grad:
            x = x * 0.5
        x = self.blocks[2](self.blocks[1](x) + 1)
        return x + first if torch.is_grad_enabled() else x


@dataclass
class Settings:
    kind: str | None = None


class Settling(Chain):
    """Sets what its settings leave open in its first forward, and once and for all."""

    is_evaluated = False

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def between(self, x: Tensor, _number: int) -> Tensor:
        if self.is_evaluated == self.training:
            self.is_evaluated = not self.training
        if self.settings.kind is None:
            self.settings.kind = "tanh" if x.dtype.is_floating_point else "none"
        return getattr(torch, self.settings.kind)(x)


class Biased(nn.Module):
    """Picks a bias for its place, and keeps it while it does not train, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Parameter(torch.linspace(0, 1, WIDTH))
        self.parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.cache: dict[torch.device, Tensor] = {}

    def bias(self, device: torch.device) -> Tensor:
        if self.training:
            self.cache.clear()
            return self.biases.flip(0)
        if device not in self.cache:
            self.cache[device] = self.biases.flip(0)
        return self.cache[device]

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x + self.bias(x.device))


class Scale(nn.Module):  # has no parameters, and computes what it scales by once
    found: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.found is None:
            self.found = torch.full((WIDTH,), 0.5, device=x.device)
        return x * self.found


class Caching(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Biased(), Biased(), Biased()
        self.scales = nn.ModuleList(Scale() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.blocks, (self.first, self.second, self.third), self.scales, strict=True)
        for block, biased, scale in parts:
            x = x + scale(biased(block(x)))
        return x


class Adapted(nn.Module):  # a frozen linear layer, and a small one beside it that is trained
    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x)) * 0.5


class Drawing(Chain):  # draws between blocks, in many ways; where it does not train, in none
    def between(self, x: Tensor, number: int) -> Tensor:
        x = functional.alpha_dropout(x, 0.2, self.training)
        if number == 0:
            x = functional.rrelu(functional.dropout(x, 0.1, self.training), training=self.training)
        elif self.training:
            x = x + torch.rand(len(x), 1) + x.new_empty(WIDTH).log_normal_() + torch.rand_like(x)
            x = x + functional.gumbel_softmax(x) + torch.poisson(x.detach().abs())
        rows = x[None, None]
        drop = 0.3 if self.training else 0.0
        return functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=drop)[0, 0]


class Shaken(nn.Linear):  # draws Python's, NumPy's and torch's random numbers in training
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.training:
            return y
        return functional.dropout(y * random.uniform(0.5, 1.5), 0.2) + float(numpy.random.randn())


class DrawingOutside(Chain):
    """Draws Python's and NumPy's random numbers between blocks, of which the second does too."""

    kinds = (nn.Linear, Shaken, nn.Linear)

    def between(self, x: Tensor, number: int) -> Tensor:
        if not self.training:
            return x
        rows = torch.from_numpy(numpy.random.permutation(len(x)))
        return x[rows] * random.uniform(0.5, 1.5)


class DroppingOutside(Chain):
    """Leaves out any of its blocks by what Python's and NumPy's random numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            drawn = random.uniform(0, 1) if number % 2 else numpy.random.random()
            if drawn > 0.5 or not self.training:
                x = block(x).tanh()
        return x


def chain(kind: Callable[[], Chain]) -> Callable[[], Made]:
    return lambda: (kind(), inputs)


def with_labels(batch: int) -> dict[str, Any]:
    return masked(batch, labels=words(batch))


def with_classes(batch: int) -> dict[str, Any]:
    return masked(batch, labels=torch.arange(batch) % 3)


def asking(what: str) -> Callable[[int], dict[str, Any]]:
    return lambda batch: masked(batch, **{what: True})


def llama(**options: Any) -> Any:
    return decoder("Llama", **options)()[0]


def frozen_start() -> Made:
    made = llama()
    for part in (made.model.embed_tokens, *made.model.layers[:2]):
        part.requires_grad_(False)
    return made, masked


def adapted() -> Made:
    made = llama().requires_grad_(False)
    for layer in made.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return made, masked


def checkpointed(*, reentrant: bool, dropout: float = 0.0) -> Callable[[], Made]:
    def build() -> Made:
        made = llama(attention_dropout=dropout)
        with warnings.catch_warnings():  # newer versions have a name of their own for it
            warnings.simplefilter("ignore")
            made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return made, uncached

    return build


class Collecting(Chain):
    """Writes what it computes into a tensor that every stage would make for itself."""

    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros(len(x), 3, WIDTH)
        for number, block in enumerate(self.blocks):
            x = block(x)
            found[:, number] = x
        return found.sum(1)


class IntoOut(Chain):
    def between(self, x: Tensor, _number: int) -> Tensor:
        room = torch.empty(x.shape)
        with torch.no_grad():
            torch.mul(x, 2, out=room)
        return x + room


class Numbering(Chain):
    """Writes row by row, as many as there are, as models of images do with places of words."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.zeros(2, len(x), dtype=torch.long)
        for row in range(len(x)):
            places[:, row] = (x[row] > 0).sum()
        for block in self.blocks:
            x = block(x) + places.float().mean(0)[:, None]
        return x


class OnceWithout(Chain):
    """Calls a block with and without gradients, and one that shares its weight without."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.blocks[0](x)
        x = self.blocks[1](self.blocks[0](x).tanh())
        with torch.no_grad():
            after = self.blocks[2](x)
        return self.blocks[2](x) + before + after


class ByNorm(nn.Linear):  # looks at its weight without gradients
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = self.weight.norm()
        return super().forward(x) / norm


class SharedNorm(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = ByNorm(WIDTH, WIDTH)
        self.blocks[2].weight = self.blocks[0].weight


class Reaching(nn.Module):  # multiplies by a weight that it is no owner of
    def __init__(self, weight: Callable[[], Tensor]) -> None:
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.zeros(WIDTH)), weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight(), self.bias)


class Reached(Chain):  # its last block comes by the weight of the first one through a function
    def __init__(self) -> None:
        super().__init__()
        first: Any = self.blocks[0]
        self.blocks[2] = Reaching(lambda: first.weight)


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight, self.bias)


class Handed(Chain):  # its last block is handed the weight of the first one
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Given()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[1](self.blocks[0](x)), self.blocks[0].weight)


def counted(_model: Any, x: Tensor, _number: int) -> Tensor:
    """Make tensors by a number that is a value of the batch, which torch takes for one."""
    number: Any = (x > 0).sum()
    return x + torch.arange(number).sum() + torch.full((WIDTH,), number)


def needing_gradient() -> Made:
    return Chain(), lambda batch: inputs(batch).requires_grad_()


def checkpoints(*, reentrant: bool, together: bool) -> Callable[[], Made]:
    return chain(lambda: Checkpoints(reentrant=reentrant, together=together))


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


ADDED_IN_BFLOAT16 = (
    "autocast adds the gradients of a weight's uses in bfloat16, and each stage only its own"
)
GPT2 = partial(hugging_face, "GPT2", "LMHeadModel", TEXT)
MIXTRAL = partial(decoder, "Mixtral", num_local_experts=4, num_experts_per_tok=2)

CLASSES = hugging_face("Bert", "ForSequenceClassification", TEXT, with_classes, num_labels=3)
HIDDEN, EAGER = asking("output_hidden_states"), {"attn_implementation": "eager"}
ATTENTIONS = decoder("Llama", inputs=asking("output_attentions"), **EAGER)
ALBERT = encoder("Albert", embedding_size=16)
DROPPED = "layers dropped by Python's and NumPy's random numbers"
LAYERS_DROPPED = AnyModel(DROPPED, chain(DroppingOutside), "other layers at every step")
CHAINS = (
    AnyModel("a checkpoint per block", checkpoints(reentrant=False, together=False)),
    AnyModel("a reentrant one per block", checkpoints(reentrant=True, together=False)),
    AnyModel("a checkpoint of two blocks", checkpoints(reentrant=False, together=True)),
    AnyModel("a reentrant one of two", checkpoints(reentrant=True, together=True)),
    AnyModel("a checkpoint around a tied block", chain(TiedCheckpoints)),
    AnyModel("a checkpoint around dropout", chain(DroppingCheckpoints)),
    AnyModel("own autograd function", chain(between(lambda _, x, number: Double.apply(x)))),
    AnyModel("hook on a block", chain(hooked)),
    AnyModel("hook on a block of two stages", chain(partial(hooked, Twice))),
    AnyModel("hook on a gradient", chain(TensorHook)),
    AnyModel("branches on gradients", chain(ByGradient)),
    AnyModel("settings made in the first forward", chain(Settling)),
    AnyModel("caches between blocks", chain(Caching)),
    AnyModel("while loop on values", chain(WhileLoop)),
    AnyModel("shapes that depend on values", chain(Picking)),
    AnyModel("a value taken for a number", chain(between(counted))),
    AnyModel("NumPy between blocks", chain(ByNumpy)),
    AnyModel("dataclass between blocks", chain(Pairs)),
    AnyModel("input that requires a gradient", needing_gradient, routed=True),
    AnyModel("block used twice", chain(Twice)),
    AnyModel("operator of torch.library", chain(between(by_library))),
    AnyModel("axes split and joined", chain(between(reshaped))),
    AnyModel("a value without dimensions", chain(Scaled)),
    AnyModel("writes in place", chain(InPlace)),
    AnyModel("writes in place, used much later", chain(Shifting)),
    AnyModel("results gathered in a tensor of zeros", chain(Collecting)),
    AnyModel("a mask made between blocks", chain(between(masked_by_sign))),
    AnyModel("out= between blocks", chain(IntoOut)),
    AnyModel("rows written one by one", chain(Numbering)),
    AnyModel("a block with and without gradients", chain(OnceWithout)),
    AnyModel("a tied weight read without gradients", chain(SharedNorm)),
    AnyModel("a weight of another block", chain(Reached)),
    AnyModel("a weight handed to another block", chain(Handed)),
    *EXPERTS,
    AnyModel("parameters between blocks", chain(WithToken)),
    AnyModel("frozen block", chain(frozen)),
    AnyModel("types asked and changed", chain(between(typed))),
    AnyModel("random numbers between blocks", chain(Drawing)),
    AnyModel("Python's and NumPy's random numbers between blocks", chain(DrawingOutside)),
    LAYERS_DROPPED,
    *FILLING,
    AnyModel("autocast, a value used twice", chain(UsedTwice), within=autocast),
)
"""Small ones: they take no time."""
ODD = (
    *CHAINS,
    AnyModel("labels in, loss out", GPT2(with_labels)),
    AnyModel("labels of classes", CLASSES, "sets its problem_type in its first forward"),
    AnyModel("hidden states in the output", decoder("Llama", inputs=HIDDEN)),
    AnyModel("a cache in the output", decoder("Llama", inputs=asking("use_cache"))),
    AnyModel("attentions in the output", ATTENTIONS),
    AnyModel("router's logits in the output", MIXTRAL(inputs=asking("output_router_logits"))),
    AnyModel("autocast to bfloat16", decoder("Llama"), within=autocast),
    AnyModel("autocast, tied", decoder("Llama", tie_word_embeddings=True), within=autocast),
    AnyModel("autocast, layer called again", ALBERT, "", ADDED_IN_BFLOAT16, autocast),
    AnyModel("frozen start", frozen_start),
    AnyModel("adapters beside frozen layers", adapted),
    AnyModel("compiled blocks", chain(compiled)),
    AnyModel("checkpointing of transformers", checkpointed(reentrant=False)),
    AnyModel("the same, reentrant", checkpointed(reentrant=True)),
    AnyModel("the same, with dropout inside", checkpointed(reentrant=False, dropout=0.2)),
)
