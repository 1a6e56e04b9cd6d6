"""The report of a failed rank, which torch's elastic agent hands to the launcher."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_sparse.config.redaction import redact_text

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable with the file from which torch's agent reads why a rank failed."""
_TYPED = "megatron_sparse"


def write_report(message: str, *, typed: bool) -> None:
    """Writes the agent's error file, in its format, complete or not at all.

    Prints the message where there is no agent, and where the file cannot be written.

    Args:
        message: why this rank failed; secrets in it are hidden.
        typed: whether it is the message of a `MegatronSparseError`.
    """
    message = redact_text(message)
    path = os.environ.get(ERROR_FILE)
    if path is None:
        print(f"error: {message}", file=sys.stderr)
        return
    callstack = redact_text(traceback.format_exc())
    info = {"timestamp": str(int(time.time())), "py_callstack": callstack}
    report = {"message": {"message": message, "extraInfo": info}, _TYPED: typed}
    part = Path(f"{path}.part")
    try:
        part.write_text(json.dumps(report), "utf-8")
        # The agent would fail over a report that is cut off.
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        print(f"error: {message}\n(no report: {error})", file=sys.stderr)


def read_report(report: Mapping[str, Any]) -> tuple[str, bool] | None:
    """The arguments of `write_report`; None where the agent wrote the report itself.

    The agent does when a rank ended before it could write one.
    """
    return (report["message"]["message"], report[_TYPED]) if _TYPED in report else None
