"""What the ranks bring to a step, compared before its first collectives.

Ranks that come with other shapes, another number of microbatches or another step would abort inside the transport, or
wait for each other. A fingerprint travels with the small reduction at the end of the step before, so that it costs
nothing; only where fingerprints differ are the values themselves exchanged, to say whose is different.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megastack.batch import Microbatch
from megastack.comm.objects import all_gather_objects
from megastack.errors import DataError, counted
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import describe_coordinates


@dataclass(frozen=True)
class Signature:
    """What must be the same on all ranks.

    Attributes:
        step: 1-based.
        shapes: of each microbatch's tokens.
        masked: whether documents are told apart.
        tokens: valid labels of the global batch.
        validation: samples and valid labels of the validation split.
    """

    step: int
    shapes: tuple[tuple[int, ...], ...]
    masked: bool
    tokens: int
    validation: tuple[int, int]

    @classmethod
    def of(cls, step: int, microbatches: Sequence[Microbatch], tokens: int, validation: tuple[int, int]) -> Signature:
        """The signature of a step's microbatches."""
        shapes = tuple(tuple(microbatch.tokens_BS.shape) for microbatch in microbatches)
        masked = any(microbatch.documents_BS is not None for microbatch in microbatches)
        return cls(step, shapes, masked, tokens, validation)

    @property
    def fingerprint(self) -> float:
        """A number that fp64 holds exactly."""
        return float(zlib.crc32(repr(self).encode()))

    def __str__(self) -> str:
        shapes = ", ".join(f"{count} × {list(shape)}" for shape, count in Counter(self.shapes).items())
        samples, tokens = self.validation
        masks = ", document masks" if self.masked else ""
        return (
            f"step {self.step}: microbatches {shapes or 'none'}, {counted(self.tokens, 'valid label')}{masks}; "
            f"validation of {counted(samples, 'sample')}, {counted(tokens, 'valid label')}"
        )


def require_alike(own: Signature, mesh: Mesh) -> None:
    """Compare the signatures of all ranks, which all call.

    Raises:
        DataError: on every rank, when they are not the same; about those that differ from most.
    """
    found = all_gather_objects(own, mesh.world)
    common = Counter(found).most_common(1)[0][0]
    odd = [rank for rank, signature in zip(mesh.world.ranks, found, strict=True) if signature != common]
    if odd:
        by_rank = dict(zip(mesh.world.ranks, found, strict=True))
        lines = [f"rank {rank} ({describe_coordinates(mesh.shape.coordinates(rank))}): {by_rank[rank]}" for rank in odd]
        text = "\n".join([*lines, f"the other ranks: {common}"])
        raise DataError(f"{text}\nall ranks need the same configuration and the same data").about(odd)
