"""Compares the inputs of a step over all ranks, before its first collective.

Ranks with different shapes, microbatch counts or steps would abort inside the transport, or wait for each other. A
fingerprint of the inputs therefore travels with the small reduction at the end of an earlier step, at no extra cost.
Only if fingerprints differ do the ranks exchange the values themselves, to name the ranks that differ.

A rank that cannot read its data is not compared. Errors are kept until the step is due, and are then raised on all
ranks.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megastack.batch import Microbatch
from megastack.comm.objects import all_gather_objects
from megastack.errors import DataError, MegastackError, counted
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import describe_coordinates

NO_FINGERPRINT = -(2.0**33)
"""Below every fingerprint and its negative: the value from a rank that could not read its data."""


@dataclass(frozen=True)
class StepInputs:
    """A summary of a step's inputs, which must be identical on all ranks.

    Attributes:
        step: the 1-based step.
        shapes: the shape of each microbatch's tokens.
        masked: whether there are document masks.
        tokens: valid labels of the global batch.
        validation: samples and valid labels of the validation split.
    """

    step: int
    shapes: tuple[tuple[int, ...], ...]
    masked: bool
    tokens: int
    validation: tuple[int, int]

    @classmethod
    def of(cls, step: int, microbatches: Sequence[Microbatch], tokens: int, validation: tuple[int, int]) -> StepInputs:
        """The summary of a step's microbatches."""
        shapes = tuple(tuple(microbatch.tokens_BS.shape) for microbatch in microbatches)
        masked = any(microbatch.documents_BS is not None for microbatch in microbatches)
        return cls(step, shapes, masked, tokens, validation)

    @property
    def fingerprint(self) -> float:
        """A checksum that fp64 represents exactly."""
        return float(zlib.crc32(repr(self).encode()))

    def __str__(self) -> str:
        shapes = ", ".join(f"{count} × {list(shape)}" for shape, count in Counter(self.shapes).items())
        samples, tokens = self.validation
        masks = ", document masks" if self.masked else ""
        return (
            f"step {self.step}: microbatches {shapes or 'none'}, {counted(self.tokens, 'valid label')}{masks}; "
            f"validation of {counted(samples, 'sample')}, {counted(tokens, 'valid label')}"
        )


class InputAgreement:
    """Compares the inputs of steps over the ranks, ahead of the steps; errors are raised when a step is due.

    All methods must be called on every rank with the same steps, which are 0-based.

    Args:
        read: reads this rank's inputs to a step.
        mesh: the ranks.
    """

    CONTRIBUTIONS = 3
    """The number of values of :meth:`contribution`."""

    def __init__(self, read: Callable[[int], StepInputs], mesh: Mesh) -> None:
        self._read = read
        self._mesh = mesh
        self._inputs: dict[int, StepInputs | Exception] = {}
        self._unreadable: set[int] = set()
        self._different: set[int] = set()

    def contribution(self, step: int) -> tuple[float, ...]:
        """Read this rank's inputs to a step. The maxima over the ranks of these values are for :meth:`agreed`.

        An error is kept until the step is due: earlier steps are reported, validated and saved first.
        """
        try:
            inputs = self._inputs[step] = self._read(step)
        except Exception as error:
            self._inputs[step] = error
            return 1.0, *fingerprint_bounds(None)
        return 0.0, *fingerprint_bounds(inputs)

    def agreed(self, step: int, maxima: Sequence[float]) -> None:
        """Receive the maxima of all contributions for a step."""
        unreadable, *bounds = maxima
        if unreadable:
            self._unreadable.add(step)
        if fingerprints_differ(*bounds):
            self._different.add(step)

    def has_error(self, step: int) -> bool:
        """Whether :meth:`require` would raise, as far as is known."""
        return step in self._unreadable or step in self._different

    def require(self, step: int) -> None:
        """Called when a step is due.

        Raises:
            DataError: on every rank, if a rank cannot read its inputs to this step, or they are not identical.
        """
        inputs = self._inputs.pop(step, None)
        error = inputs if isinstance(inputs, Exception) else None
        if step in self._unreadable:
            require_data(error, step + 1, self._mesh)
        if step in self._different:
            require_identical(None if isinstance(inputs, Exception) else inputs, self._mesh)


def fingerprint_bounds(inputs: StepInputs | None) -> tuple[float, float]:
    """A rank's contribution to a maximum over the ranks, for :func:`fingerprints_differ`; None abstains."""
    return (NO_FINGERPRINT, NO_FINGERPRINT) if inputs is None else (inputs.fingerprint, -inputs.fingerprint)


def fingerprints_differ(highest: float, negated_lowest: float) -> bool:
    """Whether any two ranks have different inputs, from the maxima of :func:`fingerprint_bounds`."""
    return highest != NO_FINGERPRINT and highest != -negated_lowest


def require_identical(inputs: StepInputs | None, mesh: Mesh) -> None:
    """Compare the inputs of all ranks. Must be called on every rank; a rank without inputs is not compared.

    Raises:
        DataError: on every rank, if they are not identical; the message names the ranks that differ from the majority.
    """
    gathered = dict(zip(mesh.world.ranks, all_gather_objects(inputs, mesh.world), strict=True))
    found = {rank: each for rank, each in gathered.items() if each is not None}
    common = Counter(found.values()).most_common(1)[0][0] if found else None
    different = {rank: each for rank, each in found.items() if each != common}
    if different:
        lines = [f"{_named(rank, mesh)}: {each}" for rank, each in different.items()]
        text = "\n".join([*lines, f"the other ranks: {common}"])
        raise DataError(f"{text}\nall ranks need the same configuration and the same data").about(different)


def require_data(error: Exception | None, step: int, mesh: Mesh) -> None:
    """Raise on every rank if any rank could not read the data of a 1-based step. Must be called on every rank.

    Args:
        error: the error of this rank, if it has one.
        step: the step, for the message.
        mesh: the ranks.

    Raises:
        DataError: on every rank, if any rank has an error; it holds those ranks and their messages.
    """
    own_text = None if error is None else _text_of(error)
    by_rank = dict(zip(mesh.world.ranks, all_gather_objects(own_text, mesh.world), strict=True))
    failed: dict[str, list[int]] = {}
    for rank, text in by_rank.items():
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if failed:
        lines = [f"{_counted(ranks, mesh)}: step {step}: {text}" for text, ranks in failed.items()]
        raise DataError("\n".join(lines)).about(sorted(rank for ranks in failed.values() for rank in ranks)) from error


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, MegastackError) else f"{type(error).__name__}: {error}"


def _named(rank: int, mesh: Mesh) -> str:
    return f"rank {rank} ({describe_coordinates(mesh.shape.coordinates(rank))})"


def _counted(ranks: Sequence[int], mesh: Mesh) -> str:
    """The first of these ranks, and the number of others."""
    others = len(ranks) - 1
    return _named(ranks[0], mesh) + (f" and {others} other rank{'s' if others > 1 else ''}" if others else "")
