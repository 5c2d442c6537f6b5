"""The doctor in a process of a broken job.

python -m tests.distributed.doctor_job dies RANK SECONDS      killed before the training step
python -m tests.distributed.doctor_job as RANK,RANK,... SECONDS    with these ranks instead
python -m tests.distributed.doctor_job version RANK SECONDS   of another version of Penstock
"""

import os
import signal
import sys

import penstock
from penstock.cli.main import main
from penstock.doctor import examine


def die(*_: object, **__: object) -> None:
    """End at once, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    how, who, timeout_s = sys.argv[1:]
    rank = os.environ["RANK"]
    if how == "as":
        os.environ["RANK"] = who.split(",")[int(rank)]
    elif how == "version":
        penstock.__version__ = f"0.0.{int(rank == who)}"
    elif rank == who:
        sys.modules[examine.__module__].self_test = die  # type: ignore[attr-defined]
    main(["doctor", "--timeout", timeout_s])
