"""Rules about values that go together outside the grid: positions, optimizer, learning rate, precision, data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megastack.config.convert import value_of
from megastack.config.schema import RopeOptions, TrainConfig
from megastack.errors import Violation, spell

BYTE_IDS = 256
"""Ids of the byte tokenizer."""


def positions_fit(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Settings of learned positions go with learned positions, rotary ones with rotary ones."""
    model, rope, length = config.model, config.model.rope, config.batch.sequence_length
    if model.positions == "rope":
        if model.max_positions is not None:
            rule = "rotary positions have no table; only for model.positions=learned"
            yield Violation("model.max_positions", model.max_positions, rule, (None,))
        yield from _rope_fits(rope)
        return
    if model.max_positions is not None and model.max_positions < length:
        rule = f"must hold the positions of batch.sequence_length={length}"
        yield Violation("model.max_positions", model.max_positions, rule, (f"{length} or more", None))
    if rope != RopeOptions():
        for name, value in vars(rope).items():
            default = getattr(RopeOptions(), name)
            if value != default:
                yield Violation(f"model.rope.{name}", value, "only for model.positions=rope", (default,))


def _rope_fits(rope: RopeOptions) -> Iterator[Violation]:
    used = {"none": (), "linear": ("factor",), "llama3": ROPE_STRETCH}[rope.scaling]
    for name in ROPE_STRETCH:
        value, default = getattr(rope, name), getattr(RopeOptions(), name)
        if name not in used and value != default:
            rule = f"model.rope.scaling={rope.scaling} does not use it"
            yield Violation(f"model.rope.{name}", value, rule, (default, "another model.rope.scaling"))
    if rope.scaling == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        rule = f"must exceed model.rope.low_freq_factor={rope.low_freq_factor}"
        yield Violation("model.rope.high_freq_factor", rope.high_freq_factor, rule, (RopeOptions().high_freq_factor,))


ROPE_STRETCH = ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions")


def layers_are_named(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """A layer of the user's is a mapping with a dotted ``_target_``."""
    for name in ("attention", "mlp", "block"):
        spec = getattr(config.model, name)
        if spec is not None and not _names_a_class(spec):
            example = f"{{_target_: my_file.My{name.capitalize()}}}"
            rule = "must be null or name a class by its module and name under _target_"
            yield Violation(f"model.{name}", spec, rule, (example, None))


def _names_a_class(spec: Any) -> bool:
    if not isinstance(spec, Mapping) or not all(isinstance(key, str) for key in spec):
        return False
    target = spec.get("_target_")
    return isinstance(target, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", target) is not None


def patterns_are_regular(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Patterns over parameter names are regular expressions that can be compiled."""
    for key in ("optim.no_decay", "optim.freeze", "precision.keep_fp32"):
        for at, pattern in enumerate(value_of(config, key)):
            yield from _pattern(f"{key}[{at}]", pattern)
    for at, group in enumerate(config.optim.groups):
        yield from _pattern(f"optim.groups[{at}].pattern", group.pattern)


def recompute_is_clear(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """A pattern of modules to recompute belongs to the mode that reads it, and the mode to a pattern."""
    mode, pattern = config.recompute.mode, config.recompute.pattern
    if mode == "pattern" and pattern is None:
        rule = "needs the names of the modules in recompute.pattern"
        yield Violation("recompute.mode", mode, rule, (r"recompute.pattern='blocks\.\d+\.mlp'", "full", "selective"))
    elif mode != "pattern" and pattern is not None:
        rule = f"is read by recompute.mode=pattern, not by {mode}"
        yield Violation("recompute.pattern", pattern, rule, (None, "recompute.mode=pattern"))
    elif pattern is not None:
        yield from _pattern("recompute.pattern", pattern)


def _pattern(key: str, pattern: str) -> Iterator[Violation]:
    try:
        re.compile(pattern)
    except re.error as error:
        yield Violation(key, pattern, f"is no regular expression ({error})", (re.escape(pattern),))
    if not pattern:
        yield Violation(key, "''", "an empty pattern matches every parameter", (".*",))


def betas_fit(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """AdamW has two moments."""
    betas = config.optim.betas
    if len(betas) != 2:
        yield Violation("optim.betas", betas, "must be two numbers", ([0.9, 0.95],))


def learning_rate_fits(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Warm-up and decay fit into the schedule."""
    lr = config.lr
    total, source = (config.run.steps, "run.steps") if lr.total_steps is None else (lr.total_steps, "lr.total_steps")
    if lr.warmup_steps > total:
        rule = f"must not be longer than {source}={total}"
        yield Violation("lr.warmup_steps", lr.warmup_steps, rule, (f"{total} or less",))
    elif lr.decay_steps is not None and lr.schedule == "wsd" and lr.decay_steps > total - lr.warmup_steps:
        rule = f"must fit between lr.warmup_steps={lr.warmup_steps} and {source}={total}"
        yield Violation("lr.decay_steps", lr.decay_steps, rule, (f"{total - lr.warmup_steps} or less",))
    if lr.decay_steps is not None and lr.schedule != "wsd":
        rule = f"lr.schedule={lr.schedule} has no decay of its own length"
        yield Violation("lr.decay_steps", lr.decay_steps, rule, (None, "lr.schedule=wsd"))


def data_fits(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Sources have the paths they read, and the vocabulary holds every byte where bytes are the tokens."""
    yield from source_fits(config, "data.")
    data = config.data
    kinds = {each.source for each in data.blend} or {data.source}
    if data.tokenizer == "byte" and config.model.vocab < BYTE_IDS and kinds != {"bin"}:
        rule = f"must hold the {BYTE_IDS} ids of data.tokenizer=byte"
        yield Violation("model.vocab", config.model.vocab, rule, (f"{BYTE_IDS} or more",))
    if data.tokenizer == "byte" and data.allow_special_tokens:
        rule = "data.tokenizer=byte has no special tokens"
        yield Violation("data.allow_special_tokens", True, rule, (False, "data.tokenizer=PATH"))
    if "bin" in kinds and not data.pack:
        yield Violation("data.pack", data.pack, "token files are packed, without a list of their documents", (True,))


def source_fits(config: TrainConfig, prefix: str) -> Iterator[Violation]:
    """The source or the blend of a configuration without stages, its keys named with this prefix."""
    data = config.data
    if not data.blend:
        yield from _paths_fit(prefix, data.source, data.paths)
        return
    if data.paths:
        yield Violation(f"{prefix}paths", data.paths, f"{prefix}blend names the paths of each of its sources", ([],))
    for at, each in enumerate(data.blend):
        yield from _paths_fit(f"{prefix}blend[{at}].", each.source, each.paths)
    if not any(each.weight for each in data.blend):
        rule = "no source has a weight above 0"
        yield Violation(f"{prefix}blend", [each.weight for each in data.blend], rule, ("weights like 0.7 and 0.3",))


def _paths_fit(prefix: str, source: str, paths: Sequence[str]) -> Iterator[Violation]:
    if source == "builtin" and paths:
        rule = f"{prefix}source=builtin reads no files"
        yield Violation(f"{prefix}paths", paths, rule, ([], *(f"{prefix}source={kind}" for kind in FILES)))
    if source != "builtin" and not paths:
        rule = f"{prefix}source={source} reads files and none are named"
        yield Violation(f"{prefix}paths", paths, rule, (f"{prefix}paths=[FILE,…]",))


FILES = ("text", "jsonl", "bin")
"""Sources that read files."""


def continuation_is_clear(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """A run knows which folder it continues in, and starts from one thing only."""
    if config.resume == "auto" and config.run.dir is None:
        advice = ("run.dir=FOLDER",) if config.launch.elastic else ("run.dir=FOLDER", "last", None)
        yield Violation("resume", "auto", "needs the folder to continue in", advice)
    if config.resume == "last" and config.run.dir is not None:
        rule = f"continues the newest run under run.root, so run.dir={config.run.dir} would be ignored"
        yield Violation("resume", "last", rule, ("auto", "run.dir=null"))
    if config.resume not in (None, "auto") and config.checkpoint.load_weights is not None:
        rule = "resume already brings weights"
        yield Violation(
            "checkpoint.load_weights", config.checkpoint.load_weights, rule, (None, "resume=null", "resume=auto")
        )


def elastic_is_clear(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """A job whose ranks change goes on in its own folder, and says nothing about how many machines there are."""
    if not config.launch.elastic:
        return
    if config.resume != "auto":
        rule = f"a restart goes on in its folder from the newest checkpoint, resume={spell(config.resume)} does not"
        yield Violation("launch.elastic", True, rule, ("resume=auto with run.dir=FOLDER", False))
    if config.cluster.nodes > 1:
        rule = "launch.elastic=true has as many machines as there are at each start"
        yield Violation("cluster.nodes", config.cluster.nodes, rule, (1, "cluster.ranks_per_node=RANKS"))


def recorded_steps_exist(config: TrainConfig, world_size: int | None) -> Iterator[Violation]:
    """Steps to be recorded are steps of the run."""
    for key in ("observe.dump_steps", "observe.trace_steps"):
        beyond = [step for step in value_of(config, key) if step > config.run.steps]
        if beyond:
            rule = f"has steps beyond run.steps={config.run.steps}"
            yield Violation(key, value_of(config, key), rule, (f"steps from 1 to {config.run.steps}",))


VALUE_RULES = (
    positions_fit,
    layers_are_named,
    patterns_are_regular,
    recompute_is_clear,
    betas_fit,
    learning_rate_fits,
    data_fits,
    continuation_is_clear,
    elastic_is_clear,
    recorded_steps_exist,
)
