"""Reports of training runs: one self-contained HTML page.

`run_data` reads a run's folder, `run_charts` draws, `tables` makes the tables,
and `page` assembles the page.
"""
