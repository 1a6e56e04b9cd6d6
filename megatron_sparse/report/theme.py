"""Colours of a report, for light pages and dark pages.

Charts are drawn once, in the colours of the light theme. In the page each colour becomes a CSS
variable, whose value the page sets for light, dark and print.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Colour:
    """One colour of the page.

    Attributes:
        name: name of the CSS variable, without its dashes.
        light: value on a light page; lower case, unique among all colours.
        dark: value on a dark page.
    """

    name: str
    light: str
    dark: str


PAPER = Colour("paper", "#fefefe", "#14171a")
PANEL = Colour("panel", "#f4f6f8", "#1e2328")
INK = Colour("ink", "#1b1f23", "#e6e9ec")
MUTED = Colour("muted", "#59636e", "#9aa5b1")
LINE = Colour("line", "#d4dae0", "#3a424b")
WARNING = Colour("warning", "#8a4b00", "#f0b35e")

# Okabe and Ito's palette, which colour-blind readers can distinguish; the dark values are lighter
# where the original would be too faint on black.
SERIES = (
    Colour("blue", "#0072b2", "#4aa3dd"),
    Colour("vermilion", "#d55e00", "#f0803c"),
    Colour("green", "#009e73", "#2cc79a"),
    Colour("purple", "#cc79a7", "#dd95bd"),
    Colour("orange", "#e69f00", "#f0b429"),
    Colour("sky", "#56b4e9", "#7cc8f2"),
    Colour("olive", "#8f8400", "#cfc34a"),
    Colour("grey", "#6f7780", "#a3abb3"),
)
COLOURS = (PAPER, PANEL, INK, MUTED, LINE, WARNING, *SERIES)

STAGES = {
    "forward_backward": SERIES[0],
    "optimizer": SERIES[5],
    "host_wait": SERIES[1],
    "param_wait": SERIES[3],
    "other": SERIES[7],
    "threshold": SERIES[6],
    "prune": SERIES[4],
    "encode": SERIES[3],
    "network": SERIES[1],
    "decode": SERIES[2],
    "profile": SERIES[7],
}
"""A colour for each stage; no chart shows stages of the training thread and of buckets together."""


def of_run(index: int) -> Colour:
    """The colour of the run with that index, from 0."""
    return SERIES[index % len(SERIES)]
