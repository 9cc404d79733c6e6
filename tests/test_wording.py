"""Numbers and nouns agree: a count that may be 1 never stands before a fixed plural."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megastack.errors import counted

ROOT = Path(__file__).resolve().parent.parent / "megastack"

NOUNS = """actions arguments blocks buckets bytes checkpoints chunks columns copies devices dims documents elements
    errors faults files GPUs CPUs groups heads ids jobs labels layers layouts lines messages microbatches modules nodes
    numbers parameters parts places positions processes ranks rounds rows runs samples seconds sequences shards sources
    stages steps tensors tokens values weights"""
PLURAL = re.compile(rf" (?:[a-z-]+ )?({'|'.join(NOUNS.split())})\b(?! [a-z]+=)")

NEVER_ONE = {
    ("comm/collectives.py", "buffer.numel()"),  # an assertion
    ("layers/cache.py", "seen"),  # an assertion
    ("config/overrides.py", "MOST_JOBS"),
    ("config/overrides.py", "jobs"),  # more than the limit
    ("config/value_rules.py", "LONGEST_NAME"),
    ("cli/weights.py", "vocab"),
    ("config/rules.py", "replica"),  # does not fit in the ranks, of which there is one
    ("config/layout_rules.py", "stages"),  # more stages than layers
    ("config/phases.py", "BYTE_IDS"),
    ("config/value_rules.py", "BYTE_IDS"),
    ("cli/tokenize.py", "counts.tokens / seconds"),  # a rate
    ("data/blend_weights.py", "drawn"),  # more than a period
    ("data/indexed.py", "lengths.max()"),  # more than the format holds
    ("cli/export_model.py", "done.parameters"),
    ("cli/import_model.py", "done.parameters"),
    ("interop/transfer.py", "size"),  # parameters of a model
    ("interop/transfer.py", "model.window"),
    ("interop/hub_config.py", "length"),  # longer than the window
    ("interop/proof.py", "SEQUENCES"),
    ("launch/local.py", "RANKS_PER_CPU * cpus"),
    ("cli/weights.py", "shape.world_size"),  # one has a text of its own
    ("mesh/device.py", "seen"),  # several GPUs
    ("mesh/mesh.py", "shape.world_size"),  # one needs no launcher
    ("models/stages.py", "stages"),  # more than blocks
    ("placement/boxes.py", "shard.copies"),  # only where there are several
    ("plan/describe.py", "human(layout.parameters)"),
    ("testing/layouts.py", "schedule.chunks"),  # only where there are several
    ("cli/verification.py", "len(verdicts)"),  # one has a text of its own
}

NOT_A_COUNT = {
    ("interop/hub_config.py", "absent"),
    ("testing/parity.py", "classes.label(faulty.module)"),
    ("data/indexed.py", "self.dtype"),
    ("data/sources.py", "source"),
    ("pipeline/schedule.py", "rank"),
    ("pipeline/schedules/zero_bubble.py", "name"),
}


def plurals() -> Iterator[tuple[str, str]]:
    """The file and expression of each f-string in which a plural follows a value that may be a number."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for value, text in pairwise(node.values) if isinstance(node, ast.JoinedStr) else ():
                if not (isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant)):
                    continue
                source = ast.unparse(value.value)
                if PLURAL.match(str(text.value)) and "join(" not in source and "counted(" not in source:
                    yield str(path.relative_to(ROOT)), source


def test_a_count_that_may_be_one_is_formatted_by_counted() -> None:
    found = set(plurals())
    assert not sorted(found - NEVER_ONE - NOT_A_COUNT)
    assert not sorted((NEVER_ONE | NOT_A_COUNT) - found), "listed but not found"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 ranks"),
        (1, "1 rank"),
        (2, "2 ranks"),
        (12_345, "12,345 ranks"),
        (np.int64(1), "1 rank"),
        (1.5, "1.5 ranks"),
    ],
)
def test_counted(count: float, expected: str) -> None:
    assert counted(count, "rank") == expected


def test_a_noun_with_an_irregular_plural() -> None:
    assert [counted(n, "batch", "batches") for n in (1, 3_000_000)] == ["1 batch", "3,000,000 batches"]
