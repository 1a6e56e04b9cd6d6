"""The benches that train whole runs: `training`, `time-to-loss`, `convergence` and `overhead`.

`frame` carries out runs and keeps their results; `options` imports nothing heavy.
"""
