"""Rules of vision networks, in the notation of `rules.spell`.

    conv2d        "*c.., nc.., n -> *n.."    along *: samples   n: channels out   c: channels in
    batch_norm    "*, ., ., b, b -> *"       a kernel takes statistics of all devices' samples

Dimensions over which a window moves, the last ones, are whole.
"""

from .rules import LETTERS, WHOLE, Rule, Seen, rule, spell, spelled

for _num_spatial in (1, 2, 3):
    _letters = "*" + WHOLE * _num_spatial
    for _names, _is_linear in (
        ("max_pool{0}d max_pool{0}d_with_indices lp_pool{0}d", False),
        ("adaptive_max_pool{0}d adaptive_max_pool{0}d_with_indices", False),
        ("avg_pool{0}d adaptive_avg_pool{0}d", True),
    ):
        spelled(
            _names.format(_num_spatial), f"input {_letters} -> {_letters}", is_linear=_is_linear
        )
spelled("interpolate", "input ab_ -> ab_", is_linear=True)
# running statistics are whole at rest: a kernel writes all of them on each device
spelled("batch_norm", "input *, running_mean ., running_var ., weight b, bias b -> *")
# with running statistics, which are means over samples, the call runs replicated
spelled("instance_norm", "input ab_, running_mean, running_var, weight b, bias b -> ab_")


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(seen: Seen) -> Rule | None:
    """Groups are cut between them where each has as many channels out as in."""
    num_spatial = int(seen.call.function[-2])
    spatial = WHOLE * num_spatial
    groups = seen.argument(6, "groups", 1)
    if groups == 1:
        turned = "cn" if "transpose" in seen.call.function else "nc"
        notation = f"input *c{spatial}, weight {turned}{spatial}, +bias n -> *n{spatial}"
        return spell(seen, notation)
    channels, out = seen.takes[0][-1 - num_spatial], seen.gives[0][-1 - num_spatial]
    g = "g" if channels == out else WHOLE
    notation = f"input *{g}{spatial}, weight {g}.{spatial}, +bias {g} -> *{g}{spatial}"
    return spell(seen, notation, pieces=(("g", channels // groups),))


@rule("group_norm")
def _group_norm(seen: Seen) -> Rule | None:
    pieces = (("b", seen.takes[0][1] // seen.argument(1, "num_groups")),)
    return spell(seen, "input ab_, num_groups, weight b, bias b -> ab_", pieces=pieces)


@rule("pad")
def _pad(seen: Seen) -> Rule:
    """Padding by zeros, or by values of the tensor, is linear.

    Dimensions that are padded by nothing are whole too: images of another size may want it.
    """
    num_padded = len(tuple(seen.argument(1, "pad"))) // 2
    letters = LETTERS[: len(seen.takes[0]) - num_padded] + WHOLE * num_padded
    return Rule(takes=(letters,), gives=(letters,), is_linear=not seen.argument(3, "value"))
