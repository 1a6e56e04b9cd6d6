"""The parts that predict the cost of a scheme: links, clocks, densities, sizes of records.

The cost of each scheme stands in the scheme's own file.
"""
