"""Rules about values outside the parallel layout: model, optimizer, learning rate, data, resume, paths and names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence

from megastack.config.convert import value_of
from megastack.config.schema import RopeOptions, TrainConfig
from megastack.errors import Violation, spell

BYTE_IDS = 256
"""Number of ids of the byte tokenizer."""


def positions_fit(config: TrainConfig) -> Iterator[Violation]:
    """Settings of learned positions require learned positions; settings of rotary embeddings require rotary ones."""
    model, rope, length = config.model, config.model.rope, config.batch.sequence_length
    if model.positions == "rope":
        if model.max_positions is not None:
            rule = "only for model.positions=learned; rotary embeddings have no table"
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


def layers_are_named(config: TrainConfig) -> Iterator[Violation]:
    """A custom layer is a mapping with a dotted ``_target_``."""
    for name in ("attention", "mlp", "block"):
        spec = getattr(config.model, name)
        if spec is not None and not _names_a_class(spec):
            example = f"{{_target_: my_file.My{name.capitalize()}}}"
            rule = "must be null or a mapping whose _target_ is module.Class"
            yield Violation(f"model.{name}", spec, rule, (example, None))


def _names_a_class(spec: object) -> bool:
    if not isinstance(spec, Mapping) or not all(isinstance(key, str) for key in spec):
        return False
    target = spec.get("_target_")
    return isinstance(target, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", target) is not None


def patterns_are_regular(config: TrainConfig) -> Iterator[Violation]:
    """Patterns of parameter names are valid regular expressions."""
    for key in ("optim.no_decay", "optim.freeze", "precision.keep_fp32"):
        for at, pattern in enumerate(value_of(config, key)):
            yield from _pattern(f"{key}[{at}]", pattern)
    for at, group in enumerate(config.optim.groups):
        yield from _pattern(f"optim.groups[{at}].pattern", group.pattern)


def recompute_is_clear(config: TrainConfig) -> Iterator[Violation]:
    """``recompute.pattern`` is set if and only if the mode is ``pattern``."""
    mode, pattern = config.recompute.mode, config.recompute.pattern
    if mode == "pattern" and pattern is None:
        rule = "requires recompute.pattern, the names of the modules"
        yield Violation("recompute.mode", mode, rule, (r"recompute.pattern='blocks\.\d+\.mlp'", "full", "selective"))
    elif mode != "pattern" and pattern is not None:
        rule = f"only for recompute.mode=pattern, not {mode}"
        yield Violation("recompute.pattern", pattern, rule, (None, "recompute.mode=pattern"))
    elif pattern is not None:
        yield from _pattern("recompute.pattern", pattern)


def _pattern(key: str, pattern: str) -> Iterator[Violation]:
    try:
        re.compile(pattern)
    except re.error as error:
        yield Violation(key, pattern, f"is not a regular expression ({error})", (re.escape(pattern),))
    if not pattern:
        yield Violation(key, "''", "an empty pattern matches every parameter", (".*",))


def betas_fit(config: TrainConfig) -> Iterator[Violation]:
    """AdamW has two decay rates."""
    betas = config.optim.betas
    if len(betas) != 2:
        yield Violation("optim.betas", betas, "must be two numbers", ([0.9, 0.95],))


def learning_rate_fits(config: TrainConfig) -> Iterator[Violation]:
    """Warm-up and decay fit within the learning-rate schedule."""
    lr = config.lr
    total, source = (config.run.steps, "run.steps") if lr.total_steps is None else (lr.total_steps, "lr.total_steps")
    if lr.warmup_steps > total:
        rule = f"must not be longer than {source}={total}"
        yield Violation("lr.warmup_steps", lr.warmup_steps, rule, (f"{total} or less",))
    elif lr.decay_steps is not None and lr.schedule == "wsd" and lr.decay_steps > total - lr.warmup_steps:
        rule = f"must fit between lr.warmup_steps={lr.warmup_steps} and {source}={total}"
        yield Violation("lr.decay_steps", lr.decay_steps, rule, (f"{total - lr.warmup_steps} or less",))
    if lr.decay_steps is not None and lr.schedule != "wsd":
        rule = f"lr.schedule={lr.schedule} has no separate decay"
        yield Violation("lr.decay_steps", lr.decay_steps, rule, (None, "lr.schedule=wsd"))


def data_fits(config: TrainConfig) -> Iterator[Violation]:
    """Sources have the paths they need, and the vocabulary matches the tokenizer."""
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
        yield Violation("data.pack", data.pack, "token files are packed and do not list their documents", (True,))


def source_fits(config: TrainConfig, prefix: str) -> Iterator[Violation]:
    """The source or blend of a configuration has the paths it needs.

    Args:
        config: the configuration of a run or of one data phase.
        prefix: prefix of its data keys in violations.
    """
    data = config.data
    if not data.blend:
        yield from _paths_fit(prefix, data.source, data.paths)
        return
    if data.paths:
        yield Violation(f"{prefix}paths", data.paths, f"{prefix}blend lists the paths of each source", ([],))
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
        rule = f"{prefix}source={source} needs at least one path"
        yield Violation(f"{prefix}paths", paths, rule, (f"{prefix}paths=[FILE,…]",))


FILES = ("text", "jsonl", "bin")
"""Sources that read files."""


def continuation_is_clear(config: TrainConfig) -> Iterator[Violation]:
    """``resume`` has a folder to continue in, and weights come from a single source."""
    if config.resume == "auto" and config.run.dir is None:
        advice = ("run.dir=FOLDER",) if config.launch.elastic else ("run.dir=FOLDER", "last", None)
        yield Violation("resume", "auto", "needs the folder to continue in", advice)
    if config.resume == "last" and config.run.dir is not None:
        rule = f"continues the newest run under run.root, so run.dir={config.run.dir} would be ignored"
        yield Violation("resume", "last", rule, ("auto", "run.dir=null"))
    if config.resume not in (None, "auto") and config.checkpoint.load_weights is not None:
        rule = "resume loads weights as well"
        yield Violation(
            "checkpoint.load_weights", config.checkpoint.load_weights, rule, (None, "resume=null", "resume=auto")
        )


def elastic_is_clear(config: TrainConfig) -> Iterator[Violation]:
    """An elastic job resumes in its own folder and does not fix the number of machines."""
    if not config.launch.elastic:
        return
    if config.resume != "auto":
        rule = f"a restart must continue from the newest checkpoint, which resume={spell(config.resume)} does not do"
        yield Violation("launch.elastic", True, rule, ("resume=auto with run.dir=FOLDER", False))
    if config.cluster.nodes > 1:
        rule = "launch.elastic=true does not fix the number of machines"
        yield Violation("cluster.nodes", config.cluster.nodes, rule, (1, "cluster.ranks_per_node=RANKS"))


def numa_binding_has_a_gpu(config: TrainConfig) -> Iterator[Violation]:
    """CPUs are chosen by the position of the rank's GPU."""
    binding = config.launch.numa_binding
    if config.device == "cpu" and binding != "none":
        yield Violation("launch.numa_binding", binding, "needs ranks on GPUs", ("none", "device=cuda"))


def recorded_steps_exist(config: TrainConfig) -> Iterator[Violation]:
    """Recorded steps are steps of the run."""
    for key in ("observe.dump_steps", "observe.profile_steps", "observe.trace_steps"):
        beyond = [step for step in value_of(config, key) if step > config.run.steps]
        if beyond:
            rule = f"contains steps beyond run.steps={config.run.steps}"
            yield Violation(key, value_of(config, key), rule, (f"steps from 1 to {config.run.steps}",))


PATHS: Mapping[str, tuple[object, ...]] = {
    "resume": ("auto", "last", "the path of a checkpoint", None),
    "run.root": ("outputs",),
    "run.dir": ("a folder", None),
    "schedule.path": ("a file", None),
    "data.tokenizer": ("byte", "the path of a tokenizer.json"),
    "checkpoint.load_weights": ("the folder of a checkpoint", None),
}
"""Keys that contain a path, and the advice for an invalid one."""

NAMES: Mapping[str, tuple[object, ...]] = {"run.name": ("train",), "cluster.name": ("local",)}
"""Keys that contain a name, and an example."""

LONGEST_NAME = 255
"""Longest file name that file systems accept, in bytes."""
LONGEST_PATH = 4095
"""Longest path, in bytes."""


def invalid_texts(config: TrainConfig) -> Iterator[Violation]:
    """Yield a violation for each path or name that is empty or that no file system accepts."""
    for key, advice in {**PATHS, **NAMES}.items():
        value = value_of(config, key)
        if isinstance(value, str) and (error := _text_error(value, is_name=key in NAMES)):
            yield Violation(key, _printable(value), error, advice)
    prompt = value_of(config, "run.sample_prompt")
    if isinstance(prompt, str) and not prompt:
        yield Violation("run.sample_prompt", "''", "must not be empty", ("a prompt", None))
    for key, paths in _lists_of_paths(config):
        for at, path in enumerate(paths):
            if error := _text_error(path, is_name=False):
                yield Violation(f"{key}[{at}]", _printable(path), error, ("the path of a file",))


def _lists_of_paths(config: TrainConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield every list of paths with its key; invalid lists are skipped."""
    phases = value_of(config, "data.phases")
    yield from _paths_of("data.", value_of(config, "data.paths"), value_of(config, "data.blend"))
    for at, phase in enumerate(phases if isinstance(phases, list) else ()):
        yield from _paths_of(f"data.phases[{at}].", phase.paths, phase.blend)


def _paths_of(prefix: str, paths: object, blend: object) -> Iterator[tuple[str, list[str]]]:
    if isinstance(paths, list):
        yield f"{prefix}paths", paths
    for at, entry in enumerate(blend if isinstance(blend, list) else ()):
        if isinstance(entry.paths, list):
            yield f"{prefix}blend[{at}].paths", entry.paths


def _text_error(text: str, *, is_name: bool) -> str | None:
    """Return the rule that a path, or a name, violates; None if it is valid."""
    if not text.strip():
        return "must not be empty"
    if not _is_plain(text):
        return "must not contain control characters"
    parts = [text] if is_name else text.split("/")
    if max(len(part.encode()) for part in parts) > LONGEST_NAME or len(text.encode()) > LONGEST_PATH:
        return f"must be at most {LONGEST_NAME} bytes{'' if is_name else f' between slashes and {LONGEST_PATH} in all'}"
    if is_name and ("/" in text or text in (".", "..")):
        return "must be a name, not a path"
    return None


def _printable(text: str) -> str:
    """Return the text if it is visible on one line, otherwise its ``repr``."""
    return text if text.strip() and _is_plain(text) else repr(text)


def _is_plain(text: str) -> bool:
    """Whether a text contains no control characters and no unpaired surrogates, which files cannot store."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def shared_memory_has_one_host(config: TrainConfig) -> Iterator[Violation]:
    """Only CPU ranks of one host can share memory."""
    transport = config.launch.cpu_transport
    if transport != "shared_memory":
        return
    if config.device == "cuda":
        yield Violation("launch.cpu_transport", transport, "needs ranks on the CPU", ("auto", "device=cpu"))
    elif config.cluster.nodes > 1:
        yield Violation(
            "launch.cpu_transport",
            transport,
            f"needs one host, not cluster.nodes={config.cluster.nodes}",
            ("auto", "gloo"),
        )


ValueRule = Callable[[TrainConfig], Iterator[Violation]]
VALUE_RULES: tuple[ValueRule, ...] = (
    positions_fit,
    layers_are_named,
    patterns_are_regular,
    recompute_is_clear,
    betas_fit,
    learning_rate_fits,
    data_fits,
    continuation_is_clear,
    elastic_is_clear,
    numa_binding_has_a_gpu,
    shared_memory_has_one_host,
    recorded_steps_exist,
)
