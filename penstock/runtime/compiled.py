"""See whether a call runs compiled functions, or checkpoints.

Under a dispatch mode torch runs compiled functions uncompiled, so that a layer which holds some
has to be known before one is entered.  They may be anywhere (a module, one inside it, a function
that a forward calls), and all of them are entered through one module of torch.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from penstock.torch_private import COMPILED_CALLS

_RERUNS = frozenset(("torch.random", "torch.utils.checkpoint"))


class CompiledCalls:
    """Runs functions, and notes whether compiled code ran in one.

    `reruns`: a checkpoint ran as well, or the state of the default generators was read or set, so
    that the backward may draw again.
    """

    def __init__(self) -> None:
        self.seen = False
        self.reruns = False

    def look(self, function: Callable[[], Any], *, only_first: bool = False) -> Any:
        """Run `function`; with `only_first`, stop looking at the first compiled call.

        What is compiled in that call then takes no longer.  Where Python's profiler is in use,
        nothing is seen.
        """
        if sys.getprofile() is not None:
            return function()

        def note(frame: FrameType, event: str, _: Any) -> None:
            name = frame.f_globals.get("__name__") if event == "call" else None
            if name == COMPILED_CALLS:
                self.seen = True
                if only_first:
                    sys.setprofile(None)
            elif name in _RERUNS:
                self.reruns = True

        sys.setprofile(note)
        try:
            return function()
        finally:
            sys.setprofile(None)
