"""The public names: they resolve lazily, say what they are, keep their signatures, and each is used by a test."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import megastack
from megastack import Axis, CheckReport, Costs, LoadReport, Mesh, Placement, SaveHandle, State, StateItem, Timeline

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "megastack"
EMPTY = inspect.Parameter.empty


class Promised:
    """The signatures that others build on, one function each; further parameters are fine if they have defaults.

    A name with two underscores is a method of the class before them, and the default ``...`` stands for any.
    """

    # fmt: off
    def MeshShape(pp=1, dp=1, cp=1, tp=1, ep=1): ...
    def MeshShape__coordinates(self, rank): ...
    def MeshShape__rank_at(self, **coordinates): ...
    def MeshShape__groups(self, *axes): ...
    def MeshShape__table(self): ...
    def Mesh__single(): ...
    def Mesh__from_environment(shape, *, device="auto"): ...
    def Ledger__total(self, axis=None, op=None): ...
    def Ledger__records(self): ...
    def Ledger__reset(self): ...
    def Traffic(calls=0, payload_bytes=0, wire_bytes=0): ...
    def Shard(dim, copies=1): ...
    def Box(offset, size): ...
    def local_box(placement, mesh_shape, coordinates): ...
    def range_boxes(shape, start, stop): ...
    def counter_normal(seed, name, shape, box, *, std, dtype): ...
    def Normal(std): ...
    def Zeros(): ...
    def Ones(): ...
    def ParallelModule__placements(self): ...
    def ParallelModule__boundary(self): ...
    def ColumnParallelLinear(in_features, out_features, mesh, *, bias=False, sequence_parallel=False): ...
    def RowParallelLinear(in_features, out_features, mesh, *, bias=False, sequence_parallel=False): ...
    def VocabParallelEmbedding(vocab, hidden, mesh, *, vocab_multiple=128, sequence_parallel=False): ...
    def RMSNorm(hidden, mesh, *, eps=1e-5, sequence_parallel=False): ...
    def LayerNorm(hidden, mesh, *, eps=1e-5, sequence_parallel=False): ...
    def ParallelAttention(hidden, heads, mesh, *, kv_groups=None, head_dim=None, rope=None, qk_norm=False, bias=False,
                          sequence_parallel=False): ...
    def ParallelMLP(hidden, ffn, mesh, *, activation="swiglu", bias=False, sequence_parallel=False): ...
    def vocab_parallel_cross_entropy(logits_BSV, labels_BS, mesh, *, vocab, label_smoothing=0.0, z_loss=0.0): ...
    def Decoder(config, mesh, *, layers=None): ...
    def Action(op, stage, microbatch=None, parts=()): ...
    def Action__parse(text): ...
    def Schedule__load(path): ...
    def Schedule__dump(self, path): ...
    def build_schedule(name, pp, chunks, microbatches, **options): ...
    def register_schedule(name): ...
    def check(schedule): ...
    def Costs(F=1.0, I=1.0, W=1.0, p2p=0.0): ...  # noqa: E741
    def simulate(schedule, costs): ...
    def render(schedule_or_timeline, format="text"): ...
    def Pipeline(stages, schedule, mesh): ...
    def Pipeline__run(self, microbatches, denominator): ...
    def GradientBuckets(modules, mesh, *, zero=0): ...
    def GradientBuckets__finish(self): ...
    def GradientBuckets__named_gradients(self): ...
    def grad_norm(buckets, mesh): ...
    def clip_gradients_(buckets, max_norm, mesh): ...
    def save(path, state, mesh, *, asynchronous=False): ...
    def load(path, state, mesh, *, strict=True, weights_only=False): ...
    def CheckpointReader(path): ...
    def CheckpointReader__read(self, name): ...
    def CheckpointReader__verify(self): ...
    def compose(overrides=(), *, config_dir=None): ...
    def violations(config, world_size=None): ...
    def train(config): ...
    def run_ranks(fn, world_size, *args, timeout=60): ...
    def assert_parity(factory, shape, *, steps=3, dtype=torch.float64, optimizer="sgd"): ...
    def Placement(shape, shards=..., partial=frozenset(), init=..., decay=True): ...
    # fmt: on


ATTRIBUTES = {
    "MeshShape": ["world_size"],
    "Schedule": ["ranks", "stages", "microbatches"],
    "CheckpointReader": ["names", "trainer"],
    "ParallelModule": ["placements", "boundary"],
}
FIELDS = {
    "AxisGroup": ["rank", "size", "ranks", "group"],
    "Traffic": ["calls", "payload_bytes", "wire_bytes"],
    "CheckReport": ["peaks"],
    "Timeline": ["bubble", "step_bubble", "peaks", "spans"],
    "RunResult": ["status", "step", "loss", "folder"],
    "Violation": ["key", "value", "rule", "legal"],
    "Placement": ["shape", "shards", "partial", "init", "decay"],
}
ERRORS = ["ConfigError", "MeshError", "PlacementError", "ScheduleError", "CheckpointError", "DataError"]


def promised() -> Iterator[tuple[str, Callable[..., Any]]]:
    return ((name, stub) for name, stub in vars(Promised).items() if inspect.isfunction(stub))


@cache
def names_in_tests() -> set[str]:
    """Every identifier of every test module."""
    return {name for path in TESTS.rglob("*.py") for name in identifiers(ast.parse(path.read_text()))}


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


@pytest.mark.parametrize("name", sorted(megastack._HOMES))
def test_a_name_resolves_says_what_it_is_and_is_tested(name: str) -> None:
    found = getattr(megastack, name)
    assert found.__name__ == name
    text = found.__doc__ or ""
    generated = text.startswith(f"{name}(")  # dataclasses make one of the signature
    assert len(text.split()) >= 4 and not generated, f"{name} has no docstring of its own"
    assert name in names_in_tests(), f"no test uses {name}"


@pytest.mark.parametrize(("name", "stub"), list(promised()), ids=lambda value: value if isinstance(value, str) else "")
def test_signatures_are_as_promised(name: str, stub: Callable[..., Any]) -> None:
    owner, _, method = name.partition("__")
    target = getattr(megastack, owner)
    if method:
        target = getattr(target, method)
    actual, expected = (dict(inspect.signature(each).parameters) for each in (target, stub))
    assert [key for key in actual if key in expected] == list(expected), f"{name}{inspect.signature(target)}"
    for key, parameter in expected.items():
        assert actual[key].kind == parameter.kind, f"{name}: {key}"
        if parameter.default is ...:
            assert actual[key].default is not EMPTY, f"{name}: {key}"
        elif parameter.default is not EMPTY:
            assert actual[key].default == parameter.default, f"{name}: {key}"
    assert positional(actual)[: len(positional(expected))] == positional(expected), f"{name}: something stands in front"
    for key in actual.keys() - expected.keys():
        variable = actual[key].kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        assert variable or actual[key].default is not EMPTY, f"{name}: {key} has no default"


def positional(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [key for key, parameter in parameters.items() if parameter.kind in kinds]


def test_attributes_are_as_promised() -> None:
    for name, wanted in ATTRIBUTES.items():
        found = getattr(megastack, name)
        for attribute in wanted:
            own = hasattr(found, attribute) or attribute in getattr(found, "__dataclass_fields__", {})
            assert own or attribute in inspect.get_annotations(found), f"{name}.{attribute}"
    for name, wanted in FIELDS.items():
        found = getattr(megastack, name)
        for attribute in wanted:
            assert attribute in found.__dataclass_fields__ or hasattr(found, attribute), f"{name}.{attribute}"


def test_results_are_of_public_classes(tmp_path: Path) -> None:
    schedule = megastack.build_schedule("1f1b", 2, 1, 4)
    assert isinstance(megastack.check(schedule), CheckReport)
    assert isinstance(megastack.simulate(schedule, Costs()), Timeline)
    state = State([StateItem.replicated("x", torch.ones(2))], {"step": 1})
    handle = megastack.save(tmp_path / "one", state, Mesh.single())
    assert isinstance(handle, SaveHandle)
    handle.wait()
    assert isinstance(megastack.load(tmp_path / "one", state, Mesh.single()), LoadReport)


def test_axes_and_errors_are_as_promised() -> None:
    assert [axis.name for axis in Axis] == ["PP", "DP", "CP", "TP", "EP"]
    assert Placement((2,)).shards == {}
    for name in ERRORS:
        assert issubclass(getattr(megastack, name), megastack.MegastackError), name


def test_type_checkers_see_the_names_that_are_resolved() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert sorted(seen) == sorted(megastack._HOMES)
    for name, module in seen.items():
        assert getattr(megastack, name).__module__ == module, name
    assert set(megastack.__all__) <= set(dir(megastack))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Meshh'"):
        megastack.Meshh  # noqa: B018


def test_torch_free_names_load_no_torch() -> None:
    names = "Axis, MeshShape, Action, Schedule, build_schedule, check, simulate, Costs, render, compose, violations"
    code = f"import sys; from megastack import {names}, MegastackError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=PACKAGE.parent).returncode == 0
