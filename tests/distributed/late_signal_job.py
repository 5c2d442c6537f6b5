"""`penstock train ...`, where process 1 gets SIGTERM just after it told the others to go on.

python -m tests.distributed.late_signal_job AGREEMENT train RECIPE ...
"""

import os
import signal
import sys

from penstock.cli.main import main
from penstock.mesh.process_group import ProcessGroup


def inject(agreement: int) -> None:
    """Send the signal during the agreement of that number; 0 is the one before the first step."""
    highest = ProcessGroup.highest
    left = iter([*[False] * agreement, True])

    def late(self: ProcessGroup, value: int, what: str) -> int:
        found = highest(self, value, what)
        if what == "for the others to finish their step" and next(left, False):
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    ProcessGroup.highest = late  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        inject(int(sys.argv[1]))
    main(sys.argv[2:])
