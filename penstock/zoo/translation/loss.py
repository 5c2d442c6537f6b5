"""What a translation model is trained with: targets moved by one, and a smoothed loss."""

import torch
import torch.nn.functional as F
from torch import Tensor


def shift_right(target_BT: Tensor, bos: int) -> Tensor:
    """Return what the decoder reads to say `target_BT`: `bos`, then all but the last."""
    first_B1 = target_BT.new_full((len(target_BT), 1), bos)
    return torch.cat((first_B1, target_BT[:, :-1]), dim=1)


def smoothed_cross_entropy(
    logits_BTV: Tensor, target_BT: Tensor, smoothing: float = 0.1, pad: int = 0
) -> Tensor:
    """Compute the mean over real words of the cross entropy with smoothed labels.

    A label is the word with a weight of 1 - smoothing, and all words of the vocabulary evenly with
    the rest (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4).  Words that are `pad` do not
    count; where none is real, the loss is 0.

    As the loss of micro-batches, it goes with a reduction that counts real words:
    `lambda target: (target != pad).sum()`.
    """
    total = F.cross_entropy(
        logits_BTV.flatten(0, 1),
        target_BT.flatten(),
        ignore_index=pad,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total / (target_BT != pad).sum().clamp(min=1)
