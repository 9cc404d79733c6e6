"""Suggestions for unknown keys, based on names that other systems use, on the last word, and on similar spelling.

A suggestion is only printed, never applied.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from megastack.config.fields import keys
from megastack.config.schema import TrainConfig

OTHER_SYSTEMS: Mapping[str, str] = {
    # Megatron-LM
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "num_virtual_stages_per_pipeline_rank": "schedule.chunks",
    "virtual_pipeline_model_parallel_size": "schedule.chunks",
    "num_layers_per_virtual_pipeline_stage": "schedule.chunks",
    "microbatch_group_size_per_virtual_pipeline_stage": "schedule.round",
    "decoder_first_pipeline_num_layers": "parallel.layers_per_stage",
    "decoder_last_pipeline_num_layers": "parallel.layers_per_stage",
    "pipeline_model_parallel_layout": "parallel.layers_per_stage",
    "use_distributed_optimizer": "parallel.zero.stage",
    "ddp_bucket_size": "parallel.bucket_size",
    "ddp_num_buckets": "parallel.bucket_size",
    "optimizer": "optim.name",
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "ffn_hidden_size": "model.ffn",
    "num_attention_heads": "model.heads",
    "num_query_groups": "model.kv_groups",
    "kv_channels": "model.head_dim",
    "max_position_embeddings": "model.max_positions",
    "position_embedding_type": "model.positions",
    "rotary_base": "model.rope.theta",
    "make_vocab_size_divisible_by": "model.vocab_multiple",
    "padded_vocab_size": "model.vocab",
    "normalization": "model.norm",
    "norm_epsilon": "model.norm_eps",
    "layernorm_epsilon": "model.norm_eps",
    "swiglu": "model.activation",
    "qk_layernorm": "model.qk_norm",
    "add_qkv_bias": "model.qkv_bias",
    "add_bias_linear": "model.bias",
    "disable_bias_linear": "model.bias",
    "untie_embeddings_and_output_weights": "model.tied",
    "hidden_dropout": "model.dropout",
    "init_method_std": "model.init_std",
    "seq_length": "batch.sequence_length",
    "seq_len": "batch.sequence_length",
    "micro_batch_size": "batch.micro_size",
    "global_batch_size": "batch.global_size",
    "train_iters": "run.steps",
    "eval_interval": "run.validate_every",
    "eval_iters": "run.validate_samples",
    "log_interval": "run.log_every",
    "exit_duration_in_mins": "run.time_limit_s",
    "min_lr": "lr.floor",
    "lr_decay_style": "lr.schedule",
    "lr_decay_iters": "lr.total_steps",
    "lr_warmup_iters": "lr.warmup_steps",
    "lr_wsd_decay_iters": "lr.decay_steps",
    "clip_grad": "optim.clip_norm",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_eps": "optim.eps",
    "sgd_momentum": "optim.momentum",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "accumulate_allreduce_grads_in_fp32": "precision.reduce",
    "recompute_granularity": "recompute.mode",
    "recompute_activations": "recompute.mode",
    "distributed_timeout_minutes": "launch.timeout_s",
    "save": "run.dir",
    "save_interval": "checkpoint.every",
    "async_save": "checkpoint.asynchronous",
    "load": "resume",
    "data_path": "data.paths",
    "data_stages": "data.phases",
    "data.stage": "data.phases",
    "tokenizer_model": "data.tokenizer",
    "tokenizer_type": "data.tokenizer",
    "reset_attention_mask": "data.document_mask",
    "tensorboard_dir": "observe.tensorboard",
    # DeepSpeed
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.global_size",
    "gradient_clipping": "optim.clip_norm",
    "zero_optimization": "parallel.zero.stage",
    "zero_stage": "parallel.zero.stage",
    "reduce_bucket_size": "parallel.bucket_size",
    "pipeline.stages": "parallel.pp",
    "num_stages": "parallel.pp",
    "offload_optimizer": "parallel.zero.offload",
    "steps_per_print": "run.log_every",
    "scheduler": "lr.schedule",
    "warmup_num_steps": "lr.warmup_steps",
    "total_num_steps": "lr.total_steps",
    "activation_checkpointing": "recompute.mode",
    "autotp_size": "parallel.tp",
    # torchtitan, transformers and common usage
    "tensor_parallel_degree": "parallel.tp",
    "pipeline_parallel_degree": "parallel.pp",
    "context_parallel_degree": "parallel.cp",
    "expert_parallel_degree": "parallel.ep",
    "data_parallel_replicate_degree": "parallel.dp",
    "data_parallel_shard_degree": "parallel.dp",
    "pipeline_parallel_schedule": "schedule.name",
    "tensor_parallel_size": "parallel.tp",
    "pipeline_parallel_size": "parallel.pp",
    "data_parallel_size": "parallel.dp",
    "bucket_cap_mb": "parallel.bucket_size",
    "local_batch_size": "batch.micro_size",
    "max_steps": "run.steps",
    "max_norm": "optim.clip_norm",
    "num_hidden_layers": "model.layers",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_key_value_heads": "model.kv_groups",
    "n_kv_heads": "model.kv_groups",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "n_embd": "model.hidden",
    "dim": "model.hidden",
    "d_model": "model.hidden",
    "intermediate_size": "model.ffn",
    "vocab_size": "model.vocab",
    "rope_theta": "model.rope.theta",
    "rms_norm_eps": "model.norm_eps",
    "tie_word_embeddings": "model.tied",
    "tie_embeddings": "model.tied",
    "tied_embeddings": "model.tied",
    "initializer_range": "model.init_std",
    "learning_rate": "optim.lr",
    "warmup": "lr.warmup_steps",
    "grad_clip": "optim.clip_norm",
    "gradient_checkpointing": "recompute.mode",
    "dtype": "precision.compute",
    "batch_size": "batch.global_size",
    "virtual_stages": "schedule.chunks",
}
"""Maps settings of other systems (last word, with underscores) to the corresponding key."""

SWITCHES = ("enabled", "device", "type")
"""Last words that enable a section or select its kind (``bf16.enabled``, ``optimizer.type``); they are ignored."""

CLOSE, CLOSE_WORD = 0.7, 0.8
"""Minimum :mod:`difflib` similarity of a full key and of a last word."""


@cache
def known_keys() -> tuple[str, ...]:
    """Return every dotted key of the configuration, sections included."""
    return tuple(key.name for key in keys(TrainConfig))


@cache
def _value_keys() -> frozenset[str]:
    """The dotted keys that hold a value, and so have no keys below them."""
    return frozenset(key.name for key in keys(TrainConfig) if not key.is_section)


def _prefixes(path: Sequence[str]) -> Iterator[str]:
    return (".".join(path[:end]) for end in range(1, len(path)))


def suggest(key: str, known: Sequence[str] | None = None) -> str | None:
    """Return the existing key that an unknown key most likely refers to, or None.

    Args:
        key: the unknown key; names of other systems may contain dashes and belong to any section.
        known: the keys to choose from; None for every key, including the names of other systems.
    """
    path = key.replace("-", "_").lower().strip("_").split(".")
    if known is None and (value := next((name for name in _prefixes(path) if name in _value_keys()), None)):
        return value
    if len(path) > 1 and path[-1] in SWITCHES and path[-2] in OTHER_SYSTEMS:
        path.pop()
    last = path[-1]
    for name in (".".join(path[-2:]), last):
        if known is None and name in OTHER_SYSTEMS:
            return OTHER_SYSTEMS[name]
    choices = known_keys() if known is None else tuple(known)
    named = [choice for choice in choices if choice.split(".")[-1] == last]
    if len(named) == 1:
        return named[0]
    if close := difflib.get_close_matches(".".join(path), choices, n=1, cutoff=CLOSE):
        return close[0]
    by_last = {choice.split(".")[-1]: choice for choice in reversed(choices)}
    close = difflib.get_close_matches(last, by_last, n=1, cutoff=CLOSE_WORD)
    return by_last[close[0]] if close else None
