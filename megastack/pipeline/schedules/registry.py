"""Schedules by name: built-in ones, user-defined ones, and a file of actions.

A schedule is a pure function ``(pp, chunks, microbatches, *, options) -> actions of each rank``. `build_schedule` packs
its result, and checks it if the schedule is not built in (the tests check built-in ones at every size). The names of
planned schedules are known here, so that an error can report that they are not available yet.

    @register_schedule("mine")
    def mine(pp, chunks, microbatches, *, flavour="plain"):
        return [[Action.parse("0F0"), Action.parse("0B0")]]

A dotted path names a function without registration. A configuration chooses one this way, with its options next to the
path: ``schedule: {_target_: my_file.mine, flavour: fancy}``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from megastack.errors import ConfigError, ScheduleError, Violation, counted
from megastack.pipeline.action import EXECUTED, Action, Op
from megastack.pipeline.check import check
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from megastack.pipeline.simulate import error
from megastack.targets import import_path

ActionRows = Sequence[Sequence[Action | str]]
Generator = TypeVar("Generator", bound=Callable[..., ActionRows])

TARGET = "schedule._target_"

PLANNED = ("zb_auto", "interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v")


@dataclass(frozen=True)
class ClosedForm:
    """Figures of a schedule by formula, for stages of equal duration and messages without latency.

    Attributes:
        bubble: idle share of the longest rank span; for any F and B, or for F = I = W if a schedule splits the
            backward.
        peaks: for each rank, the most activations alive, in microbatches of the whole rank; each until its B or W.
    """

    bubble: float
    peaks: tuple[float, ...]


@dataclass(frozen=True)
class _ScheduleKind:
    """A schedule's generator and its formulas, which accept the generator's arguments.

    `idle` is the idle time of the longest rank span where F = I = W = 1, `peaks` are counted in chunks.
    """

    generate: Callable[..., ActionRows]
    idle: Callable[..., float] | None = None
    peaks: Callable[..., Sequence[float]] | None = None
    violations: Callable[..., list[Violation]] | None = None
    built_in: bool = False
    key: str = "schedule.name"

    def options(self) -> dict[str, bool]:
        """Its options, and whether each is required."""
        return {parameter.name: parameter.default is parameter.empty for parameter in _options(self.generate)}


def _options(generate: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that can be given by keyword, after the three sizes."""
    parameters = list(inspect.signature(generate).parameters.values())
    sizes = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
    return [p for p in parameters if p not in sizes and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def custom(pp: int, chunks: int, microbatches: int, *, path: str) -> ActionRows:
    """The lists of a CSV file (see ``Schedule.load``); `build_schedule` checks that they have these sizes."""
    return Schedule.load(path).ranks


def _custom_violations(pp: int, chunks: int, microbatches: int, *, path: str) -> list[Violation]:
    """The errors of the file: unreadable, of other sizes, or lists that fail `check`."""
    try:
        _require_usable(Schedule.load(path), (pp, chunks, microbatches))
    except ScheduleError as error:
        return [Violation("schedule.path", path, str(error).removeprefix(f"schedule.path={path}: "))]
    return []


def _zero_bubble(name: str, generate: Callable[..., ActionRows], depth: int) -> _ScheduleKind:
    return _ScheduleKind(
        generate,
        partial(zero_bubble.idle, depth=depth),
        partial(zero_bubble.peaks, depth=depth),
        partial(zero_bubble.violations, name=name),
        built_in=True,
    )


_KINDS: dict[str, _ScheduleKind] = {
    "gpipe": _ScheduleKind(gpipe.gpipe, gpipe.idle, gpipe.peaks, built_in=True),
    "1f1b": _ScheduleKind(
        one_f_one_b.one_f_one_b, one_f_one_b.idle, one_f_one_b.peaks, one_f_one_b.violations, built_in=True
    ),
    "interleaved": _ScheduleKind(
        interleaved.interleaved, interleaved.idle, interleaved.peaks, interleaved.violations, built_in=True
    ),
    "zb_h1": _zero_bubble("zb_h1", zero_bubble.zb_h1, depth=1),
    "zb_h2": _zero_bubble("zb_h2", zero_bubble.zb_h2, depth=2),
    "custom": _ScheduleKind(custom, violations=_custom_violations),
}


def register_schedule(name: str) -> Callable[[Generator], Generator]:
    """Decorator that registers a function as ``schedule.name=<name>``; its arguments after the sizes are its options.

    Raises:
        ScheduleError: the name is already registered for another function.
    """

    def register(generate: Generator) -> Generator:
        if name in PLANNED or (name in _KINDS and _KINDS[name].generate is not generate):
            raise ScheduleError(f"schedule.name={name}: is taken; use a name other than {', '.join(known_names())}")
        _KINDS[name] = _ScheduleKind(generate)
        return generate

    return register


def schedule_names() -> tuple[str, ...]:
    """The names that `build_schedule` can build."""
    return tuple(_KINDS)


def known_names() -> tuple[str, ...]:
    """The names that `build_schedule` can build, and the names of planned schedules."""
    return (*_KINDS, *PLANNED)


def _find(name: str) -> _ScheduleKind | list[Violation]:
    """The schedule of a name or a dotted path, or its errors."""
    if name in _KINDS:
        return _KINDS[name]
    if "." not in name:
        rule = "is not available yet" if name in PLANNED else "is not a schedule"
        return [Violation("schedule.name", name, rule, schedule_names())]
    try:
        generate = import_path(TARGET, name)
        inspect.signature(generate).bind(1, 1, 1, **{option.name: None for option in _options(generate)})
    except ConfigError as error:
        return list(error.violations)
    except (TypeError, ValueError):
        return [
            Violation(TARGET, name, "must accept three positional arguments", ("(pp, chunks, microbatches, *, …)",))
        ]
    return _ScheduleKind(generate, violations=partial(_own_violations, generate, name), key=TARGET)


def _kind(name: str) -> _ScheduleKind:
    """The schedule of a valid name or dotted path."""
    kind = _find(name)
    assert isinstance(kind, _ScheduleKind), kind
    return kind


def _own_violations(
    generate: Callable[..., Any], path: str, pp: int, chunks: int, microbatches: int, **options: Any
) -> list[Violation]:
    """The errors of the schedule that a function with a dotted path returns."""
    try:
        schedule = Schedule.from_actions(generate(pp, chunks, microbatches, **options), name=path)
        _require_usable(schedule, (pp, chunks, microbatches))
    except ScheduleError as error:
        return [Violation(TARGET, path, f"must return a valid schedule: {error}")]
    except Exception as error:
        rule = f"must return a list of actions for each rank, got {type(error).__name__}: {error}"
        return [Violation(TARGET, path, rule)]
    return []


def schedule_violations(name: str, pp: int, chunks: int, microbatches: int, **options: Any) -> list[Violation]:
    """The errors of these sizes and options (None: not given); reads the file of `custom`."""
    kind = _find(name)
    if not isinstance(kind, _ScheduleKind):
        return kind
    sizes = {"parallel.pp": pp, "schedule.chunks": chunks, "microbatches": microbatches}
    found = [Violation(key, size, "must be at least 1") for key, size in sizes.items() if size < 1]
    given, takes, is_own = _given(options), kind.options(), kind.key == TARGET
    for key in sorted(given.keys() - takes.keys()):
        rule = f"must be an option of {name}" if is_own else f"schedule.name={name} takes no such option"
        legal = tuple(takes) if is_own and takes else (None,)
        found.append(Violation(f"schedule.{key}", given[key], rule, legal))
    for key, required in takes.items():
        if required and key not in given:
            rule = f"must be set; {name} requires it" if is_own else f"schedule.name={name} needs it"
            found.append(Violation(f"schedule.{key}", None, rule))
    if not found and kind.violations:
        found += kind.violations(pp, chunks, microbatches, **given)
    return found


def build_schedule(name: str, pp: int, chunks: int, microbatches: int, **options: Any) -> Schedule:
    """The schedule `name` for p ranks, v chunks each and M microbatches.

    Args:
        name: one of `schedule_names()`, or the dotted path of a function.
        pp, chunks, microbatches: p, v and M, each at least 1.
        options: the options of the schedule (interleaved: `round`; custom: `path`); None means not given.

    Raises:
        ScheduleError: the name, a size or an option is invalid, or the actions fail `check`.
    """
    if found := schedule_violations(name, pp, chunks, microbatches, **options):
        raise ScheduleError("\n".join(map(str, found)))
    kind = _kind(name)
    schedule = Schedule.from_actions(kind.generate(pp, chunks, microbatches, **_given(options)), name=name)
    if not (kind.built_in or kind.violations):
        _require_sizes(schedule, (pp, chunks, microbatches))
        check(schedule, batched=False)
    return schedule


def batching_error(name: str, pp: int, chunks: int, microbatches: int, **options: Any) -> str | None:
    """Why the ranks of a valid schedule could deadlock on a transport that runs messages in order (NCCL), if so."""
    kind = _kind(name)
    if kind.built_in:
        return None
    try:
        check(build_schedule(name, pp, chunks, microbatches, **options))
    except ScheduleError as error:
        return str(error)
    return None


def splits_backward(name: str, pp: int, chunks: int, microbatches: int, **options: Any) -> bool:
    """Whether a valid schedule has separate W actions, which compute the gradients of weights."""
    kind = _kind(name)
    if kind.built_in:  # all ranks after the first are equal in this respect, and so are all microbatches
        pp, microbatches = min(pp, 2), 1
    return Schedule.from_actions(kind.generate(pp, chunks, microbatches, **_given(options))).splits_backward


def closed_form(name: str, pp: int, chunks: int, microbatches: int, **options: Any) -> ClosedForm | None:
    """The figures of a schedule by its formulas, without building it; None if it has none."""
    if found := schedule_violations(name, pp, chunks, microbatches, **options):
        raise ScheduleError("\n".join(map(str, found)))
    kind = _kind(name)
    if kind.idle is None or kind.peaks is None:
        return None
    idle = kind.idle(pp, chunks, microbatches, **_given(options))
    peaks = kind.peaks(pp, chunks, microbatches, **_given(options))
    return ClosedForm(idle / (idle + 3 * microbatches), tuple(peak / chunks for peak in peaks))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _require_usable(schedule: Schedule, sizes: tuple[int, int, int]) -> None:
    _require_sizes(schedule, sizes)
    _require_executed(schedule)
    check(schedule, batched=False)


def _require_executed(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.ranks):
        for step, action in enumerate(row):
            if action.op not in EXECUTED:
                legal = ", ".join(op for op in Op if op in EXECUTED)
                raise error(schedule, f"{action} is not an action that the runtime executes; use {legal}", rank, step)


def _require_sizes(schedule: Schedule, sizes: tuple[int, int, int]) -> None:
    held = (schedule.pp, schedule.chunks, schedule.microbatches)
    if held != sizes or schedule.stages != sizes[0] * sizes[1]:
        words = "pp={}, chunks={}, microbatches={}".format
        raise ScheduleError(
            f"its lists are for {words(*held)} and {counted(schedule.stages, 'stage')}, "
            f"not for {words(*sizes)}; use the sizes of the lists, or other lists"
        )
