"""One thread in the parent, so that the ranks it forks are safe; no deadlines for properties, which test no speed."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("megastack", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("megastack")
