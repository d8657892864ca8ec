"""Options and settings of the whole test run."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing may be downloaded


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="rewrite tests/golden instead of comparing with it")


@pytest.fixture
def refresh_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--refresh-golden"))
