"""A configuration as a table of keys and values, for tables that compare runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as keys with dots.

    Example:
        >>> flat({"scheme": {"name": "direct", "options": {}}, "name": "x"})
        {'scheme.name': 'direct', 'scheme.options': {}, 'name': 'x'}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def canonical(value: object) -> str:
    """A configuration value as it is shown and compared.

    Example:
        >>> canonical(None), canonical([1, 2]), canonical("x")
        ('null', '[1, 2]', 'x')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)
