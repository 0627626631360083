"""The inner loop: plain training, resumed exactly, handed over without the data cursor."""

import dataclasses

import pytest
import torch
from torch import nn

from farflung.train.loop import InnerLoop
from farflung.train.state import digest, load_state_bytes, state_bytes
from farflung.train.task import DataConfig, Task, TaskConfig, load_task


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Task:
    path = tmp_path_factory.mktemp("data") / "own.txt"
    path.write_bytes(bytes(i * i % 97 for i in range(20_000)))
    return load_task(
        "text",
        TaskConfig(
            scale="micro", batch_size=2, warmup_steps=4, eval_batches=1, data=DataConfig(path=str(path))
        ),
    )


def build(task: Task, learner_index: int = 0, rng_seed: int | None = None) -> InnerLoop:
    model = task.build_model()
    batches = task.build_batches(learner_index, 2)
    return InnerLoop(task, model, task.build_optimizer(model), batches, rng_seed=rng_seed)


def steps(loop: InnerLoop, first: int, last: int) -> list[float]:
    return [loop.step(progress=step / 10).loss for step in range(first, last)]


def test_a_step_is_a_plain_training_step(task):
    loop = build(task)
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    batches = task.build_batches(0, 2)
    for step in range(3):
        result = loop.step(progress=step / 10)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * task.lr_multiplier(step, step / 10)
        loss = task.loss(model, next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert (result.loss, result.num_tokens, result.lr) == (
            loss.item(),
            2 * 64,
            optimizer.param_groups[0]["lr"],
        )
    assert loop.own_steps == loop.batches.cursor == 3
    assert all(torch.equal(p, q) for p, q in zip(loop.model.parameters(), model.parameters(), strict=True))


def test_a_loop_resumed_from_bytes_equals_one_never_stopped(task):
    whole = build(task)
    expected = steps(whole, 0, 8)

    stopped = build(task)
    assert steps(stopped, 0, 5) == expected[:5]
    saved = state_bytes(stopped.state_dict())
    resumed = build(task)
    resumed.model.load_state_dict(stopped.model.state_dict())
    resumed.load_state_dict(load_state_bytes(saved))
    assert state_bytes(resumed.state_dict()) == saved

    assert steps(resumed, 5, 8) == expected[5:]
    assert state_bytes(resumed.state_dict()) == state_bytes(whole.state_dict())
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_the_state_before_the_first_step_can_be_taken_and_loaded(task):
    loop, other = build(task), build(task)
    other.load_state_dict(load_state_bytes(state_bytes(loop.state_dict())))
    assert steps(other, 0, 2) == steps(loop, 0, 2)


def test_a_joiner_takes_the_donors_state_and_keeps_its_own_cursor(task):
    donor, joiner = build(task, 0), build(task, 1)
    steps(donor, 0, 3)
    joiner.batches.seek(7)
    joiner.load_state_dict(load_state_bytes(state_bytes(donor.donor_state())))
    assert (joiner.own_steps, joiner.batches.cursor) == (3, 7)
    assert digest(state_bytes(joiner.donor_state())) == digest(state_bytes(donor.donor_state()))
    assert joiner.optimizer.param_groups[0]["lr"] == donor.optimizer.param_groups[0]["lr"]


def test_training_lowers_the_held_out_loss(task):
    loop = build(task)
    before = task.evaluate(loop.model)
    steps(loop, 0, 10)
    assert task.evaluate(loop.model) < before - 0.3


def test_no_clip_norm_means_no_clipping(task):
    clipped, free = build(task), build(dataclasses.replace(task, clip_norm=None))
    for loop in (clipped, free):
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1.0)
        loop.optimizer.param_groups[0]["initial_lr"] = 1.0
        loop.step(0.0)
    moved = [
        sum(
            (p - q).norm() ** 2
            for p, q in zip(loop.model.parameters(), task.build_model().parameters(), strict=True)
        )
        for loop in (clipped, free)
    ]
    assert moved[0] < moved[1]


def dropout_task(task: Task) -> Task:
    return dataclasses.replace(
        task,
        build_model=lambda: nn.Sequential(nn.Embedding(256, 32), nn.Dropout(0.5), nn.Linear(32, 256)),
    )


def test_dropout_resumes_exactly_and_leaves_the_global_random_state_alone(task):
    noisy = dropout_task(task)
    whole = build(noisy, rng_seed=5)
    start = {k: v.clone() for k, v in whole.model.state_dict().items()}
    before = torch.get_rng_state()
    expected = steps(whole, 0, 4)
    assert torch.equal(before, torch.get_rng_state())

    resumed = build(noisy, rng_seed=5)
    resumed.model.load_state_dict(start)
    steps(resumed, 0, 2)
    torch.manual_seed(99)  # somebody else uses the global state in between
    torch.rand(3)
    assert steps(resumed, 2, 4) == expected[2:]
