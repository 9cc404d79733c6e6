"""The first thing that is wrong, and causes that follow from the numbers, only where a signature is exact."""

from __future__ import annotations

import pytest
import torch

from megastack.mesh.shape import Axis
from megastack.placement.placement import Placement, Shard
from megastack.testing.compare import Mismatch, RankReport
from megastack.testing.diagnose import (
    BUFFER,
    Evidence,
    backward_cause,
    diagnose,
    factor_cause,
    gradient_cause,
    output_cause,
)

WHOLE = Placement((6,))
PARTIAL = Placement((6,), partial=frozenset({Axis.TP}))
A, B = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
ROWS = torch.randn(2, 3, 6, dtype=torch.float64)


def test_parts_that_sum_to_the_reference_are_an_undeclared_partial_gradient() -> None:
    cause = gradient_cause("blocks.0.mlp.gain", WHOLE, [A, B], A + B)
    assert cause is not None
    assert cause.startswith("undeclared partial gradient over tp")
    assert 'declare it in placements() of blocks.0.mlp: "gain": Placement' in cause


def test_parts_that_sum_to_something_else_are_not() -> None:
    assert gradient_cause("gain", WHOLE, [A, B], (A + B) * (1 + 1e-4)) is None


def test_t_times_the_reference_is_a_wrong_declaration_only_if_it_is_declared_partial() -> None:
    cause = gradient_cause("gain", PARTIAL, [2 * A, 2 * A], A)
    assert cause is not None
    assert "declared partial over tp, but complete on every rank: it is exactly 2 times" in cause
    assert gradient_cause("gain", WHOLE, [2 * A, 2 * A], A) is None


def test_a_sharded_parameter_and_a_single_rank_have_no_such_cause() -> None:
    assert gradient_cause("gain", Placement((12,), {Axis.TP: Shard(0)}), [A, B], A + B) is None
    assert gradient_cause("gain", WHOLE, [A], A) is None


def test_whole_multiples_name_the_axis_of_that_degree() -> None:
    degrees = {"dp": 4, "tp": 2, "pp": 1}
    assert "summed over dp once too often" in (factor_cause([4.0, 4.0], degrees) or "")
    assert "a sum over tp is missing" in (factor_cause([0.5], degrees) or "")
    assert factor_cause([4.0, 3.9], degrees) is None
    assert factor_cause([1.0], degrees) is None


def test_a_bias_added_by_every_rank_is_t_minus_1_too_many_on_whole_outputs_and_on_rows() -> None:
    for parts in ([ROWS] * 4, list(torch.randn(4, 2, 3, 6, dtype=torch.float64))):
        cause = output_cause([part + 3 * A for part in parts], parts, {"mlp.down.bias": A})
        assert cause is not None
        assert "bias added before the reduction: the output is off by exactly 3 × mlp.down.bias" in cause


def test_outputs_that_sum_to_the_reference_lack_a_reduction_and_t_times_it_has_one_too_many() -> None:
    other = torch.randn_like(ROWS)
    assert "missing reduction" in (output_cause([ROWS - other, other], [ROWS, ROWS], {}) or "")
    assert "2 times" in (output_cause([2 * ROWS, 2 * ROWS], [ROWS, ROWS], {}) or "")
    assert "its own code" in (output_cause([ROWS + other, ROWS], [ROWS, ROWS], {}) or "")
    assert output_cause([other], [ROWS], {}) is None


def test_an_input_gradient_left_as_parts_needs_copy_to() -> None:
    other = torch.randn_like(ROWS)
    assert "copy_to" in backward_cause("blocks.1.mlp", [ROWS - other, other], [ROWS, ROWS])
    assert "2 times" in backward_cause("blocks.1.mlp", [2 * ROWS, 2 * ROWS], [ROWS, ROWS])


@pytest.mark.parametrize(
    ("buffers", "trained", "held", "cause"),
    [({"a.x"}, set(), "buffer", BUFFER), (set(), {"a.x"}, "trained", None), (set(), {"a.y"}, "frozen", None)],
)
def test_a_differing_weight_is_a_buffer_a_trained_or_a_frozen_parameter(
    buffers: set[str], trained: set[str], held: str, cause: str | None
) -> None:
    report = RankReport(dict.fromkeys(Axis, 0), {"a.x"}, buffers, trained)
    report.mismatches.append(Mismatch("sgd", "weight", "a.x", 0, 0.5, 1.5))
    finding = diagnose([report], Evidence(["a.x"], {}))
    assert finding is not None
    assert (finding.kind, finding.name, finding.held, finding.cause) == ("weight", "a.x", held, cause)
