"""Private parts of torch behave as the package relies on: each test fails when torch changes one of them."""

from __future__ import annotations

import threading
import tomllib
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import fully_shard
from torch.numa import binding

from megastack import torch_private
from megastack.dryrun.device import ImmediateStreams
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.testing.ranks import run_ranks


def test_torch_is_bounded_to_a_range_that_holds_this_version() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    (torch_,) = (found for found in map(Requirement, project["dependencies"]) if found.name == "torch")
    assert any(bound.operator == "<" for bound in torch_.specifier)
    assert torch_.specifier.contains(torch.__version__.partition("+")[0], prereleases=True)


class _Ask(torch.autograd.Function):
    """Asks in its backward whether the gradient of a leaf will be accumulated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, answers: list[bool]) -> Tensor:
        ctx.leaf, ctx.answers = leaf, answers
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        try:
            ctx.answers.append(torch_private.will_execute(get_gradient_edge(ctx.leaf).node))
        except RuntimeError:
            ctx.answers.append("an input")
        return grad, None, None


def test_a_backward_knows_which_leaves_it_reaches() -> None:
    x, weight, other = (torch.ones(2, requires_grad=True) for _ in range(3))
    answers: list[bool] = []

    def loss() -> Tensor:
        return (_Ask.apply(x, weight, answers) * weight * other).sum()

    loss().backward()
    torch.autograd.grad(loss(), [x, other])
    torch.autograd.grad(loss(), [x, weight])
    torch.autograd.backward(loss(), inputs=[x, other])
    assert answers == [True, False, "an input", False]


def test_hooks_of_tensors_are_seen() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not torch_private.has_gradient_hooks(weight) and not torch_private.accumulation_hooks(weight)
    handle = weight.register_hook(lambda gradient: None)
    assert torch_private.has_gradient_hooks(weight) and not torch_private.accumulation_hooks(weight)
    handle.remove()
    assert not torch_private.has_gradient_hooks(weight)
    hooks: list[Callable[[Tensor], None]] = [lambda p: None, lambda p: None]
    for hook in hooks:
        weight.register_post_accumulate_grad_hook(hook)
    assert list(torch_private.accumulation_hooks(weight)) == hooks and not torch_private.has_gradient_hooks(weight)


def test_the_leaf_of_a_view_or_a_cast_is_found() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    views, casts = torch_private.VIEWS, torch_private.VIEWS | torch_private.CASTS
    for view in (weight.view(3, 2), weight.flatten(), weight.view(6).view(2, 3), weight.reshape(6)):
        assert torch_private.accumulated_leaf(view, views) is weight
    assert torch_private.accumulated_leaf(weight.double().view(6), casts) is weight
    assert torch_private.accumulated_leaf(weight.double().view(6), views) is None
    for other in (weight.T, weight[:1], weight * 1, weight.detach()):
        assert torch_private.accumulated_leaf(other, casts) is None


def test_the_nodes_of_views_and_casts_save_nothing() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    for made in (weight.view(3, 2), weight.double()):
        for _ in range(2):
            torch.autograd.backward(made, torch.ones_like(made))


class _Reshaped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, as_view: bool) -> Tensor:
        out = x * 2
        return out.view(3, 2) if as_view else torch_private.unsafe_view(out, (3, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad.view(2, 3), None


def test_the_result_of_an_autograd_function_is_changed_in_place_unless_it_is_a_view() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="a view"):
        _Reshaped.apply(x, True).mul_(3)
    out = _Reshaped.apply(x, False).mul_(3)
    out.sum().backward()
    assert out.tolist() == [[6, 6]] * 3 and x.grad is not None and x.grad.tolist() == [[6] * 3] * 2


def test_tensors_without_values() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    assert [torch_private.has_values(x) for x in (torch.ones(2), torch.ones(2, device="meta"), fake)] == [
        True,
        False,
        False,
    ]


def test_the_version_of_a_tensor_counts_its_changes() -> None:
    x = torch.ones(2)
    before = torch_private.version_of(x)
    x.data.add_(1)
    assert torch_private.version_of(x) == before
    x.add_(1)
    assert torch_private.version_of(x) > before


def test_a_call_of_a_module_goes_through_three_functions() -> None:
    linear = nn.Linear(2, 2)
    for name, function in torch_private.MODULE_CALL.items():
        assert getattr(type(linear), name) is function
    called: list[str] = []
    for name in ("_wrapped_call_impl", "_call_impl"):
        original = getattr(linear, name)

        def spy(*args: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            called.append(name)
            return original(*args)

        setattr(linear, name, spy)
    linear(torch.ones(2))
    assert called == ["_call_impl"] or called == ["_wrapped_call_impl", "_call_impl"]


def test_a_module_that_was_compiled_in_place_is_seen() -> None:
    linear = nn.Linear(2, 2)
    assert not torch_private.is_compiled(linear)
    linear.compile()
    assert torch_private.is_compiled(linear)


def test_the_frames_of_a_function_that_cannot_be_traced() -> None:
    compiled = torch.compile(lambda x: 1 if x > 0 else 2, fullgraph=True, backend="eager")
    with pytest.raises(torch_private.compile_errors()) as caught:
        compiled(torch.ones(()))
    assert [Path(file).name for file, _ in torch_private.traced_frames(caught.value)] == [Path(__file__).name]


def test_the_directory_of_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert torch_private.compile_cache() == tmp_path


def test_the_limit_of_variants_is_raised() -> None:
    from torch._dynamo import config

    with config.patch(recompile_limit=8), warnings.catch_warnings():
        torch_private.allow_variants(9)
        assert config.recompile_limit == 9


def test_compiled_code_can_be_kept_from_reusing_memory() -> None:
    from torch._functorch import config as autograd_config
    from torch._inductor import config

    with autograd_config.patch(donated_buffer=True), config.patch(allow_buffer_reuse=True, inplace_buffers=True):
        torch_private.keep_operands()
        assert not (autograd_config.donated_buffer or config.allow_buffer_reuse or config.inplace_buffers)


def test_forward_hooks_can_be_removed() -> None:
    linear = nn.Linear(2, 2)
    linear.register_forward_pre_hook(lambda *values: None, with_kwargs=True)
    linear.register_forward_hook(lambda *values: None)
    torch_private.remove_forward_hooks(linear)
    assert not torch_private.has_forward_hooks(linear)
    linear.register_forward_pre_hook(lambda module, args: None)
    linear(torch.ones(2))


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_of_modules_are_seen(kind: str, everywhere: bool) -> None:
    linear = nn.Linear(2, 2)
    seen = torch_private.has_backward_hooks if "backward" in kind else torch_private.has_forward_hooks
    unseen = torch_private.has_forward_hooks if "backward" in kind else torch_private.has_backward_hooks
    assert not seen(linear)
    if everywhere:
        handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *values: None)
    else:
        handle = getattr(linear, f"register_{kind}_hook")(lambda *values: None)
    assert seen(linear) and not unseen(linear)
    handle.remove()
    assert not seen(linear)


def test_parameters_and_buffers_are_in_tables() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert dict(torch_private.parameters_of(module)) == dict(module.named_parameters())
    assert torch_private.buffers_of(module).keys() == dict(module.named_buffers()).keys()
    persistent = {name for name in torch_private.buffers_of(module) if torch_private.is_persistent(module, name)}
    assert persistent == module.state_dict().keys() - dict(module.named_parameters()).keys()
    replaced = torch_private.buffers_of(module)["running_mean"] = torch.full((2,), 3.0)
    assert module.running_mean is replaced
    del torch_private.parameters_of(module)["weight"]
    assert not hasattr(module, "weight")


def passed_through() -> tuple[bool, bool, list[float]]:
    """Run what FSDP2 does around the forward of a unit without calling the unit."""
    mesh = Mesh.from_environment(MeshShape(dp=2))
    unit = nn.Linear(4, 4)
    assert mesh.device_mesh is not None
    fully_shard(unit, mesh=mesh.device_mesh)
    sharded = unit.weight.to_local().numel()
    x = torch.ones(1, 4, requires_grad=True)
    args, kwargs = torch_private.before_forward(unit, (x,), {"flag": 1})
    gathered = unit.weight.numel() == 16 and sharded == 8 and kwargs == {"flag": 1}
    output = torch_private.after_forward(unit, args[0])
    output.sum().backward()
    return gathered, unit.weight.to_local().numel() == 8, x.grad.tolist()[0]


def test_a_unit_of_fsdp_is_gathered_and_released_without_a_call() -> None:
    assert run_ranks(passed_through, 2) == [(True, True, [1.0] * 4)] * 2


def stored_and_listed() -> tuple[str, int, bool]:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    store = torch_private.default_store()
    store.set(f"here/{mesh.rank}", "yes")
    return store.get(f"here/{1 - mesh.rank}").decode(), len(torch_private.process_groups()), dist.is_initialized()


def test_the_default_store_is_shared_and_all_groups_are_known() -> None:
    assert run_ranks(stored_and_listed, 2) == [("yes", 1, True)] * 2


def test_a_build_without_nccl_has_no_trace_of_it() -> None:
    trace = torch_private.nccl_trace()
    assert isinstance(trace, bytes) if dist.is_nccl_available() else trace is None


def named_and_timed() -> tuple[str, int, bool]:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    in_use: list[Collection[str]] = []

    def name_of(ranks: list[int], names: Collection[str]) -> str:
        in_use.append(names)
        return f"test_{ranks[0]}_{ranks[-1]}"

    with torch_private.group_names(name_of):
        group = dist.new_group([0, 1], use_local_synchronization=True)
    torch_private.set_timeout(group, timedelta(seconds=77))
    timeout = group._get_backend(mesh.device).options._timeout
    return group.group_name, len(in_use), timeout == timedelta(seconds=77)


def test_groups_are_named_and_have_a_time_out() -> None:
    assert run_ranks(named_and_timed, 2) == [("test_0_1", 1, True)] * 2


def test_the_files_of_the_transport_exist() -> None:
    for path in (*torch_private.TRANSPORT_FILES, torch_private.DISPATCH_FILE):
        assert Path(path).is_file()
    assert dist.distributed_c10d.__file__ in torch_private.TRANSPORT_FILES
    assert dist.all_reduce.__wrapped__.__code__.co_filename == torch_private.TRANSPORT_FILES[0]
    assert torch._ops.__file__ == torch_private.DISPATCH_FILE


def test_this_process_was_not_forked_from_one_with_cuda() -> None:
    assert torch_private.is_in_bad_fork() is False


def test_this_process_can_be_bound_to_the_cpus_of_a_numa_node(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(binding, "_get_validated_logical_cpus_to_bind_to", lambda **given: {given["gpu_index"], 7})
    monkeypatch.setattr(
        binding,
        "_bind_all_threads_in_current_process_to_logical_cpus",
        lambda *, logical_cpu_indices: bound.append(logical_cpu_indices),
    )
    torch_private.bind_to_numa(3, "core-complex")
    assert bound == [{3, 7}]


def test_the_state_of_the_cuda_allocator_is_dumped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda *given, **named: {"segments": []})
    torch_private.dump_cuda_memory(tmp_path / "memory.pickle")
    assert (tmp_path / "memory.pickle").stat().st_size


def test_fused_attention_of_a_cpu_returns_its_log_sum_exp_and_has_a_backward_for_grouped_queries() -> None:
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out, lse = torch_private.cpu_attention(q, k, v, None)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)
    grads = torch_private.cpu_attention_backward(torch.ones_like(out), q, k, v, out, lse, None)
    for found, wanted in zip(grads, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def test_attention_kernels_of_a_gpu_have_shapes_without_one() -> None:
    x = torch.empty(1, 2, 16, 8, device="meta", dtype=torch.bfloat16)
    assert torch_private.flash_attention(x, x[:, :1], x[:, :1]).shape == x.shape
    assert torch_private.efficient_attention(x, x, x, None).shape == x.shape


def test_the_fused_rms_norm_returns_the_scale_of_each_row() -> None:
    x, weight = torch.randn(2, 3, 4), torch.randn(4)
    out, scale = torch_private.fused_rms_norm(x, weight, 0.1)
    assert scale.shape == (2, 3, 1)
    torch.testing.assert_close(scale, x.square().mean(-1, keepdim=True).add(0.1).rsqrt())
    torch.testing.assert_close(out, x * scale * weight)


def test_the_backward_of_the_fused_rms_norm_has_these_arguments() -> None:
    """It runs on GPUs only."""
    arguments = torch.ops.aten._fused_rms_norm_backward.default._schema.arguments
    names = ["grad_out", "input", "normalized_shape", "rstd", "weight", "output_mask"]
    assert [argument.name for argument in arguments] == names
    if torch.cuda.is_available():
        x, weight = torch.randn(2, 4, device="cuda"), torch.randn(4, device="cuda", requires_grad=True)
        out, scale = torch_private.fused_rms_norm(x, weight.detach(), 0.1)
        _, grad_weight = torch_private.fused_rms_norm_backward(out, x, weight.detach(), scale)
        torch.testing.assert_close(grad_weight, (out * x * scale).sum(0))


def test_autocast_is_known_to_be_on_for_any_device() -> None:
    assert not torch_private.is_any_autocast_enabled()
    with torch.autocast("cpu"):
        assert torch_private.is_any_autocast_enabled()


def test_operations_on_lists_equal_those_on_each_tensor() -> None:
    values = [torch.arange(3.0), torch.arange(4.0) + 1]
    for norm, x in zip(torch_private.foreach_norm(values, torch.float64), values, strict=True):
        torch.testing.assert_close(norm, x.double().norm())
    torch_private.foreach_div_(values, torch.tensor(2.0))
    rounded = [torch.empty(3, dtype=torch.bfloat16), torch.empty(4, dtype=torch.bfloat16)]
    torch_private.foreach_copy_(rounded, values)
    assert [x.tolist() for x in rounded] == [[0, 0.5, 1], [0.5, 1, 1.5, 2]]
    torch_private.foreach_zero_(values)
    assert not any(x.any() for x in values)
    assert torch_private.foreach_norm([], torch.float64) == []
    torch_private.foreach_zero_([])


def test_tensors_without_data_have_shapes_and_a_device_and_do_not_mix_with_the_cpu() -> None:
    device = torch_private.NO_DATA
    with torch_private.without_data(ImmediateStreams()):
        x = torch.ones(2, 3, device=device, requires_grad=True)
        threads: list[int] = []
        x.register_hook(lambda grad: threads.append(threading.get_ident()))
        (x @ x.detach().T).softmax(-1).sum().backward()
        assert x.grad is not None and x.grad.shape == (2, 3) and x.grad.device == device
        assert threads == [threading.get_ident()], "a thread for backwards would stop the process from forking"
        assert torch_private.lacks_data(x) and not torch_private.has_values(x)
        with pytest.raises(torch_private.MixedDevices):
            x + torch.ones(2, 3)
        (x + torch.ones(())).sum()
        for read in (lambda: float(x.sum()), lambda: x.nonzero()):
            with pytest.raises(torch_private.NEEDS_VALUES):
                read()
        with torch_private.with_data():
            assert float(torch.ones(2).sum()) == 2.0


def test_a_world_without_peers_completes_every_operation() -> None:
    with torch_private.world_without_peers(1, 4), torch_private.without_data(ImmediateStreams()):
        x = torch.ones(8, device=torch_private.NO_DATA)
        operations = [
            lambda: dist.all_reduce(x, async_op=True),
            lambda: dist.all_to_all_single(torch.empty_like(x), x, async_op=True),
            lambda: dist.isend(x, dst=0),
            lambda: dist.irecv(x, src=0),
            lambda: dist.all_reduce(x, group=dist.new_group([1, 3], use_local_synchronization=True), async_op=True),
        ]
        for operation in operations:
            work = operation()
            assert work is not None
            work.wait()
    assert not dist.is_initialized()


def test_views_and_operators_without_a_result_are_known() -> None:
    aten = torch.ops.aten
    views = (aten.view.default, aten.transpose.int, aten.split.Tensor, aten.detach.default, aten.select.int)
    assert all(map(torch_private.is_view, views))
    assert not any(map(torch_private.is_view, (aten.mm.default, aten.add_.Tensor, aten.clone.default)))
    assert torch_private.returns_nothing(aten._fused_sgd_.default)
    assert torch_private.returns_nothing(aten._fused_adamw_.default)
    assert not torch_private.returns_nothing(aten.add_.Tensor)


def test_a_dispatch_mode_sees_operations_before_they_run() -> None:
    seen = []

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((operator.namespace, operator.overloadpacket.__name__))
            return operator(*args, **(kwargs or {}))

    with Mode():
        float(torch.ones(2).sum())
    assert seen == [("aten", "ones"), ("aten", "sum"), ("aten", "_local_scalar_dense")]
    assert torch_private.SCALAR_READ.overloadpacket.__name__ == "_local_scalar_dense"
