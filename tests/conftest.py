"""Every test starts and ends with nothing pending and PyTorch as it was."""

from __future__ import annotations

import pytest

from lazyviz import session


@pytest.fixture(autouse=True)
def nothing_pending():
    yield
    session.reset()
