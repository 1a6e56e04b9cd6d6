"""Cost models: one file for each family of collectives, on clocks that all of them share."""
