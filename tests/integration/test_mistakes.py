"""Mistakes of users: one clear error, exit code 2, nothing started and nothing lost."""

from __future__ import annotations

import pytest

from tests.integration.mistakes import MISTAKES, Mistake, Outcome, everything

EVERY = [mistake for part in MISTAKES.values() for mistake in part]


@pytest.fixture(scope="module")
def outcomes() -> dict[Mistake, Outcome]:
    return everything()


@pytest.mark.parametrize("mistake", EVERY, ids=str)
def test_a_mistake_is_one_error_and_costs_nothing(mistake, outcomes):
    outcome = outcomes[mistake]
    assert outcome.started == (), "no rank and no other program"
    assert outcome.changed == ()
    assert outcome.error.count("error: ") == 1, outcome.error
    assert "Traceback" not in outcome.error + outcome.printed
    for word in ("expected:", "got:", mistake.says):
        assert word in outcome.error, outcome.error
    assert outcome.code == 2


def test_there_are_forty_at_least():
    assert len(EVERY) >= 40
    assert len({str(mistake) for mistake in EVERY}) == len(EVERY)
