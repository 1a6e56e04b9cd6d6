"""What the cost of a scheme is predicted with: links, clocks, densities, sizes of records.

The cost of each scheme stands in the scheme's own file.
"""
