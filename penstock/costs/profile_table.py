"""A profile as tables for a person."""

from collections.abc import Iterator, Sequence

from penstock.trace.units import bytes_text, columns, count_text, percent_text, time_text

from .profile import AtSize, LayerKind, LayerWeights, Profile

_HEAD = ("layer", "kind", "draws")
_COUNTED = ("GFLOPs", "kept", "boundary", "parameters")
_TIMES = ("F", "B", "W", "recompute")


def profile_lines(profile: Profile, priced: Sequence[AtSize] = ()) -> Iterator[str]:
    """Yield a table for each micro-batch size: with seconds of each layer where these were
    measured, or `priced` for the sizes.

    F is a forward, B a whole backward and W its weight part; "kept" is what a layer saves for
    its backward, "boundary" what lives between it and the next one.
    """
    measured = f", measured on {profile.measured_on}" if profile.measured_on else ", counted"
    threads = f" with {count_text(profile.threads, 'thread')}" if profile.measured_on else ""
    yield f"{profile.name}: {count_text(len(profile.layers), 'layer')}{measured}{threads}"
    for size in priced or profile.sizes:
        yield ""
        yield f"a micro-batch of {count_text(size.microbatch_size, 'sample')}:"
        yield from columns(list(_rows(profile, size, is_priced=bool(priced))), num_left=len(_HEAD))


def _rows(profile: Profile, size: AtSize, *, is_priced: bool) -> Iterator[tuple[str, ...]]:
    has_times = is_priced or profile.measured_on is not None
    spread = ("spread",) if has_times and not is_priced else ()
    yield (*_HEAD, *(_TIMES if has_times else ()), *spread, *_COUNTED)
    kept, boundaries = kept_bytes(size), boundary_bytes(size)
    for n, facts in enumerate(profile.layers):
        kind = size.layer(n)
        yield (
            facts.name,
            facts.kind,
            "yes" if kind.draws else "",
            *(_times(kind, has_spread=bool(spread)) if has_times else ()),
            *_counted(kind, kept[n], boundaries[n], profile.weights[n]),
        )
    if size.loss is not None and size.loss.operators:
        times = _times(size.loss, has_spread=bool(spread)) if has_times else ()
        none = LayerWeights(parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0)
        yield ("loss", "", "", *times, *_counted(size.loss, size.loss.inner_bytes, 0, none))


def _times(kind: LayerKind, *, has_spread: bool) -> tuple[str, ...]:
    found = kind.seconds
    if found is None:
        return ("-",) * (len(_TIMES) + has_spread)
    seconds = (found.forward_s, found.backward_s, found.weight_s, found.recompute_s)
    return (*map(time_text, seconds), *([percent_text(found.spread)] if has_spread else []))


def _counted(kind: LayerKind, kept: int, boundary: int, weights: LayerWeights) -> tuple[str, ...]:
    flops = sum(x.flops * x.count for x in kind.operators)
    sizes = (kept, boundary, weights.parameter_bytes)
    return (f"{flops / 1e9:.3g}", *(bytes_text(size) if size else "0" for size in sizes))


def kept_bytes(size: AtSize) -> list[int]:
    """Return what each layer alone saves for its backward, each storage once."""
    found = []
    for n, places in enumerate(size.saved):
        storages = {size.values[p].storage: size.values[p].num_bytes for p in places}
        found.append(size.layer(n).inner_bytes + sum(storages.values()))
    return found


def boundary_bytes(size: AtSize) -> list[int]:
    """Return what lives between each layer and the next one, each storage once."""
    found = []
    for n in range(len(size.kind_of)):
        across = {
            value.storage: value.num_bytes
            for value in size.values
            if value.producer <= n < max(value.consumers, default=-1) and not value.is_weight
        }
        found.append(sum(across.values()))
    return found
