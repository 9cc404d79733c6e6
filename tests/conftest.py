"""One thread in the parent, so that it can fork ranks safely, and no deadlines for property tests.

``timeout`` in ``pyproject.toml`` ends a test that hangs; tests marked ``full`` may take hours.
"""

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("megastack", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("megastack")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove the time-out of tests marked ``full``."""
    for item in items:
        if item.get_closest_marker("full") is not None:
            item.add_marker(pytest.mark.timeout(0))
