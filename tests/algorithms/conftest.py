"""The problems that algorithms are compared with their naive twins on."""

import pytest
from tests.problems import PROBLEMS, Problem

FIRST, *OTHERS = PROBLEMS


@pytest.fixture(params=[FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def problem(request: pytest.FixtureRequest) -> Problem:
    return PROBLEMS[request.param]
