"""Which of the values that a stage receives its layers change in place."""

from collections.abc import Iterable

import torch

from penstock.errors import BoundaryError, RecomputeError
from penstock.transport.payload import check_still_as_sent, version_of

from .boundary import same_bits
from .run import FROM_CALLER, Given, Kept


class Changes:
    """What was seen of the layers of one stage: a value that they change is copied first.

    In the first forward with gradients every value is copied, to find out.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._seen: dict[tuple[int, int], bool] = {}

    def forget(self) -> None:
        """Begin anew."""
        self._seen.clear()

    def copies(self, key: tuple[int, int], *, lasts: bool) -> bool:
        """Tell whether a value is to be copied; one that lasts is so only if it was changed."""
        return self._seen.get(key, not lasts)

    def check(self, kept: Kept, given: Iterable[Given], *, with_grad: bool) -> None:
        """Note which values the layers have changed.

        Raises:
            RecomputeError: a value was changed for the first time, and there is no copy of it.
            BoundaryError: a value was changed that another one shares memory with, or by its
                sender.
        """
        for value in given:
            peer, place = value.key
            if value.copied and with_grad and peer != FROM_CALLER:
                check_still_as_sent(value.sent, kept.received[peer].versions[place], peer)
            changed = self._is_changed(value)
            if with_grad:
                self._seen[value.key] = self._seen.get(value.key, False) or changed
                if changed and not value.copied:
                    raise RecomputeError(
                        f"a layer of stage {self._stage} changed its input in place, which it did "
                        "not do before; the value its backward needs is gone. Zero the gradients "
                        "and run the step again: from now on the stage works on a copy"
                    )
            if changed and value.is_alias:
                raise BoundaryError(
                    f"a layer of stage {self._stage} changed a tensor of shape "
                    f"{tuple(value.tensor.shape)} in place that shares memory with another value "
                    "which crosses stages, and there the change would be missing. Give a copy "
                    "(x.clone()) as one of the two, or keep their users on one stage"
                )

    def _is_changed(self, value: Given) -> bool:
        if value.before is not None:  # evaluation, where versions may not be counted
            return not same_bits(value.tensor, value.before)
        if version_of(value.tensor) != value.version:
            return True
        first = value.copied and value.key not in self._seen  # `.data` has no versions
        is_dense = value.tensor.layout is torch.strided
        return first and is_dense and not same_bits(value.tensor, value.sent)
