"""Replaces the worker in tests of the launcher: rank 0 fails as FAILURE says."""

import os
import signal
import time

from megatron_sparse.errors import CommunicationError
from megatron_sparse.megatron import training
from megatron_sparse.run import rank


def _fail(*args):
    if os.environ["RANK"] != "0":
        time.sleep(60)  # until the launcher ends it
    if os.environ["FAILURE"] == "typed":
        raise CommunicationError("rank 1 is silent", expected="an answer", got="none")
    if os.environ["FAILURE"] == "crash":
        raise ZeroDivisionError("in the middle of it")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    training.train = _fail
    rank.main()
