"""How `farflung join` ends, and what it says then: by Ctrl-C, by another of its name, by a wrong address."""

import signal
import time

import pytest
import torch
from processes_helpers import DEADLOCK_S, Served, finish
from syncer_helpers import Syncer
from torch import nn

import farflung as ff
from farflung.runtime.island import ORDERLY, told

RECIPE = """
scale = "micro"
num_learners = 1
budget_tokens = 1_000_000_000
pace_s = 0.01

[policy]
num_fragments = 3
sync_every_steps = 6
lease_s = 5.0
"""


def until_joined(served: Served, times: int) -> None:
    deadline_s = time.monotonic() + DEADLOCK_S
    while len(served.notes("joined")) < times:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_second_of_a_name_stays_and_ctrl_c_leaves(tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE)
    with Served(tmp_path, "r.toml") as served:
        first = served.join("a")
        until_joined(served, 1)
        second = served.join("a")
        code, out, err = finish(first)
        assert (code, out) == (2, "")
        assert err == (
            "farflung: another process joined as 'a' and took its place; give each learner a --name of its own\n"
        )
        until_joined(served, 2)
        second.send_signal(signal.SIGINT)
        assert finish(second) == (130, "", "interrupted: left the run\n")
        assert [note["reason"] for note in served.notes("left")] == ["interrupted"]


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("fenced", "give each learner a --name of its own"),
        ("suspended", "serve --resume"),
        ("refused: incarnation 3 was given up", "start it again"),
        ("refused: incarnation 3 was replaced (newest: 4)", "start it again"),
        ("could not upload the first parameters: gone", "start it again"),
        ("refused (token): the join token is missing or wrong", "set FARFLUNG_TOKEN"),
        ("nobody answered within 30 s: refused", "is the syncer running"),
        ("", "start it again"),
    ],
)
def test_every_end_says_what_to_do(reason, says):
    for name in ("a", None):
        assert says in told(reason, name) and "\n" not in told(reason, name)
    assert told("finished", "a") == "finished" in ORDERLY


# ---- what others are told --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (ZeroDivisionError("division by zero"), "failed: ZeroDivisionError: division by zero"),
        (RuntimeError("two\n  lines"), "failed: RuntimeError: two lines"),
        (RuntimeError("x" * 999), f"failed: RuntimeError: {'x' * 175}..."),
        (AssertionError(), "failed: AssertionError"),
    ],
)
def test_who_leaves_a_run_says_why(error, reason):
    assert len(reason) <= 200
    with Syncer(budget_tokens=10**9) as syncer:
        with pytest.raises(type(error)), syncer.learner(nn.Linear(2, 2)):
            raise error
        assert [n["reason"] for n in syncer.driver.notes if n["kind"] == "left"] == [reason]


# ---- a hub without TLS -----------------------------------------------------------------------------------


def test_https_to_a_hub_that_speaks_http_is_told_at_once():
    with Syncer(budget_tokens=10**9) as syncer:
        url, began_s = syncer.url.replace("http://", "https://"), time.monotonic()
        with pytest.raises(ff.RunEnded) as ended:
            syncer.learner(nn.Linear(2, 2), connect=url)
        assert str(ended.value) == f"{url} does not speak TLS: try http://"
        assert time.monotonic() - began_s < 15  # not the 30 s that a syncer may take to start


def test_no_object_address_is_told():
    model = nn.Linear(2, 2)
    with pytest.raises(ff.RunEnded, match="nobody answered within 0 s") as ended:
        ff.Learner(
            model, torch.optim.SGD(model.parameters()), ff.methods.decoupled(num_fragments=2),
            connect="https://127.0.0.1:1", token="t", connect_within_s=0,
        )  # fmt: skip
    assert "ssl:" not in str(ended.value) and "0x" not in str(ended.value)
