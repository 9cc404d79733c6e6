"""Takes the branches for GPUs on CPU tensors: the collectives of NCCL, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from megastack.comm import backend


class NcclOverGloo(backend.Nccl):
    """The choices for NCCL in a job whose process groups are gloo's."""

    process_groups = "gloo"


@contextmanager
def gpu_branches(*, receive_lead: int = backend.Nccl.receive_lead) -> Iterator[None]:
    """Within this context, in this process, CPU tensors take the branches of GPU tensors.

    Args:
        receive_lead: replaces NCCL's, for negative controls.
    """
    forced = NcclOverGloo()
    forced.receive_lead = receive_lead
    with mock.patch.object(backend, "_GLOO", forced):
        yield
