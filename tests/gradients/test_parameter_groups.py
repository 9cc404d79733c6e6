"""Weight decay, groups by pattern and frozen parameters."""

import pytest
from torch import nn

from megastack.errors import ConfigError
from megastack.gradients.parameter_groups import GroupRule, ParameterGroup, assign_groups, check_patterns, freeze

DECAYS = {
    "embedding.weight": True,
    "blocks.3.attention_norm.weight": False,
    "blocks.3.attention.q.weight": True,
    "blocks.3.attention.q.bias": True,
    "blocks.30.attention.q.weight": True,
    "norm.weight": True,
}


def test_decay_needs_the_placement_and_no_exemption() -> None:
    groups = assign_groups(DECAYS, weight_decay=0.1, no_decay=["norm", "bias"])
    decaying = {name for name, group in groups.items() if group.weight_decay}
    assert decaying == {"embedding.weight", "blocks.3.attention.q.weight", "blocks.30.attention.q.weight"}
    everything = assign_groups(DECAYS, weight_decay=0.1)
    assert [name for name, group in everything.items() if not group.weight_decay] == ["blocks.3.attention_norm.weight"]


def test_the_first_rule_that_matches_wins_and_never_makes_a_norm_decay() -> None:
    rules = [GroupRule(r"^blocks\.3\.", lr_scale=0.5, weight_decay=0.3), GroupRule("q.weight", lr_scale=2.0)]
    groups = assign_groups(DECAYS, weight_decay=0.1, no_decay=["bias"], rules=rules)
    assert groups["blocks.3.attention.q.weight"] == ParameterGroup(0.5, 0.3)
    assert groups["blocks.30.attention.q.weight"] == ParameterGroup(2.0, 0.1)
    assert groups["blocks.3.attention.q.bias"] == ParameterGroup(0.5, 0.0)
    assert groups["blocks.3.attention_norm.weight"] == ParameterGroup(0.5, 0.0)
    assert groups["embedding.weight"] == ParameterGroup(1.0, 0.1)


def test_a_rule_that_matches_nothing_is_an_error_with_near_names() -> None:
    with pytest.raises(ConfigError, match=r"optim.groups=embeding: .*embedding.weight"):
        assign_groups(DECAYS, weight_decay=0.1, rules=[GroupRule("embeding")])


def test_a_rule_may_match_on_another_stage_only() -> None:
    here = {"embedding.weight": True}
    groups = assign_groups(here, weight_decay=0.1, rules=[GroupRule("q.weight", 2.0)], names=DECAYS)
    assert groups == {"embedding.weight": ParameterGroup(1.0, 0.1)}


def test_every_bad_pattern_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_patterns("optim.freeze", ["heads", "norm", "mpl"], DECAYS)
    assert "optim.freeze=heads" in str(caught.value) and "optim.freeze=mpl" in str(caught.value)
    assert "optim.freeze=norm" not in str(caught.value)


def test_a_pattern_that_is_not_a_regular_expression_is_an_error() -> None:
    with pytest.raises(ConfigError, match="regular expression"):
        check_patterns("optim.freeze", ["*.weight"], DECAYS)


def test_freeze_turns_gradients_off_by_global_name() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
    assert freeze([model], ["^embedding"]) == ("embedding.weight",)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    with pytest.raises(ConfigError, match=r"optim\.freeze=bloks"):
        freeze([model], ["bloks"])
