"""Describe an operator that torch has run: its class, FLOPs, bytes and sizes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from penstock.costs.records import VIEW, Operator, Part
from penstock.torch_private import arguments_of, storage_id


def described(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Operator, ...]:
    """Return the descriptions of an operator that ran; () for new memory.

    The backward of a convolution has up to three: for its input, its weight and its bias.
    """
    # 1. Only the host works for a view; a convolution's backward has several products.
    name = str(func.overloadpacket).removeprefix("aten.")
    if name.startswith(("empty", "new_empty")):
        return ()
    if _is_view(func, (args, kwargs), result):
        return (_operator(VIEW, 0, 0, (), 1, "float32"),)
    if name == "convolution_backward":
        return tuple(_convolution_backward(args, result))
    # 2. Count the bytes of all arguments and results.
    only_writes = name.startswith(_ONLY_WRITE)
    read = list(tensors_in((args[1:] if only_writes else args, kwargs)))
    written = list(tensors_in(result))
    tensors = [*written, *read]
    num_bytes = _total(read) + _total(written)
    floating = (t for t in tensors if t.is_floating_point() or t.is_complex())
    first = next(floating, tensors[0] if tensors else None)
    dtype = "float32" if first is None else dtype_name(first.dtype)
    # 3. Count the FLOPs of products, or the bytes of passes that the arguments do not show.
    product = _product(func, name, args, kwargs, result)
    if product is not None:
        kind, flops, dims, batch = product
        operator = _operator(kind, flops, num_bytes, dims, batch, dtype)
        return (replace(operator, alignment=_alignment(tensors)) if kind == "gemm" else operator,)
    usual = "reduce" if torch.Tag.reduction in func.tags else "elementwise"
    kind = next((kind for kind, words in _WORDS if any(word in name for word in words)), usual)
    if kind == "embedding":
        looked_up = _total(written)  # only the rows that are looked up are read of a table
        num_bytes = looked_up + sum(min(_total([tensor]), looked_up) for tensor in read)
    num_bytes += _more_passes(func, name, args, kwargs)
    return (_operator(kind, 0, num_bytes, (), 1, dtype),)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def _operator(
    name: str, flops: int, num_bytes: int, dims: tuple[int, ...], batch: int, dtype: str
) -> Operator:
    sizes = {"flops": flops, "num_bytes": num_bytes, "batch": batch}
    return Operator(name=name, part=Part.FORWARD, dims=dims, dtype=dtype, **sizes)


# -- bytes --------------------------------------------------------------------------------------


def _is_view(func: Any, arguments: Any, result: Any) -> bool:
    """Tell if all results of an operator are views of its arguments."""
    if any(argument.is_write for argument in arguments_of(func)):
        return False
    known = {storage_id(t) for t in tensors_in(arguments) if _is_dense(t)}
    results = list(tensors_in(result))
    return bool(results) and all(_is_dense(t) and storage_id(t) in known for t in results)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


_ONLY_WRITE = ("zero_", "fill_", "copy_", "bernoulli_", "normal_", "uniform_", "random_")
"""Beginnings of the names of operators that do not read their first argument."""


def _total(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; each storage counts once."""
    views: dict[int, dict[Any, int]] = {}
    whole: dict[int, int] = {}
    for tensor in tensors:
        if not _is_dense(tensor):
            continue
        storage = storage_id(tensor)
        whole[storage] = tensor.untyped_storage().nbytes()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        views.setdefault(storage, {})[place] = tensor.numel() * tensor.element_size()
    return sum(min(whole[storage], sum(sizes.values())) for storage, sizes in views.items())


_TWO_PASSES = ("batch_norm", "group_norm")
"""Parts of the names of norms that read their input twice."""


def _more_passes(func: Any, name: str, args: Any, kwargs: Any) -> int:
    """Return the bytes that norms over many rows read again: 3 passes forward, 5 backward."""
    if not any(kind in name for kind in _TWO_PASSES):
        return 0
    trains = [argument_of(func, args, kwargs, key) for key in ("training", "train")]
    if False in trains:
        return 0
    largest = max((_total([t]) for t in tensors_in((args, kwargs))), default=0)
    return 2 * largest if "backward" in name else largest


def argument_of(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return an argument of an operator by name, or its default; None if it has none."""
    for place, argument in enumerate(arguments_of(func)):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as in `Device.flops_per_s`."""
    return str(dtype).removeprefix("torch.")


# -- classes ------------------------------------------------------------------------------------

_WORDS = (
    ("norm", ("batch_norm", "layer_norm", "group_norm", "rms_norm")),
    ("pool", ("pool", "upsample", "grid_sampler")),
    ("embedding", ("embedding", "gather", "scatter", "index", "take")),
    ("reduce", ("softmax", "nll_loss", "logsumexp", "cumsum", "argm", "topk", "sort", "var_mean")),
    ("elementwise", ("masked",)),
    (
        "copy",
        (
            *("clone", "copy", "cat", "stack", "pad", "repeat", "roll", "flip", "fill", "zero"),
            *("full", "ones", "select_backward", "slice_backward", "scalar_tensor", "arange"),
        ),
    ),
)
"""Classes with parts of the names of their operators; the first match counts."""


# -- products -----------------------------------------------------------------------------------

_Product = tuple[str, int, tuple[int, ...], int]
"""Class, FLOPs, dims, batch."""


def _product(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> _Product | None:
    """Return the description of a product; None for all else."""
    if name in _PRODUCTS:
        return _PRODUCTS[name](args, result)
    if "scaled_dot_product" in name:
        return _attention(func, name, args, kwargs)
    formula: Any = flop_counter.flop_registry.get(func.overloadpacket)
    if formula is None:
        return None
    kind = "attention" if "attention" in name else "gemm"
    return kind, formula(*args, **kwargs, out_val=result), (), 1


def _alignment(matrices: Iterable[Tensor]) -> int:
    """Return the largest power of two, at most 8, that divides the strides of rows."""
    rows = (t.stride()[-2:] for t in matrices if t.dim() > 1 and min(t.shape[-2:]) > 1)
    return gcd(8, *map(max, rows))


def _of_two(first: int) -> Callable[[Any, Any], _Product]:
    """Return a function that describes a product of the arguments `first` and the next one."""

    def product(args: Any, result: Any) -> _Product:
        left, right = args[first], args[first + 1]
        batch = left.shape[0] if left.dim() == 3 else 1
        rows, depth = left.shape[-2:]
        columns = right.shape[-1] if right.dim() > 1 else 1
        return "gemm", 2 * batch * rows * columns * depth, (rows, columns, depth), batch

    return product


def _convolution(args: Any, result: Any) -> _Product:
    x, weight, _, stride, _, dilation, transposed, _, groups = args[:9]
    flops = _flops(x, weight, result, transposed)
    kind = _kind_of_convolution(weight, stride, dilation, transposed, groups)
    return kind, flops, _dims(flops, result, groups), groups


def _dims(flops: int, result: Tensor, groups: int) -> tuple[int, int, int]:
    """Return rows, columns and depth of a convolution's product."""
    rows, columns = result.shape[0] * prod(result.shape[2:]), result.shape[1] // groups
    return rows, columns, max(1, flops // max(1, 2 * rows * columns * groups))


def _flops(x: Tensor, weight: Tensor, result: Tensor, transposed: bool) -> int:
    count: int = flop_counter.conv_flop_count(
        list(x.shape), list(weight.shape), list(result.shape), transposed=transposed
    )
    return count


def _kind_of_convolution(
    weight: Tensor, stride: Any, dilation: Any, transposed: bool, groups: int
) -> str:
    kernel = tuple(weight.shape[2:])
    if groups == 1 and set(kernel) == {1}:
        return "conv1x1"
    plain = groups == 1 and not transposed and {*stride, *dilation} == {1}
    return "conv3x3" if plain and kernel == (3, 3) else "conv"


def _convolution_backward(args: Any, result: Any) -> Iterator[Operator]:
    gradient, x, weight, _, stride, _, dilation, transposed, _, groups, mask = args
    kind = _kind_of_convolution(weight, stride, dilation, transposed, groups)
    flops, dtype = _flops(x, weight, gradient, transposed), dtype_name(gradient.dtype)
    if mask[0]:
        moved = _total([gradient, weight]) + _total([result[0]])
        yield _operator(kind, flops, moved, _dims(flops, x, groups), groups, dtype)
    if mask[1]:
        images = x if transposed else gradient
        pixels = images.shape[0] * prod(images.shape[2:])
        dims = weight.shape[0] // groups, prod(weight.shape[1:]), pixels
        moved = _total([gradient, x]) + _total([result[1]])
        yield _operator(kind, flops, moved, dims, groups, dtype)
    if mask[2]:
        yield _operator("reduce", 0, _total([gradient]) + _total([result[2]]), (), 1, dtype)


def _attention(func: Any, name: str, args: Any, kwargs: Any) -> _Product:
    """Describe attention; a causal kernel leaves out the products of later keys."""
    backward = "backward" in name
    query, key, value = (list(t.shape) for t in args[backward : backward + 3])
    key[1] = value[1] = query[1]  # grouped heads compute as many products
    if backward:
        flops = flop_counter.sdpa_backward_flop_count(list(args[0].shape), query, key, value)
    else:
        flops = flop_counter.sdpa_flop_count(query, key, value)
    if argument_of(func, args, kwargs, "is_causal"):
        rows, columns = query[2], key[2]
        seen = min(rows, columns)
        flops = flops * (seen * (seen + 1) // 2 + (rows - seen) * columns) // (rows * columns)
    return "attention", flops, (query[2], key[2], query[3]), query[0] * query[1]


_PRODUCTS: dict[str, Callable[[Any, Any], _Product]] = {
    "mm": _of_two(0),
    "addmm": _of_two(1),
    "bmm": _of_two(0),
    "baddbmm": _of_two(1),
    "mv": _of_two(0),
    "addmv": _of_two(1),
    "_scaled_mm": _of_two(0),
    "convolution": _convolution,
}
