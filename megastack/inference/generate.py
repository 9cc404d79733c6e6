"""Generation of texts from prompts, with the same ids on every tensor- and pipeline-parallel layout.

Every rank runs the same loop over tokens. A token passes through the stages like a microbatch in a forward
(:meth:`megastack.pipeline.runtime.Pipeline.infer`), the last stage's logits are gathered over tp, one rank chooses, and
the ids are broadcast to all ranks, which therefore stop together. Prompts of different lengths form one batch, padded
at the end; :mod:`megastack.layers.cache` explains why the padding has no effect.

Each call creates its own caches and discards them at its end. This module does not load weights, tokenize text or parse
a command line.

Shapes: B rows, S tokens of a row in one call, V vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megastack.batch import IGNORED_LABEL, Microbatch
from megastack.comm.collectives import all_gather, broadcast
from megastack.comm.objects import all_gather_objects
from megastack.errors import ConfigError, MegastackError, counted
from megastack.inference.sample import NOT_FINITE, Sampling, choose
from megastack.layers.cache import KeyValueCache
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.decoder import Decoder
from megastack.pipeline.runtime import Pipeline
from megastack.pipeline.schedule import Schedule

PADDING = 0


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    Attributes:
        prompt: the ids of the prompt.
        ids: the generated ids, the end id included.
        ended: whether it ended with the end id rather than at the length limit.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    ended: bool


def check_prompts(prompts: Sequence[Sequence[int]], new: int, *, vocab: int, max_positions: int | None) -> None:
    """Validate prompts before anything is computed, with the same result on every rank.

    Args:
        prompts: the ids of each prompt.
        new: tokens to add to each.
        vocab: ids must be below it.
        max_positions: the number of positions of the model; None for no limit.

    Raises:
        ConfigError: with every error.
    """
    errors = [] if prompts else ["no prompt: there is nothing to continue; use --prompt TEXT or --prompts FILE"]
    if new < 1:
        errors.append(f"max_new_tokens={new}: must be at least 1; use 1 or more")
    for number, prompt in enumerate(prompts):
        bad = next((i for i in prompt if not 0 <= i < vocab), None)
        if not prompt:
            errors.append(f"prompt {number}: has no tokens; use a prompt of at least one")
        elif bad is not None:
            errors.append(f"prompt {number}: id {bad} is outside model.vocab={vocab}; use ids from 0 to {vocab - 1}")
        elif max_positions is not None and len(prompt) + new > max_positions:
            left = max_positions - len(prompt)
            shorter = f"a prompt of at most {counted(max_positions - 1, 'token')}"
            remedy = f"max_new_tokens={left} or less" if left > 0 else shorter
            errors.append(
                f"prompt {number}: its {counted(len(prompt), 'token')} and max_new_tokens={new} exceed the "
                f"{counted(max_positions, 'position')} of the model; use {remedy}"
            )
    if errors:
        raise ConfigError("\n".join(errors))


class Generator:
    """Continues prompts with this rank's stages; every rank of the mesh creates one and calls it with equal arguments.

    Args:
        stages: this rank's stages, with whole sequences on every tp rank, as returned by
            :func:`megastack.assemble.inference.inference_stages`.
        schedule: assigns stages to ranks.
        mesh: the ranks; data-parallel ranks all do the same work.
        vocab: the vocabulary without padding.
        max_positions: the number of positions of the model; None for no limit.

    Attributes:
        uncached_because: the reason why the whole row is run for every token, with the module's name; None if every
            layer on every rank reads earlier tokens from a cache. Updated by every call, since hooks may change.
        cache_entries: the number of layers in this rank's caches after the last call.
    """

    def __init__(
        self, stages: Sequence[Decoder], schedule: Schedule, mesh: Mesh, *, vocab: int, max_positions: int | None = None
    ) -> None:
        self.stages, self.schedule, self.mesh = stages, schedule, mesh
        self.vocab, self.max_positions = vocab, max_positions
        self.uncached_because = self._shared_obstacle()
        self.cache_entries = 0
        last = schedule.stage_rank(schedule.stages - 1)
        self._chooser = mesh.shape.rank_at(pp=last, dp=0, cp=0, tp=0)

    @property
    def can_cache(self) -> bool:
        """Whether every layer reads earlier tokens from a cache."""
        return self.uncached_because is None

    def _shared_obstacle(self) -> str | None:
        """The first obstacle on any rank, identical on all: a hook on one rank makes all ranks run whole rows."""
        here = next(filter(None, (stage.cache_obstacle for stage in self.stages)), None)
        return next(filter(None, all_gather_objects(here, self.mesh.world)), None)

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        end: int | None = None,
        cache: bool = True,
        first_sample: int = 0,
        on_tokens: Callable[[Sequence[int | None]], None] | None = None,
    ) -> list[Completion]:
        """The continuation of each prompt, identical on every rank.

        Args:
            prompts: the ids of each prompt.
            max_new_tokens: the length at which a text without an end id is cut.
            sampling: how tokens are chosen.
            end: the id that ends a text; None for none.
            cache: whether to use caches if the layers support it.
            first_sample: the sample number of the first prompt, which determines its random numbers.
            on_tokens: called after each token with the id of each row, None for rows that have ended.

        Raises:
            ConfigError: invalid prompts, before anything is computed.
            MegastackError: logits that are not finite.
        """
        check_prompts(prompts, max_new_tokens, vocab=self.vocab, max_positions=self.max_positions)
        rows = _Sequences([list(prompt) for prompt in prompts], end, first_sample)
        self.uncached_because = self._shared_obstacle()
        steps = self._steps(rows, max_new_tokens, cached=cache and self.can_cache)
        for _ in range(max_new_tokens):
            ids = self._choose(steps(), rows, sampling)
            added = rows.append(ids)
            if on_tokens is not None:
                on_tokens(added)
            if all(rows.ended):
                break
        lengths = [len(prompt) for prompt in prompts]
        return [
            Completion(tuple(row[:length]), tuple(row[length:]), ended)
            for row, length, ended in zip(rows.ids, lengths, rows.ended, strict=True)
        ]

    def _steps(self, rows: _Sequences, new: int, *, cached: bool) -> Callable[[], Tensor | None]:
        """A function that runs the next token of every row, and returns the logits on ranks with the head."""
        capacity = max(map(len, rows.ids)) + new
        stages = [_InferenceStage(stage, KeyValueCache(capacity) if cached else None) for stage in self.stages]
        pipeline = Pipeline(stages, self.schedule, self.mesh)
        begun = False

        def step() -> Tensor | None:
            nonlocal begun
            inputs = rows.newest() if cached and begun else rows.whole()
            begun = True
            for stage in stages:
                stage.at_B, stage.seen = inputs.at_B.to(self.mesh.device), inputs.seen
            results = pipeline.infer([inputs.microbatch.to(self.mesh.device)])
            self.cache_entries = sum(len(stage.cache.entries) for stage in stages if stage.cache is not None)
            return results[0][:, 0] if results else None

        return step

    def _choose(self, logits_BV: Tensor | None, rows: _Sequences, sampling: Sampling) -> list[int]:
        """The next id of each row: chosen on one rank and broadcast to all."""
        ids_B = torch.zeros(len(rows.ids), dtype=torch.int64, device=self.mesh.device)
        if logits_BV is not None:
            whole_BV = all_gather(logits_BV, self.mesh[Axis.TP], dim=-1)[:, : self.vocab]
            if self.mesh.rank == self._chooser:
                ids_B = choose(whole_BV, sampling, rows.samples, [len(row) for row in rows.ids])
        ids: list[int] = broadcast(ids_B, self.mesh.world, source=self._chooser).tolist()
        if NOT_FINITE in ids:
            row = ids.index(NOT_FINITE)
            raise MegastackError(
                f"prompt {row}: the logits after {counted(len(rows.ids[row]), 'token')} are not finite"
            )
        return ids


@dataclass(frozen=True)
class _Inputs:
    """The inputs of one run through the stages.

    Attributes:
        microbatch: the tokens.
        at_B: the index in each row at which logits are computed.
        seen: the length of the longest row, new tokens included.
    """

    microbatch: Microbatch
    at_B: Tensor
    seen: int


class _Sequences:
    """The ids of each text so far."""

    def __init__(self, ids: list[list[int]], end: int | None, first_sample: int) -> None:
        self.ids, self.end = ids, end
        self.ended = [False] * len(ids)
        self.samples = range(first_sample, first_sample + len(ids))

    def append(self, ids: Sequence[int]) -> list[int | None]:
        """Append a token to each text that has not ended. Returns the token of each text, or None."""
        added: list[int | None] = [None if over else i for i, over in zip(ids, self.ended, strict=True)]
        for row, i in enumerate(added):
            if i is not None:
                self.ids[row].append(i)
                self.ended[row] = i == self.end
        return added

    def whole(self) -> _Inputs:
        """All tokens, padded at the end."""
        lengths = [len(row) for row in self.ids]
        size = max(lengths)
        tokens_BS = torch.tensor([row + [PADDING] * (size - len(row)) for row in self.ids])
        positions_BS = torch.arange(size).repeat(len(self.ids), 1)
        return _Inputs(_microbatch(tokens_BS, positions_BS), torch.tensor(lengths) - 1, size)

    def newest(self) -> _Inputs:
        """The last token of each text; a text that has ended repeats its last token at the same position."""
        tokens_BS = torch.tensor([row[-1:] for row in self.ids])
        positions_BS = torch.tensor([[len(row) - 1] for row in self.ids])
        seen = max(len(row) for row in self.ids)
        return _Inputs(_microbatch(tokens_BS, positions_BS), torch.zeros(len(self.ids), dtype=torch.int64), seen)


def _microbatch(tokens_BS: Tensor, positions_BS: Tensor) -> Microbatch:
    labels_BS = torch.full_like(tokens_BS, IGNORED_LABEL)
    return Microbatch(tokens_BS, labels_BS, positions_BS, None, torch.arange(len(tokens_BS)), valid_tokens=0)


class _InferenceStage(nn.Module):
    """A stage with the cache of one generation, as the pipeline calls it."""

    def __init__(self, decoder: Decoder, cache: KeyValueCache | None) -> None:
        super().__init__()
        self.decoder, self.cache = decoder, cache
        self.at_B, self.seen = torch.zeros(0, dtype=torch.int64), 0

    def forward(self, stage_input: Any, microbatch: Microbatch) -> Any:
        cache = None if self.cache is None else self.cache.up_to(self.seen)
        return self.decoder.infer(stage_input, microbatch, at_B=self.at_B, cache=cache)
