"""Texts from prompts, on any tensor- and pipeline-parallel layout: the same ids on every one of them.

Every rank runs the same loop over tokens. A token goes through the stages as a microbatch goes through a forward
(:meth:`megastack.pipeline.runtime.Pipeline.infer`), the last stage's logits are gathered over tp, one rank chooses,
and the ids are broadcast to all. So all ranks know the same texts and end together. Prompts of unequal lengths make
one batch, the shorter ones with padding behind them; see :mod:`megastack.layers.cache` for why that costs nothing.

Each call makes its own caches and forgets them at its end. Not here: loading weights, text, the command line.

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
    """How a prompt went on.

    Attributes:
        prompt: its ids.
        ids: what was chosen, the end id included.
        ended: it ended by itself, not for its length.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    ended: bool


def check_prompts(prompts: Sequence[Sequence[int]], new: int, *, vocab: int, longest: int | None) -> None:
    """Everything that can be said against prompts before anything is computed; all ranks say the same.

    Args:
        prompts: their ids.
        new: tokens to add to each.
        vocab: ids are below it.
        longest: positions that the model has; None is no limit.

    Raises:
        ConfigError: with every fault.
    """
    errors = [] if prompts else ["no prompt: nothing to go on with; use --prompt TEXT or --prompts FILE"]
    if new < 1:
        errors.append(f"max_new_tokens={new}: must be at least 1; use 1 or more")
    for number, prompt in enumerate(prompts):
        bad = next((i for i in prompt if not 0 <= i < vocab), None)
        if not prompt:
            errors.append(f"prompt {number}: has no token; use a prompt of at least one")
        elif bad is not None:
            errors.append(f"prompt {number}: id {bad} is outside model.vocab={vocab}; use ids from 0 to {vocab - 1}")
        elif longest is not None and len(prompt) + new > longest:
            left = longest - len(prompt)
            remedy = (
                f"max_new_tokens={left} or less" if left > 0 else f"a prompt of at most {counted(longest - 1, 'token')}"
            )
            errors.append(
                f"prompt {number}: its {counted(len(prompt), 'token')} and max_new_tokens={new} exceed the "
                f"{counted(longest, 'position')} "
                f"that the model has; use {remedy}"
            )
    if errors:
        raise ConfigError("\n".join(errors))


class Generator:
    """Continues prompts with the stages of this rank; all ranks of the mesh make one and call it alike.

    Args:
        stages: this rank's, for whole sequences on every tp rank, as
            :func:`megastack.assemble.inference.inference_stages` gives.
        schedule: which rank has which stage.
        mesh: the ranks; data-parallel ones all do the same.
        vocab: the real vocabulary.
        longest: positions that the model has; None is no limit.

    Attributes:
        uncached_because: why whole rows are run for every token, with the module's name; None where every layer on
            every rank takes earlier tokens from a cache. Looked at again at every call, for hooks come and go.
        cache_entries: layers in this rank's caches after the last call.
    """

    def __init__(
        self, stages: Sequence[Decoder], schedule: Schedule, mesh: Mesh, *, vocab: int, longest: int | None = None
    ) -> None:
        self.stages, self.schedule, self.mesh = stages, schedule, mesh
        self.vocab, self.longest = vocab, longest
        self.uncached_because = self._agreed_obstacle()
        self.cache_entries = 0
        last = schedule.stage_rank(schedule.stages - 1)
        self._chooser = mesh.shape.rank_at(pp=last, dp=0, cp=0, tp=0)

    @property
    def can_cache(self) -> bool:
        """Whether every layer takes earlier tokens from a cache."""
        return self.uncached_because is None

    def _agreed_obstacle(self) -> str | None:
        """The first reason of any rank, the same on all of them: a hook on one rank makes all run whole rows."""
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
        """How each prompt goes on; the same on every rank.

        Args:
            prompts: ids of each prompt.
            max_new_tokens: where a text that does not end by itself is cut.
            sampling: how tokens are chosen.
            end: the id that ends a text; None ends none.
            cache: use caches, where the layers can.
            first_sample: number of the first prompt's text, from which its random numbers follow.
            on_tokens: called after each token with the id of each row, None for rows that have ended.

        Raises:
            ConfigError: before anything is computed, for prompts that the model cannot take.
            MegastackError: logits that are no numbers.
        """
        check_prompts(prompts, max_new_tokens, vocab=self.vocab, longest=self.longest)
        rows = _Rows([list(prompt) for prompt in prompts], end, first_sample)
        self.uncached_because = self._agreed_obstacle()
        steps = self._steps(rows, max_new_tokens, cached=cache and self.can_cache)
        for _ in range(max_new_tokens):
            ids = self._agreed(steps(), rows, sampling)
            taken = rows.take(ids)
            if on_tokens is not None:
                on_tokens(taken)
            if all(rows.ended):
                break
        lengths = [len(prompt) for prompt in prompts]
        return [
            Completion(tuple(row[:length]), tuple(row[length:]), ended)
            for row, length, ended in zip(rows.ids, lengths, rows.ended, strict=True)
        ]

    def _steps(self, rows: _Rows, new: int, *, cached: bool) -> Callable[[], Tensor | None]:
        """A function that runs the next token of every row, and gives this rank's logits where the head is."""
        capacity = max(map(len, rows.ids)) + new
        stages = [_InferenceStage(stage, KeyValueCache(capacity) if cached else None) for stage in self.stages]
        pipeline = Pipeline(stages, self.schedule, self.mesh)
        begun = False

        def step() -> Tensor | None:
            nonlocal begun
            call = rows.newest() if cached and begun else rows.whole()
            begun = True
            for stage in stages:
                stage.at_B, stage.seen = call.at_B.to(self.mesh.device), call.seen
            results = pipeline.infer([call.microbatch.to(self.mesh.device)])
            self.cache_entries = sum(len(stage.cache.entries) for stage in stages if stage.cache is not None)
            return results[0][:, 0] if results else None

        return step

    def _agreed(self, logits_BV: Tensor | None, rows: _Rows, sampling: Sampling) -> list[int]:
        """The next id of each row: chosen on one rank, known to all."""
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
class _Call:
    """One run through the stages: tokens, the place in each row whose logits are wanted, the tokens seen by then."""

    microbatch: Microbatch
    at_B: Tensor
    seen: int


class _Rows:
    """The texts so far."""

    def __init__(self, ids: list[list[int]], end: int | None, first_sample: int) -> None:
        self.ids, self.end = ids, end
        self.ended = [False] * len(ids)
        self.samples = range(first_sample, first_sample + len(ids))

    def take(self, ids: Sequence[int]) -> list[int | None]:
        """Add a token to each text that has not ended; what was added."""
        added: list[int | None] = [None if over else i for i, over in zip(ids, self.ended, strict=True)]
        for row, i in enumerate(added):
            if i is not None:
                self.ids[row].append(i)
                self.ended[row] = i == self.end
        return added

    def whole(self) -> _Call:
        """All tokens, padded behind."""
        lengths = [len(row) for row in self.ids]
        size = max(lengths)
        tokens_BS = torch.tensor([row + [PADDING] * (size - len(row)) for row in self.ids])
        positions_BS = torch.arange(size).repeat(len(self.ids), 1)
        return _Call(_microbatch(tokens_BS, positions_BS), torch.tensor(lengths) - 1, size)

    def newest(self) -> _Call:
        """The last token of each text; one that has ended repeats itself, at its own place."""
        tokens_BS = torch.tensor([row[-1:] for row in self.ids])
        positions_BS = torch.tensor([[len(row) - 1] for row in self.ids])
        seen = max(len(row) for row in self.ids)
        return _Call(_microbatch(tokens_BS, positions_BS), torch.zeros(len(self.ids), dtype=torch.int64), seen)


def _microbatch(tokens_BS: Tensor, positions_BS: Tensor) -> Microbatch:
    labels_BS = torch.full_like(tokens_BS, IGNORED_LABEL)
    return Microbatch(tokens_BS, labels_BS, positions_BS, None, torch.arange(len(tokens_BS)), valid_tokens=0)


class _InferenceStage(nn.Module):
    """A stage as the pipeline calls it, with the cache of one generation."""

    def __init__(self, decoder: Decoder, cache: KeyValueCache | None) -> None:
        super().__init__()
        self.decoder, self.cache = decoder, cache
        self.at_B, self.seen = torch.zeros(0, dtype=torch.int64), 0

    def forward(self, carry: Any, microbatch: Microbatch) -> Any:
        cache = None if self.cache is None else self.cache.up_to(self.seen)
        return self.decoder.infer(carry, microbatch, at_B=self.at_B, cache=cache)
