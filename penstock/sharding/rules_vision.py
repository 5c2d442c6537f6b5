"""Rules of vision networks and of vocabularies, in the notation of `rules`.

    conv2d        "achw,ncyx,n->anhw"   along a: samples   n: channels out   c: channels in
    batch_norm    "abhw,b,b->abhw"      along samples its statistics are of all devices: a kernel
    embedding     "ab,vn->abn"          along v: the vocabulary; rows of others are zeros
    cross_entropy "av,a->"              along a: partial sums of a mean; v: likewise

`spatial` dimensions, the last ones, are whole wherever a window moves over them.
"""

from collections.abc import Sequence

from penstock.costs.counting.graph import Ref

from .rules import LETTERS, WHOLE, Rule, Seen, base_name, elementwise, rule

rule(
    *(
        "hardtanh",
        "relu6",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "hardswish",
        "hardsigmoid",
        "mish",
    ),
    *("logsigmoid", "softsign", "threshold", "maximum", "minimum", "sign", "sin", "cos"),
    *("log1p", "expm1", "reciprocal", "floor", "ceil", "round", "logical_and", "logical_or"),
    *("logical_not",),
)(elementwise)


def _places(seen: Seen, *names: str) -> dict[str, int]:
    """Return which of the tensors that a call takes are its arguments of these names, in the order
    of its signature.
    """
    given = {name: seen.argument(place, name) for place, name in enumerate(names)}
    return {
        name: seen.call.takes.index(value.tensor)
        for name, value in given.items()
        if isinstance(value, Ref)
    }


def _rule(
    seen: Seen,
    names: Sequence[str],
    letters: Sequence[str],
    gives: str,
    *,
    pieces: tuple[tuple[str, int], ...] = (),
    is_linear: bool = False,
) -> Rule | None:
    """Make a rule of a call with arguments of these names, whose dimensions have these letters;
    None where it is given other tensors too.
    """
    places = _places(seen, *names)
    of_place = {places[n]: own for n, own in zip(names, letters, strict=False) if n in places}
    if sorted(of_place) != list(range(len(seen.takes))):
        return None
    return Rule(
        takes=tuple(of_place[n] for n in range(len(of_place))),
        gives=(gives,) * len(seen.gives),
        bias=places.get("bias") if names[1] == "weight" else None,
        pieces=pieces,
        is_linear=is_linear,
    )


def _samples(seen: Seen, num_others: int) -> str:
    """Return letters for what stands before the last dimensions of a call's first tensor."""
    return LETTERS[: len(seen.takes[0]) - num_others]


_CONV = ("input", "weight", "bias")


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(seen: Seen) -> Rule | None:
    """Groups are cut between them where each has as many channels out as in."""
    num_spatial = int(seen.call.function[-2])
    spatial, rows = WHOLE * num_spatial, _samples(seen, num_spatial + 1)
    groups = seen.argument(6, "groups", 1)
    channels, out = seen.takes[0][-1 - num_spatial], seen.gives[0][-1 - num_spatial]
    if groups == 1:
        turned = "cn" if "transpose" in seen.call.function else "nc"
        letters = (f"{rows}c{spatial}", turned + spatial, "n")
        return _rule(seen, _CONV, letters, f"{rows}n{spatial}")
    own = "g" if channels == out else WHOLE
    letters = (f"{rows}{own}{spatial}", f"{own}.{spatial}", own)
    pieces = (("g", channels // groups),)
    return _rule(seen, _CONV, letters, f"{rows}{own}{spatial}", pieces=pieces)


_MAXIMA = ("max_pool", "adaptive_max_pool")


@rule(
    *(
        f"{name}{dims}d"
        for name in (*_MAXIMA, "avg_pool", "adaptive_avg_pool", "lp_pool")
        for dims in (1, 2, 3)
    ),
    *(f"{name}{dims}d_with_indices" for name in _MAXIMA for dims in (1, 2, 3)),
)
def _pool(seen: Seen) -> Rule:
    name = base_name(seen.call.function)
    num_spatial = int(name.removesuffix("_with_indices")[-2])
    letters = _samples(seen, num_spatial) + WHOLE * num_spatial
    gives = (letters,) * len(seen.gives)
    return Rule(takes=(letters,), gives=gives, is_linear="avg" in name)


@rule("interpolate")
def _interpolate(seen: Seen) -> Rule:
    letters = LETTERS[:2] + WHOLE * (len(seen.takes[0]) - 2)
    return Rule(takes=(letters,), gives=(letters,), is_linear=True)


@rule("pad")
def _pad(seen: Seen) -> Rule:
    """What is padded by zeros, or by what is there, is linear.  Dimensions that are padded by
    nothing are whole too: images of another size may want it.
    """
    sizes = tuple(seen.argument(1, "pad"))
    dims = len(seen.takes[0])
    num_padded = len(sizes) // 2
    letters = LETTERS[: dims - num_padded] + WHOLE * num_padded
    is_linear = not seen.argument(3, "value")
    return Rule(takes=(letters,), gives=(letters,), is_linear=is_linear)


# -- norms ----------------------------------------------------------------------------------------


@rule("batch_norm")
def _batch_norm(seen: Seen) -> Rule | None:
    """Running statistics are whole at rest: a kernel writes all of them on each device."""
    names = ("input", "running_mean", "running_var", "weight", "bias")
    letters = LETTERS[: len(seen.takes[0])]
    return _rule(seen, names, (letters, WHOLE, WHOLE, "b", "b"), letters)


@rule("group_norm")
def _group_norm(seen: Seen) -> Rule | None:
    groups, shape = seen.argument(1, "num_groups"), seen.takes[0]
    letters = "ab" + WHOLE * (len(shape) - 2)
    names = ("input", "num_groups", "weight", "bias")
    pieces = (("b", shape[1] // groups),)
    return _rule(seen, names, (letters, "", "b", "b"), letters, pieces=pieces)


@rule("instance_norm")
def _instance_norm(seen: Seen) -> Rule | None:
    """With running statistics, which are means over samples, all devices do the same."""
    names = ("input", "running_mean", "running_var", "weight", "bias")
    if {"running_mean", "running_var"} & _places(seen, *names).keys():
        return None
    letters = "ab" + WHOLE * (len(seen.takes[0]) - 2)
    return _rule(seen, names, (letters, "", "", "b", "b"), letters)


@rule("normalize")
def _normalize(seen: Seen) -> Rule | None:
    return _all_but(seen, (seen.argument(2, "dim", 1),))


def _all_but(seen: Seen, dims: Sequence[int], *, is_linear: bool = False) -> Rule | None:
    """Leave some dimensions whole of tensors that are all named alike."""
    num_dims = len(seen.takes[0])
    whole = {dim % num_dims for dim in dims}
    letters = "".join(WHOLE if d in whole else x for d, x in enumerate(LETTERS[:num_dims]))
    gives = (letters,) * len(seen.gives)
    return Rule(takes=(letters,) * len(seen.takes), gives=gives, is_linear=is_linear)


# -- joined, divided, summed ----------------------------------------------------------------------


@rule("cat", "concat", "concatenate")
def _cat(seen: Seen) -> Rule | None:
    if len({len(shape) for shape in seen.takes}) != 1:  # torch leaves out empty ones
        return None
    return _all_but(seen, (seen.argument(1, "dim", 0),), is_linear=True)


@rule("stack")
def _stack(seen: Seen) -> Rule:
    dims = len(seen.gives[0])
    dim = seen.argument(1, "dim", 0) % dims
    letters = LETTERS[: dims - 1]
    return Rule(
        takes=(letters,) * len(seen.takes),
        gives=(letters[:dim] + WHOLE + letters[dim:],),
        is_linear=True,
    )


@rule("chunk", "split", "tensor_split", "split_with_sizes")
def _split(seen: Seen) -> Rule | None:
    default = -1 if base_name(seen.call.function) == "split_with_sizes" else 0
    return _all_but(seen, (seen.argument(2, "dim", max(default, 0)),), is_linear=True)


@rule("unbind")
def _unbind(seen: Seen) -> Rule:
    num_dims = len(seen.takes[0])
    dim = seen.argument(1, "dim", 0) % num_dims
    letters = LETTERS[: num_dims - 1]
    takes = letters[:dim] + WHOLE + letters[dim:]
    return Rule(takes=(takes,), gives=(letters,) * len(seen.gives), is_linear=True)


@rule("sum", "mean")
def _sum(seen: Seen) -> Rule:
    """What is cut of a dimension that is summed over gives partial sums, of a mean too."""
    return reduced(seen, cuts_reduced=True)


@rule("amax", "amin", "var", "std", "logsumexp", "prod", "all", "any")
def _reduction(seen: Seen) -> Rule:
    return reduced(seen, cuts_reduced=False)


def reduced(seen: Seen, *, cuts_reduced: bool) -> Rule:
    """Find the rule of what puts the numbers along some dimensions, or along all, together."""
    dims = seen.argument(1, "dim", dict(seen.call.options).get("axis"))
    dims = None if isinstance(dims, bool) else dims  # of another argument of `var`
    num_dims = len(seen.takes[0])
    dims = dims if isinstance(dims, tuple) else tuple(d for d in (dims,) if d is not None)
    gone = {d % num_dims for d in dims or range(num_dims)} if num_dims else set()
    letters = LETTERS[:num_dims]
    takes = letters if cuts_reduced else "".join(_kept(letters, gone, WHOLE))
    between = WHOLE if len(seen.gives[0]) == num_dims else ""
    gives = "".join(_kept(letters, gone, between))
    return Rule(takes=(takes,), gives=(gives,) * len(seen.gives), is_linear=cuts_reduced)


def _kept(letters: str, gone: set[int], instead: str) -> list[str]:
    return [instead if d in gone else x for d, x in enumerate(letters)]


# -- vocabularies ---------------------------------------------------------------------------------


@rule("embedding")
def _embedding(seen: Seen) -> Rule | None:
    """A table that looks at all words together, or changes, is not divided."""
    if seen.argument(3, "max_norm") or any(
        seen.argument(place, name, default=False)
        for place, name in ((5, "scale_grad_by_freq"), (6, "sparse"))
    ):
        return None
    words = _samples(seen, 0)
    return _rule(seen, ("input", "weight"), (words, "vn"), f"{words}n")


@rule("cross_entropy", "nll_loss")
def _loss(seen: Seen) -> Rule | None:
    """The vocabulary is cut where targets are numbers of words that all weigh as much."""
    names = ("input", "target", "weight")
    places = _places(seen, *names)
    if len(places) < 2:
        return None
    scores, targets = (seen.takes[places[name]] for name in names[:2])
    is_legacy = seen.argument(3, "size_average") is not None
    if is_legacy or seen.argument(5, "reduce") is not None:
        return None
    rest = LETTERS[: len(scores) - 1]
    batch, others = rest[:1], rest[1:]
    has_numbers = len(targets) == len(scores) - 1
    own = "v" if has_numbers and "weight" not in places else WHOLE
    letters = (f"{batch}{own}{others}", rest if has_numbers else f"{batch}.{others}", WHOLE)
    gives = rest if seen.argument(6, "reduction", "mean") == "none" else ""
    return _rule(seen, names, letters, gives)
