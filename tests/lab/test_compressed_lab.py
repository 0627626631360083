"""Compressed methods in the lab, with real training: the loss falls, and the tape replays."""

import pytest
from lab_helpers import run, small

from farflung import tape
from farflung.chaos.oracle import judge
from farflung.testing.tapes import replay_run

HUB = {
    "dct_momentum_shared": {"codec": "dct-top512-int8-12bit"},
    "demo": {"codec": "dct-top512-fp32-12bit", "outer_lr": 3e-3, "sync_every_steps": 1},
    "muloco": {"task": "text_muon"},
    "sparseloco, free": {
        "pace": "free",
        "quorum": 1,
        "num_fragments": 4,
        "overlap_steps": 1,
        "codec": "top512-2bit-12bit",
    },
    "random_rows": {"codec": "rows1024-bf16", "outer_lr": 1.0},
    "sparseloco": {"codec": "top512-2bit-12bit", "outer_lr": 1.0},
    "sparseloco, increments": {
        "codec": "top512-2bit-12bit",
        "outer_lr": 1.0,
        "downlink_codec": "top1024-int8-12bit",
    },
    "decoupled, increments": {"num_fragments": 4, "overlap_steps": 1, "downlink_codec": "int8"},
}
DCT = {"codec": "dct-top128-int8-12bit", "gathers": 2, "num_fragments": 1}
METHODS = {**HUB, "dct_momentum": DCT, "dct_momentum, dense": {**DCT, "dense_every_rounds": 2}}


@pytest.mark.parametrize("name", METHODS)
def test_a_short_run_learns_and_replays(name, tmp_path):
    policy = {"sync_every_steps": 4, "lease_s": 2.0, **METHODS[name]}
    task = policy.pop("task", "text")
    run_dir = tmp_path / "run"
    summary = run(small(method=name.split(",")[0], task=task, policy=policy, steps=20, evals=2), run_dir)
    assert (summary["outcome"], summary["ledger_exact"], summary["rejoins"]) == ("finished", True, 1)
    assert summary["eval_loss_final"] < summary["eval_loss_start"]
    has_own_state = not name.startswith("decoupled")
    assert summary["rejoins_own_state"] + summary["rejoins_zero_state"] == has_own_state
    assert set(summary["zero_state_reasons"]) <= {"undecided"}
    assert all(v.same for v in replay_run(run_dir))
    verdict = judge(tape.read_run(run_dir))
    assert verdict.ok, str(verdict)
