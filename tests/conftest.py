"""One thread in the parent, so that the ranks it forks are safe; no deadlines for properties, which test no speed.

A test that hangs is ended by ``timeout`` of ``pyproject.toml``; one that runs every cell of a matrix may take hours.
"""

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("megastack", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("megastack")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests of every cell take their time."""
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker(pytest.mark.timeout(0))
