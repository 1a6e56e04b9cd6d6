"""Colours of a report: of its page, whose style sheet has them as variables, and of its charts."""

# On the page's white, text has the contrast that WCAG 2 AA asks for, 4.5; the lightest colour of a
# series has 2.2, so runs also have a letter, and stages an order.
INK, MUTED, LINE = "#1b1f23", "#59636e", "#d4dae0"
# Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, VERMILION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
ORANGE, SKY, OLIVE, GREY = "#e69f00", "#56b4e9", "#8f8400", "#6f7780"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, OLIVE, GREY)
OF_PAGE = {
    "paper": "#fefefe",
    "panel": "#f4f6f8",
    "ink": INK,
    "muted": MUTED,
    "line": LINE,
    "warning": "#8a4b00",
    "link": BLUE,
}
"""By the name of the CSS variable, without its dashes."""
STAGES = {
    "forward_backward": BLUE,
    "optimizer": SKY,
    "host_wait": VERMILION,
    "param_wait": PURPLE,
    "other": GREY,
    "threshold": OLIVE,
    "prune": ORANGE,
    "encode": PURPLE,
    "network": VERMILION,
    "decode": GREEN,
    "profile": GREY,
}
"""A colour for each stage; no chart shows stages of the training thread and of buckets together."""
