"""All models under test, in lists: whoever adds one there buys all laws."""

from .odd import ODD
from .others import OTHERS
from .recent import RECENT
from .refused import REFUSED
from .required import REQUIRED

EVERY = (*REQUIRED, *OTHERS, *RECENT, *ODD)

__all__ = ["EVERY", "ODD", "OTHERS", "RECENT", "REFUSED", "REQUIRED"]
