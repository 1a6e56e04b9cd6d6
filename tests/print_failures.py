"""A plugin of pytest: prints each failure when it happens, on lines that begin with `! `.

    python -m pytest -p tests.print_failures ...

`scripts/gpu_check.py` uses it: a stage that runs out of time would show dots alone.
"""

import pytest

MOST_LINES = 15
"""Of a failure, from its end; the log has all."""


class Printer:
    """Prints failures through pytest's own writer, which its capturing does not hold back."""

    def __init__(self, config: pytest.Config) -> None:
        self._writer = config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = [f"{report.nodeid} ({report.when})", *report.longreprtext.splitlines()]
            self._writer.line()
            for line in [lines[0], *lines[1:][-MOST_LINES:]]:
                self._writer.line(f"! {line}")
            self._writer.flush()


@pytest.hookimpl(trylast=True)  # the writer is made by another plugin
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Printer(config))
