"""Start a command of ours in several processes of this host, by torchrun's own entry point."""

import logging
import os
import signal
from collections.abc import Sequence

from .options import INTERRUPTED

FAILED = 1


def launch(num_processes: int, max_restarts: int, arguments: Sequence[str]) -> int:
    """Run `penstock ARGUMENTS` in `num_processes` processes; give the code the command ends with.

    Each process says itself what went wrong, so that torchrun's own report is left out.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would say so, and do the same
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.CRITICAL)
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # torchrun would end for it
    options = torchrun.parse_args(
        [
            *(("--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT") if is_nohup else ()),
            *("--standalone", "--nproc-per-node", str(num_processes)),
            *("--max-restarts", str(max_restarts), "-m", "penstock", *arguments),
        ]
    )
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else FAILED
    except SignalException as error:
        return INTERRUPTED if error.sigval == signal.SIGINT else 128 + error.sigval
    return 0
