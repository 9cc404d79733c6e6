"""Numerical check of an import or export: the largest difference between the logits of two implementations.

One implementation is the decoder on one rank with the weights of the checkpoint; each block runs as its own pipeline
stage, so only one block is in memory. The other one reads the Hugging Face folder: ``transformers`` if it is installed
(in fp32, with the whole model in memory), otherwise :mod:`megastack.interop.reference` (in fp64). The result names the
implementation.

The limit is relative to the largest logit. In fp64, the difference is only rounding. ``transformers`` computes rotary
tables and norms in fp32 regardless of the dtype of the weights, so its limit is larger. A wrong convention changes the
logits by their own magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megastack.batch import Microbatch
from megastack.checkpoint.state import model_items
from megastack.config.choices import ComputeDtype
from megastack.config.schema import ParallelOptions, PrecisionOptions, RecomputeOptions, TrainConfig
from megastack.errors import ConfigError, MegastackError
from megastack.interop.hub_folder import HubFolder
from megastack.interop.reference import hub_logits
from megastack.interop.stored_weights import StoredWeights, fill_
from megastack.interop.weight_map import Weight
from megastack.mesh.mesh import Mesh
from megastack.models.decoder import Decoder

LIMITS = {"transformers": 5e-5, "reference": 1e-9}
"""Largest accepted difference by implementation, relative to the largest logit (at least 1)."""
SEQUENCES, LENGTH = 2, 16


@dataclass(frozen=True)
class Proof:
    """Result of comparing the logits of two implementations.

    Attributes:
        against: the implementation that read the Hugging Face folder.
        dtype: the dtype of both computations.
        difference: the largest absolute difference between two logits.
        scale: the largest absolute logit, at least 1.
    """

    against: str
    dtype: str
    difference: float
    scale: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within the limit; NaN is not."""
        return self.difference <= LIMITS[self.against] * self.scale

    def __str__(self) -> str:
        verdict = "equal" if self.holds else "DIFFERENT"
        limit = LIMITS[self.against] * self.scale
        return (
            f"proof     {verdict}: logits of megastack (one rank) and {_NAMES[self.against]}, {self.dtype}, "
            f"{SEQUENCES} sequences: largest difference {self.difference:.3g}, limit {limit:.3g}"
        )


_NAMES = {"transformers": "transformers", "reference": "megastack's plain reference of the Hugging Face classes"}


def choose(against: str) -> str:
    """Choose the implementation to compare with; ``auto`` selects transformers if it is installed.

    Raises:
        ConfigError: transformers is requested but not installed.
    """
    installed = find_spec("transformers") is not None
    if against == "transformers" and not installed:
        rule = "is not installed; use pip install 'megastack[hf]', or --proof reference"
        raise ConfigError(f"--proof transformers: {rule}")
    return ("transformers" if installed else "reference") if against == "auto" else against


def prove(
    config: TrainConfig, weights: dict[str, Weight], stored: StoredWeights, folder: HubFolder, against: str
) -> Proof:
    """Compare the logits of a checkpoint and a Hugging Face folder.

    Args:
        config: the configuration of the run, whose model is built.
        weights: the model's weights by global name.
        stored: the checkpoint.
        folder: the Hugging Face folder.
        against: ``transformers`` or ``reference``.
    """
    dtype = torch.float32 if against == "transformers" else torch.float64
    tokens_BS = proof_tokens(config)
    own = decoder_logits(config, weights, stored, tokens_BS, dtype)
    other = _transformers(folder, tokens_BS) if against == "transformers" else hub_logits(folder, tokens_BS, dtype)
    difference, scale = float((own - other).abs().max()), max(1.0, float(other.abs().max()))
    return Proof(against, str(dtype).removeprefix("torch."), difference, scale)


def proof_tokens(config: TrainConfig) -> Tensor:
    """Return token ids from the whole vocabulary, including the first and the last."""
    longest = config.model.max_positions or config.batch.sequence_length
    length = min(LENGTH, longest)
    tokens = torch.arange(SEQUENCES * length) * 7919 % config.model.vocab
    tokens[-1] = config.model.vocab - 1
    return tokens.view(SEQUENCES, length)


def decoder_logits(
    config: TrainConfig,
    weights: dict[str, Weight],
    stored: StoredWeights | HubFolder,
    tokens_BS: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Compute logits (B, S, V) of the decoder on one rank, with one block in memory at a time.

    Args:
        config: the configuration of the run, whose model is built.
        weights: the model's weights by global name.
        stored: the checkpoint or Hugging Face folder that holds them.
        tokens_BS: token ids.
        dtype: the dtype to compute in.
    """
    config = _on_one_rank(config)
    microbatch = _microbatch(tokens_BS)
    inputs: dict[str, Any] = {}
    with torch.no_grad():
        for stage in _stages(config, dtype):
            fill_(model_items([stage], stage.mesh), weights, stored.read)
            if stage.has_head:
                return stage.logits(inputs, microbatch)[..., : config.model.vocab]
            inputs = stage(inputs, microbatch)
    raise AssertionError("the last stage has the head")


def _on_one_rank(config: TrainConfig) -> TrainConfig:
    """Return the configuration of the same model on one rank, in the dtype of its weights."""
    precision = PrecisionOptions(compute=ComputeDtype.fp32)
    return replace(config, parallel=ParallelOptions(), precision=precision, recompute=RecomputeOptions())


def _stages(config: TrainConfig, dtype: torch.dtype) -> Iterator[Decoder]:
    """Yield the embedding, each block and the head as stages with zero parameters, one in memory at a time."""
    mesh, depth = Mesh.single(), config.model.layers
    slices = [(0, 0), *((layer, layer + 1) for layer in range(depth)), (depth, depth)]
    for number, (start, stop) in enumerate(slices):
        ends = {"embedding": number == 0, "head": number == len(slices) - 1}
        with torch.device("meta"):
            stage = Decoder(config, mesh, layers=range(start, stop), **ends).to(dtype)
        stage = stage.to_empty(device="cpu").eval()
        for parameter in stage.parameters():
            parameter.zero_()
        yield stage


def _microbatch(tokens_BS: Tensor) -> Microbatch:
    rows, length = tokens_BS.shape
    positions_BS = torch.arange(length).repeat(rows, 1)
    return Microbatch(tokens_BS, tokens_BS, positions_BS, None, samples_B=torch.arange(rows))


def _transformers(folder: HubFolder, tokens_BS: Tensor) -> Tensor:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder.path), local_files_only=True)
    with torch.no_grad():
        return model.to(torch.float32).eval()(tokens_BS, use_cache=False).logits


class ProofError(MegastackError):
    """The logits of the two implementations differ; the output was removed.

    Args:
        proof: the comparison.
    """

    def __init__(self, proof: Proof) -> None:
        super().__init__(str(proof))
        self.proof = proof
