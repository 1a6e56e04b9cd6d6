"""The links of the network test bed (`scripts/netbed.sh`), as its processes see them."""

import os
from typing import NamedTuple

NETBED_MBIT = "NETBED_MBIT"
"""Environment variable that the test bed sets in its hosts: the links' rate, 0 without a limit."""

NETBED_LINKS = "NETBED_LINKS"
"""Another one: rate, delay and sites, in words."""


class BedLinks(NamedTuple):
    """The test bed's slow links.

    Attributes:
        mbit: rate in Mbit/s: of each host's link, or of the link between two sites.
        delay_ms: round trip, between hosts or between sites.
        sites: 1; or 2, with unlimited links between the hosts of a site.
    """

    mbit: int
    delay_ms: int = 0
    sites: int = 1

    def __str__(self) -> str:
        """Text for headings and names.

        Example:
            >>> str(BedLinks(100)), str(BedLinks(100, 30, 2))
            ('100 Mbit/s', '100 Mbit/s, 30 ms, 2 sites')
        """
        delay = f", {self.delay_ms} ms" if self.delay_ms else ""
        return f"{self.mbit} Mbit/s{delay}" + (f", {self.sites} sites" if self.sites > 1 else "")


def netbed_mbit() -> int | None:
    """The rate of the test bed's links in Mbit/s; None without a limit or outside the test bed."""
    return int(os.environ.get(NETBED_MBIT, "0")) or None
