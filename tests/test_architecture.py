"""Imports point down: who may import whom, what stays free of torch, and where torch.distributed may be used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megastack.cli.main import VERBS

ROOT = Path(__file__).resolve().parent.parent / "megastack"

# Each part may import itself, the parts named here, and `errors`. A part is a folder or a top-level module; a dotted
# name opens a single module of a part that is otherwise closed.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "random": {"torch_private"},
    "attention_mask": set(),
    "batch": {"attention_mask"},
    "torch_private": set(),
    "weight_gradients": {"torch_private"},
    "records": set(),
    "targets": set(),
    "mesh": {"comm", "torch_private"},
    "comm": {"torch_private"},
    "placement": {"mesh", "random", "torch_private"},
    "layers": {"placement", "comm", "random", "mesh", "attention_mask", "batch", "weight_gradients", "torch_private"},
    "models": {
        "layers",
        "placement",
        "mesh",
        "batch",
        "config",
        "pipeline",
        "weight_gradients",
        "torch_private",
        "targets",
    },
    "pipeline": {"mesh", "comm", "batch", "weight_gradients", "targets"},
    "gradients": {"placement", "comm", "mesh", "weight_gradients", "torch_private"},
    "optim": {"gradients", "placement", "torch_private"},
    "data": {"random", "batch"},
    "checkpoint": {"placement", "comm", "mesh", "records", "observe.printable"},
    "observe": {"records", "torch_private", "mesh.shape", "comm.flight_recorder", "comm.periodic"},
    "config": {
        *("mesh.shape", "pipeline.schedules", "data.blend_weights"),
        *("layers.rules", "layers.spec", "layers.attention_spec", "layers.mlp_spec", "layers.vocabulary_spec"),
    },
    "training": {
        "batch",
        "pipeline.runtime",
        "gradients",
        "optim",
        "data",
        "observe",
        "mesh",
        "comm",
        "checkpoint",
        "records",
        "placement.buffers",  # a discarded step restores them
    },
    "inference": {"models.decoder", "pipeline", "layers.cache", "mesh", "comm", "batch", "random"},
    "plan": {
        "config",
        "models.activations",
        "models.profile",
        "models.stages",
        "pipeline",
        "mesh.shape",
        "mesh.groups",
        "comm.shared_memory.plan",
        "observe.printable",
    },
    "assemble": {
        *("training", "inference", "models", "data", "pipeline", "gradients", "optim", "checkpoint", "observe"),
        "config",
        "layers.attention_kernels",  # the kernel that a run logs at its start
        *("mesh", "comm", "placement"),
    },
    "dryrun": {
        *(
            "assemble",
            "training",
            "models",
            "layers.kernels",
            "pipeline",
            "gradients",
            "checkpoint.asynchronous",
            "data",
        ),
        *("config", "mesh", "comm", "placement.module", "batch", "torch_private"),
    },
    "preflight": {
        *("assemble", "config", "data", "models", "observe", "mesh", "training.state"),
        *("checkpoint.folder", "checkpoint.manifest", "checkpoint.publish"),
        *("gradients.parameter_groups", "placement.module"),
    },
    "launch": {
        *(
            "preflight",
            "assemble",
            "training",
            "config",
            "observe",
            "mesh",
            "data.dataset",
            "plan.describe",
            "plan.layout",
        ),
        *(
            "records",
            "checkpoint.manifest",
            "comm.peer_failure",
            "comm.collectives",  # ranks connect before the first step
            "comm.objects",
            "comm.observer",
            "comm.backend",
            "torch_private",
        ),
    },
    "testing": {
        *(
            "assemble",
            "config",
            "checkpoint",
            "comm",
            "data",
            "gradients",
            "mesh",
            "optim",
            "placement",
        ),
        *("random", "training", "batch", "layers.spec", "pipeline.schedules", "observe.console"),
    },
    "interop": {
        *("config", "models", "checkpoint", "placement", "mesh.mesh", "batch", "observe.console", "data.tokenizers"),
        "data.tokenizer_file",
    },
    "corpus": {"data.sources", "data.tokenizers", "data.indexed", "observe.console"},
    "cli": {
        *("launch", "preflight", "assemble", "plan", "corpus", "testing", "interop", "inference", "training.state"),
        *("config", "data", "models.stages", "mesh", "observe", "pipeline.render"),
        *("checkpoint.folder", "checkpoint.manifest", "checkpoint.integrity"),
    },
    "__init__": set(),
}

TORCH_FREE = [
    *(
        "errors",
        "attention_mask",
        "records",
        "targets",
        "cli.main",
        *(f"cli.{module}" for module in VERBS.values()),
        *("mesh.shape", "mesh.environment"),
        *("layers.rules", "layers.spec", "layers.attention_spec", "layers.mlp_spec", "layers.vocabulary_spec"),
        *("models.config", "models.specs", "models.profile", "models.activations", "models.stages"),
    ),
    *("config.schema", "config.rules", "config.compose", "config.explain"),
    *("pipeline.action", "pipeline.schedule", "pipeline.check", "pipeline.simulate", "pipeline.render"),
    *("pipeline.communication", "pipeline.schedules.registry"),
    *(
        "plan.layout",
        "plan.describe",
        "interop.weight_map",
        "interop.hub_config",
        "interop.hub_export",
    ),
    *("corpus.tokenize", "data.blend_weights", "data.indexed", "data.token_files"),
]

DISTRIBUTED = {
    "mesh.mesh",
    "mesh.store",
    "comm",
    "gradients.fsdp_units",
    "torch_private",
    "gradients.fully_shard",
    "checkpoint",
    "observe.watchdog",
    "launch",
    "testing",
}


def modules() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def imports(module: str) -> set[str]:
    """Every module that one imports, at the top or inside a function; `from a import b` counts as a and as a.b."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(module: str) -> set[str]:
    """The modules of megastack that one imports, without the package's name."""
    known = set(modules())
    return {name.removeprefix("megastack.") for name in imports(module)} & known


def within(name: str, allowed: set[str]) -> bool:
    return any(name == each or name.startswith(each + ".") for each in allowed)


@pytest.mark.parametrize("module", [m for m in modules() if m != "__init__"])
def test_imports_point_down(module: str) -> None:
    part = module.partition(".")[0]
    wrong = {name for name in own(module) if not within(name, ALLOWED[part] | {part, "errors"})}
    assert not wrong, f"{module} must not import {sorted(wrong)}"


def test_there_is_no_import_cycle_between_modules() -> None:
    graph = {module: own(module) - {module} for module in modules()}
    while leaves := {module for module, needs in graph.items() if not needs & set(graph)}:
        graph = {module: needs for module, needs in graph.items() if module not in leaves}
    assert not graph, f"a cycle runs through {sorted(graph)}"


@pytest.mark.parametrize("module", [m for m in modules() if m not in ("__init__",)])
def test_torch_distributed_is_used_in_few_places(module: str) -> None:
    uses = {name for name in imports(module) if name.startswith("torch.distributed")}
    assert not uses or within(module, DISTRIBUTED), f"{module} uses {sorted(uses)}"


@pytest.mark.parametrize("package", [p.parent.relative_to(ROOT) for p in ROOT.rglob("*/__init__.py")], ids=str)
def test_packages_import_nothing_themselves(package: Path) -> None:
    assert not imports(".".join(package.parts))


STANDARD = {"_replace", "_fields", "_asdict", "_exit", "_current_frames", "_getframe"}
"""Names of the standard library that begin with an underscore and are public."""


@cache
def own_private_names() -> frozenset[str]:
    """The private names that the package itself defines: functions, classes, variables and attributes of `self`."""
    found = set[str]()
    for module in set(modules()) - {"torch_private"}:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return frozenset(found)


def foreign_private_names(module: str) -> set[str]:
    """The private names of other packages that a module imports, or takes as attributes."""
    used = {part for name in imports(module) if not name.startswith("megastack") for part in name.split(".")}
    used |= {node.attr for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)} - own_private_names()
    return {name for name in used if name.startswith("_") and not name.startswith("__")} - STANDARD


def test_private_names_of_torch_are_used_in_one_module() -> None:
    assert {"_will_engine_execute_node", "_forward_hooks", "_set_pg_timeout"} <= foreign_private_names("torch_private")
    assert own("torch_private") == {"__init__"} or not own("torch_private"), "it imports torch alone"
    found = {module: foreign_private_names(module) for module in modules() if module != "torch_private"}
    assert not {module: names for module, names in found.items() if names}


def test_torch_free_parts_do_not_load_torch() -> None:
    names = ", ".join(f"megastack.{module}" for module in TORCH_FREE)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
