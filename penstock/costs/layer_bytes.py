"""What a layer keeps of a micro-batch for its backward."""

from typing import NamedTuple


class LayerBytes(NamedTuple):
    """Bytes that a layer keeps of one micro-batch, each storage once.

    `inner` is what it saves beside its inputs and its results; `saved_inputs` and `saved_results`
    are what it saves of these, `inputs` and `results` all of them.  `left` is what the input part
    of a divided backward leaves to the other one, at most.
    """

    inner: int
    inputs: int
    saved_inputs: int
    results: int
    saved_results: int
    left: int = 0
