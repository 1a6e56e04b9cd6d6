"""The links of the network test bed (`scripts/netbed.sh`), as its processes see them."""

from __future__ import annotations

import os

NETBED_MBIT = "NETBED_MBIT"
"""Environment variable that the test bed sets in its hosts: the links' rate, 0 without a limit."""


def netbed_mbit() -> int | None:
    """The rate of the test bed's links in Mbit/s; None without a limit or outside the test bed."""
    return int(os.environ.get(NETBED_MBIT, "0")) or None
