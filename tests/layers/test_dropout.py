"""Dropout by what an element is: equal for every way to cut batch, sequence and heads."""

from __future__ import annotations

import pytest
import torch

from megastack.comm.group import AxisGroup
from megastack.errors import ConfigError
from megastack.layers.context import Context
from megastack.layers.dropout import attention_dropout, dropout

CONTEXT = Context(samples_B=torch.tensor([3, 4, 9]), step=2, seed=1)
ONES_BSD = torch.ones(3, 8, 10, dtype=torch.float64)


def slice_group(rank: int, size: int) -> AxisGroup:
    return AxisGroup(rank, size, tuple(range(size)), None, "tp")


def test_what_is_kept_is_scaled_exactly_and_the_share_is_right():
    x_BSD = torch.ones(3, 64, 64, dtype=torch.float64)
    out_BSD = dropout(x_BSD, 0.1, CONTEXT, "here")
    assert out_BSD.dtype == torch.float64
    assert set(out_BSD.unique().tolist()) == {0.0, 1 / 0.9}
    assert (out_BSD == 0).double().mean().item() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_the_sequence_drop_what_the_whole_drops(size):
    whole_BSD = dropout(ONES_BSD, 0.5, CONTEXT, "here")
    pieces = [
        dropout(x, 0.5, CONTEXT, "here", group=slice_group(r, size)) for r, x in enumerate(ONES_BSD.chunk(size, 1))
    ]
    assert torch.equal(torch.cat(pieces, 1), whole_BSD)
    assert not torch.equal(pieces[0], pieces[1])


def test_samples_drop_alike_in_any_batch_and_differ_from_each_other():
    whole_BSD = dropout(ONES_BSD, 0.5, CONTEXT, "here")
    alone = Context(samples_B=torch.tensor([9]), step=2, seed=1)
    assert torch.equal(dropout(ONES_BSD[:1], 0.5, alone, "here"), whole_BSD[2:])
    assert not torch.equal(whole_BSD[0], whole_BSD[1])


def test_seed_step_site_and_scope_all_matter():
    samples = CONTEXT.samples_B
    contexts = [CONTEXT, Context(samples_B=samples, step=3, seed=1), Context(samples_B=samples, step=2, seed=2)]
    contexts += [CONTEXT.within("blocks.0"), CONTEXT.within("blocks.1")]
    masks = [dropout(ONES_BSD, 0.5, context, "here") for context in contexts]
    masks.append(dropout(ONES_BSD, 0.5, CONTEXT, "there"))
    for i, mask in enumerate(masks):
        assert torch.equal(mask, dropout(ONES_BSD, 0.5, [*contexts, CONTEXT][i], "there" if i == 5 else "here"))
        assert not any(torch.equal(mask, other) for other in masks[:i])


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_weights_drop_by_global_head(heads):
    weights_BHSS = torch.ones(3, 4, 8, 8, dtype=torch.float64)
    whole = attention_dropout(weights_BHSS, 0.5, CONTEXT, "weights", first_head=0)
    pieces = [
        attention_dropout(part, 0.5, CONTEXT, "weights", first_head=first * heads)
        for first, part in enumerate(weights_BHSS.split(heads, 1))
    ]
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_nothing_is_dropped_without_context_probability_or_training():
    assert dropout(ONES_BSD, 0.5, None, "here") is ONES_BSD
    assert dropout(ONES_BSD, 0.0, CONTEXT, "here") is ONES_BSD
    assert dropout(ONES_BSD, 0.5, CONTEXT, "here", training=False) is ONES_BSD
    weights_BHSS = ONES_BSD[:, None]
    assert attention_dropout(weights_BHSS, 0.5, None, "weights", first_head=0) is weights_BHSS


def test_the_gradient_goes_where_the_value_went():
    x_BSD = ONES_BSD.clone().requires_grad_()
    out_BSD = dropout(x_BSD, 0.3, CONTEXT, "here")
    out_BSD.sum().backward()
    assert torch.equal(x_BSD.grad, out_BSD.detach())


def test_a_context_without_samples_is_refused():
    with pytest.raises(ConfigError, match=r"dropout=0.5 at here: .*samples_B"):
        dropout(ONES_BSD, 0.5, Context(), "here")
