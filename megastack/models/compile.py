"""Blocks compiled by ``torch.compile``; everything around them stays eager.

One compiled function serves all blocks of a rank. Blocks of the same structure share its code: parameters are inputs,
and so is everything else that differs between blocks, microbatches and steps. The tensors of a
:class:`~megastack.layers.context.Context` are passed one by one, and step and block number, from which dropout draws,
as a tensor on the host. Packed documents are passed as a dense bias, whose shape does not depend on them.

The compiled function is used for training. Validation and generation, which run without gradients, call the blocks
themselves. Products and collectives are operators (:mod:`megastack.layers.compiled_ops`), which accumulate or defer
weight gradients. Hooks of the block itself run as usual, outside of the compiled code.

A part that cannot be traced is an error (``fullgraph=True``), and so is a missing C++ compiler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megastack.errors import ConfigError
from megastack.layers.compiled_ops import bind_parameters
from megastack.layers.context import Context
from megastack.layers.rope import Rope, RotaryTables
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.torch_private import (
    allow_variants,
    compile_cache,
    compile_errors,
    keep_operands,
    missing_compiler,
    traced_frames,
)
from megastack.weight_gradients import WeightGradientScope, current_scope

BACKEND = "inductor"


class CompiledBlocks:
    """Calls the blocks of a rank through one compiled function.

    Args:
        mesh: the ranks of the blocks.
        backend: a backend of ``torch.compile``; inductor by default.
        defers: backwards may defer weight gradients; their operands then outlive the compiled code.

    Raises:
        ConfigError: the backend's compiler for this device is not installed.
    """

    def __init__(self, mesh: Mesh, backend: str | None = None, *, defers: bool = False) -> None:
        backend = backend or BACKEND
        missing = missing_compiler(mesh.device) if backend == "inductor" else None
        if missing is not None:
            raise ConfigError(f"compile=true: {missing}, or use compile=false")
        allow_variants()
        if defers:
            keep_operands()
        mesh[Axis.TP]  # created at its first use, which must not be traced
        self._run = torch.compile(_run, fullgraph=True, dynamic=False, backend=backend)
        self._errors = compile_errors()
        self._scopes: WeakKeyDictionary[nn.Module, WeightGradientScope | None] = WeakKeyDictionary()

    @property
    def cache(self) -> Path:
        """The directory in which inductor keeps compiled kernels."""
        return compile_cache()

    def __call__(self, block: nn.Module, layer: int, hidden_BSD: Tensor, context: Context, *values: Any) -> Any:
        """Call block number ``layer``.

        Raises:
            ConfigError: the block cannot be compiled; names the layer.
        """

        def forward(hidden_BSD: Tensor, context: Context, *values: Any) -> Any:
            self._bind(block)
            with _without_wider_gradients(block):
                return self._run(block, hidden_BSD, _Inputs.of(context, layer), *values)

        try:
            return _called_with(block, forward, hidden_BSD, context, *values)
        except self._errors as error:
            raise ConfigError(_explain(block, layer, error)) from error

    def _bind(self, block: nn.Module) -> None:
        """Bind the parameters of a block to the current scope, once per scope."""
        scope = current_scope()
        if scope is None or self._scopes.get(block) is not scope:
            bind_parameters(block.parameters())
            self._scopes[block] = scope


def _called_with(block: nn.Module, forward: Callable[..., Any], *values: Any) -> Any:
    """Call a block with another ``forward``, in which the block has its own again; its hooks run as usual."""
    own = vars(block).get("forward")

    def restored(*values: Any) -> Any:
        del block.forward
        if own is not None:
            block.forward = own
        return forward(*values)

    block.forward = restored
    try:
        return block(*values)
    finally:
        if vars(block).get("forward") is restored:
            del block.forward
            if own is not None:
                block.forward = own


@contextmanager
def _without_wider_gradients(block: nn.Module) -> Iterator[None]:
    """Detach the ``.grad`` of a lower-precision parameter, an fp32 view of its bucket, which a trace cannot represent.

    Autograd accumulates into it in the backward, which runs outside of this context.
    """
    wider = [(p, p.grad) for p in block.parameters() if p.grad is not None and p.grad.dtype != p.dtype]
    for parameter, _ in wider:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in wider:
            parameter.grad = gradient


class _Inputs(NamedTuple):
    """A context as inputs of the compiled function: tensors, and constants of the run."""

    positions_BS: Tensor | None
    documents_BS: Tensor | None
    samples_B: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    bias_B1SS: Tensor | None
    origin: Tensor
    rope: Rope | None
    seed: int
    dtype: torch.dtype

    @staticmethod
    def of(context: Context, layer: int) -> _Inputs:
        assert context.cache is None and not context.scope
        rope, cos, sin = context.rotary or (None, None, None)
        return _Inputs(
            context.positions_BS,
            context.documents_BS,
            context.samples_B,
            cos,
            sin,
            context.bias_B1SS,
            torch.tensor([context.step, layer]),
            rope,
            context.seed,
            context.dtype,
        )

    def context(self) -> Context:
        """The same context, made of the inputs."""
        rotary = None
        if self.rope is not None and self.cos is not None and self.sin is not None:
            rotary = RotaryTables(self.rope, self.cos, self.sin)
        return Context(
            self.positions_BS,
            self.documents_BS,
            self.samples_B,
            self.origin[0],  # type: ignore[arg-type]
            self.seed,
            rotary=rotary,
            dtype=self.dtype,
            origin=self.origin,
            _dense={self.dtype: self.bias_B1SS},
        )


def _run(block: nn.Module, hidden_BSD: Tensor, inputs: _Inputs, *values: Any) -> Any:
    return block.forward(hidden_BSD, inputs.context(), *values)


def _explain(block: nn.Module, layer: int, error: Exception) -> str:
    """The error of a compilation, with the name of the user-defined layer that caused it, or else of the block."""
    name, module, place = f"blocks.{layer}", block, ""
    for inner, each in block.named_modules(prefix=name):
        for filename, line in traced_frames(error):
            if filename in _own_files(type(each)):
                name, module, place = inner, each, f" ({Path(filename).name}, line {line})"
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"compile=true: {name}, a {kind}, cannot be compiled{place}: {reason}; use compile=false"


def _own_files(kind: type) -> Iterator[str]:
    """The files of a user-defined class and its bases."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] not in ("builtins", "megastack", "torch"):
            yield inspect.getfile(base)
