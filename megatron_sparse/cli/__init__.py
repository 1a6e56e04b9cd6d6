"""The command line: nothing but options, their checks and calls."""
