from typing import Any

import msgspec
import pytest
from protocol_helpers import policy

from farflung.protocol.policy import Policy


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_fragments": 5}, "P = 5"),
        ({"num_fragments": 0}, "P = 0"),
        ({"overlap_steps": 4}, "tau = 4"),
        ({"overlap_steps": -1}, "tau = -1"),
        ({"sync_every_steps": 0}, "H = 0"),
        ({"quorum": 0}, "quorum = 0"),
        ({"grace_gamma": 1.0}, "grace_gamma = 1.0"),
        ({"grace_gamma": -0.1}, "grace_gamma = -0.1"),
        ({"adoption": "mix", "mix_alpha": 1.0}, "mix_alpha = 1.0"),
        ({"mix_alpha": 0.5}, "mix_alpha = 0.5"),
        ({"lease_s": 0.0}, "lease_s = 0.0"),
        ({"max_lead_steps": 0}, "max_lead_steps = 0"),
        ({"pace": "lockstep", "max_lead_steps": 3}, "max_lead_steps"),
    ],
)
def test_a_refusal_names_field_and_value(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        policy(**changes)


def test_an_unknown_field_of_a_recipe_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="quorom"):
        msgspec.convert({"method": "decoupled", "quorom": 2}, Policy)


def test_a_policy_survives_json_and_keeps_its_digest() -> None:
    ours = policy(quorum="all", adoption="mix", mix_alpha=0.25)
    again = msgspec.json.decode(msgspec.json.encode(ours), type=Policy)
    assert again == ours
    assert again.digest() == ours.digest()


def test_every_number_is_part_of_the_digest() -> None:
    digests = {policy(**c).digest() for c in ({}, {"quorum": 2}, {"outer_lr": 0.5}, {"lease_s": 4.0})}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("changes", "carries"),
    [
        ({}, False),
        ({"adoption": "rebase"}, True),
        ({"adoption": "mix", "mix_alpha": 0.5}, True),
        ({"adoption": "mix"}, False),
    ],
)
def test_work_survives_an_adoption_only_under_rebase_and_a_real_mix(
    changes: dict[str, Any], carries: bool
) -> None:
    assert policy(**changes).carries_tokens is carries
