"""What the ranks bring to a step, compared before its first collectives.

Ranks that come with other shapes, another number of microbatches or another step would abort inside the transport, or
wait for each other. A fingerprint travels with the small reduction at the end of the step before, so that it costs
nothing; only where fingerprints differ are the values themselves exchanged, to say whose is different.

A rank that cannot read its data has nothing to compare. Its error is no difference between ranks: it is kept until the
step is due, and then raised on all ranks in the words of the rank that has it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megastack.batch import Microbatch
from megastack.comm.objects import all_gather_objects
from megastack.errors import DataError, MegastackError, counted
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


ABSENT = -(2.0**33)
"""Below every fingerprint and its negative: what a rank sends that could not read its data."""


def fingerprints(signature: Signature | None) -> tuple[float, float]:
    """What a rank sends into a maximum over the ranks, for :func:`are_different`; None takes no part in it."""
    return (ABSENT, ABSENT) if signature is None else (signature.fingerprint, -signature.fingerprint)


def are_different(most: float, least: float) -> bool:
    """Whether the ranks that have a signature have different ones, from the maxima of :func:`fingerprints`."""
    return most != ABSENT and most != -least


def require_alike(own: Signature | None, mesh: Mesh) -> None:
    """Compare the signatures of all ranks, which all call; a rank without one is not compared.

    Raises:
        DataError: on every rank, when they are not the same; about those that differ from most.
    """
    gathered = dict(zip(mesh.world.ranks, all_gather_objects(own, mesh.world), strict=True))
    found = {rank: signature for rank, signature in gathered.items() if signature is not None}
    common = Counter(found.values()).most_common(1)[0][0] if found else None
    odd = {rank: signature for rank, signature in found.items() if signature != common}
    if odd:
        lines = [f"{_named(rank, mesh)}: {signature}" for rank, signature in odd.items()]
        text = "\n".join([*lines, f"the other ranks: {common}"])
        raise DataError(f"{text}\nall ranks need the same configuration and the same data").about(odd)


def require_data(own: Exception | None, step: int, mesh: Mesh) -> None:
    """Raise what kept some ranks from reading the data of a 1-based step; all ranks call.

    Args:
        own: the error of this rank, if it has one.
        step: for the message.
        mesh: the ranks.

    Raises:
        DataError: on every rank, if any rank has an error; it carries the ranks that do, with their messages.
    """
    own_text = None if own is None else _text_of(own)
    by_rank = dict(zip(mesh.world.ranks, all_gather_objects(own_text, mesh.world), strict=True))
    failed: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if failed:
        lines = [f"{_counted(ranks, mesh)}: step {step}: {text}" for text, ranks in failed.items()]
        raise DataError("\n".join(lines)).about(sorted(rank for ranks in failed.values() for rank in ranks)) from own


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, MegastackError) else f"{type(error).__name__}: {error}"


def _named(rank: int, mesh: Mesh) -> str:
    return f"rank {rank} ({describe_coordinates(mesh.shape.coordinates(rank))})"


def _counted(ranks: Sequence[int], mesh: Mesh) -> str:
    """The first of some ranks, and how many others there are."""
    others = len(ranks) - 1
    return _named(ranks[0], mesh) + (f" and {others} other rank{'s' if others > 1 else ''}" if others else "")
