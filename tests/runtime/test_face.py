"""farflung.Learner against a real syncer: what a training loop of one's own sees."""

import pytest
import safetensors.torch
import torch
from syncer_helpers import TOKEN, Syncer
from torch import nn

import farflung as ff
from farflung.errors import UserError


def one_step(model: nn.Module, batch: torch.Tensor) -> float:
    loss = model(batch).float().pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return loss.item()


def train(learner: ff.Learner, model: nn.Module, batch: torch.Tensor) -> list[float]:
    losses = []
    while not learner.done:
        losses.append(one_step(model, batch))
        learner.step(num_tokens=len(batch), loss=losses[-1])
    return losses


# ---- a loop ----------------------------------------------------------------------------------------------


def test_a_loop_ends_when_the_budget_is_spent_and_its_progress_never_falls():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    with Syncer(budget_tokens=40 * 8) as syncer, syncer.learner(model) as learner:
        assert (learner.done, learner.end_reason, learner.progress, learner.index) == (False, None, 0.0, 0)
        seen, progress = [], [learner.progress]
        for batch in learner.batches([torch.full((8, 4), float(n)) for n in range(3)]):
            seen.append(batch[0, 0].item())
            learner.step(num_tokens=8, loss=one_step(model, batch))
            progress.append(learner.progress)
        assert (learner.done, learner.end_reason) == (True, "finished")
    assert seen[:7] == [0, 1, 2, 0, 1, 2, 0]  # the loader starts over
    assert progress == sorted(progress) and progress[-1] == 1.0
    assert syncer.machine.ledger.tokens_trained == len(seen) * 8 >= 40 * 8
    assert syncer.machine.phase == "finished"


def test_an_empty_loader_is_a_mistake():
    empty = pytest.raises(UserError, match=r"batches\(loader\): the loader is empty")
    with Syncer(budget_tokens=100) as syncer, syncer.learner(nn.Linear(2, 2)) as learner, empty:
        list(learner.batches([]))


def test_closing_twice_is_quick_and_tells_the_syncer_once():
    with Syncer(budget_tokens=10**9) as syncer:
        learner = syncer.learner(nn.Linear(2, 2))
        learner.step(num_tokens=1)
        learner.close()
        learner.close()
        assert learner._sidecar.process.returncode == 0
        assert syncer.machine.membership.members["ada"].state == "gone"
        assert [n["reason"] for n in syncer.driver.notes if n["kind"] == "left"] == ["the loop ended"]


def test_a_loop_that_fails_leaves_the_run():
    with Syncer(budget_tokens=10**9) as syncer:
        with pytest.raises(ZeroDivisionError), syncer.learner(nn.Linear(2, 2)):
            raise ZeroDivisionError
        assert syncer.machine.membership.members["ada"].state == "gone"


def test_a_learner_of_the_same_name_takes_the_place_of_the_old_one():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with Syncer(budget_tokens=10**9) as syncer, syncer.learner(model) as old, syncer.learner(other) as new:
        train(old, model, torch.ones(1, 2))
        assert old.end_reason == "fenced" and not new.done
        assert new.index == 0 and syncer.machine.membership.members["ada"].incarnation == 2


# ---- mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a.b"}, "name = 'a.b': use letters"),
        ({"name": "x" * 65}, "use letters, digits, '_' and '-', at most 64"),
        ({"token": "a b"}, "join token: expected one word"),
        ({"token": "a\nb"}, "join token: expected one word"),
        ({"token": None}, "no join token: give token=..., or set FARFLUNG_TOKEN"),
        ({"connect": "syncer:7070"}, "connect = 'syncer:7070': write http://HOST:PORT"),
        ({"connect": "https://x:1", "ca": "missing.pem"}, "TLS authority missing.pem"),
    ],
)
def test_a_mistake_is_told_at_once(monkeypatch, options, message):
    monkeypatch.delenv("FARFLUNG_TOKEN", raising=False)
    model = nn.Linear(2, 2)
    plain = {"connect": "http://127.0.0.1:1", "token": TOKEN}
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        ff.Learner(
            model,
            torch.optim.SGD(model.parameters()),
            ff.methods.decoupled(num_fragments=2),
            **plain | options,
        )


def test_a_model_with_too_few_rows_for_its_fragments_is_told_at_once():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="num_fragments = 24: 'balanced' can fill 1 to 4 for this model"):
        ff.Learner(
            model, torch.optim.SGD(model.parameters()), ff.methods.decoupled(), connect="http://127.0.0.1:1",
            token=TOKEN,
        )  # fmt: skip


def test_an_address_where_nobody_answers_is_given_up():
    with pytest.raises(ff.RunEnded, match=r"nobody answered within 0 s: http://127\.0\.0\.1:1: "):
        Syncer(1).learner(nn.Linear(2, 2), connect="http://127.0.0.1:1", connect_within_s=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": "wrong"}, r"refused \(token\): the join token is missing or wrong"),
        ({"run": "run-2"}, r"refused \(run\): run 'run-2' is not served here"),
    ],
)
def test_a_refusal_is_an_exception_with_one_line(options, message):
    with Syncer(budget_tokens=100) as syncer, pytest.raises(ff.RunEnded, match=message):
        syncer.learner(nn.Linear(2, 2), **options)


# ---- models ----------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The head is the embedding: one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x).tanh())


class Partly(nn.Module):
    """A frozen layer and a mask: neither ever travels."""

    def __init__(self) -> None:
        super().__init__()
        self.live = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def forward(self, x):
        return self.frozen(self.live(x)) * self.mask


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def bf16() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(torch.bfloat16)


@pytest.fixture(params=[batch_norm, bf16, Tied, Partly], ids=lambda build: build.__name__)
def build(request):
    return request.param


def test_a_model_trains_and_its_file_loads_into_a_fresh_one(build, tmp_path):
    torch.manual_seed(1)
    model, fresh, path = build(), build(), tmp_path / "model.safetensors"
    batch = torch.randn(8, 4).to(next(model.parameters()).dtype)
    with Syncer(budget_tokens=60 * 8) as syncer, syncer.learner(model) as learner:
        losses = train(learner, model, batch)
    assert losses[-1] < losses[0]
    syncer.driver.save_model(path)
    before = [p.clone() for p in fresh.parameters() if p.requires_grad]
    safetensors.torch.load_model(fresh, path, strict=build is not Partly)
    trained = [p for p in fresh.parameters() if p.requires_grad]
    assert [p.dtype for p in trained] == [p.dtype for p in model.parameters() if p.requires_grad]
    assert all(p.isfinite().all() for p in trained)
    assert not any(torch.equal(p, old) for p, old in zip(trained, before, strict=True))


def test_batch_norm_buffers_reach_the_file():
    model = batch_norm()
    with Syncer(budget_tokens=60 * 8) as syncer, syncer.learner(model) as learner:
        train(learner, model, torch.randn(8, 4) + 5)
    tensors = syncer.driver.hub.model_tensors()
    assert tensors["1.num_batches_tracked"] > 0  # as many as the last version that was merged had seen
    assert tensors["1.running_mean"].abs().sum() > 0
