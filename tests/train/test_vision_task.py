"""The vision task: models, determinism, resuming, evaluation, Muon inside."""

import math

import pytest
import torch
from idx_files import write_images

from farflung.core.vectors import describe
from farflung.errors import UserError
from farflung.train.images import read_images
from farflung.train.loop import InnerLoop
from farflung.train.state import digest, state_bytes
from farflung.train.task import DataConfig, Task, TaskConfig, load_task
from farflung.train.vision_models import VISION_SCALES, build_classifier

SCALES = [*VISION_SCALES]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return write_images(tmp_path_factory.mktemp("data") / "images")


def task_of(path: str, scale: str = "micro", name: str = "vision") -> Task:
    config = TaskConfig(scale=scale, batch_size=8, eval_batches=1, warmup_steps=2, data=DataConfig(path=path))
    return load_task(name, config)


def loop_of(task: Task) -> InnerLoop:
    model = task.build_model()
    return InnerLoop(task, model, task.build_optimizer(model), task.build_batches(1, 2), rng_seed=0)


def held_by(loop: InnerLoop) -> tuple[str, list[torch.Tensor]]:
    """All that continues a loop: optimizer, cursor and own steps; parameters and buffers."""
    return digest(state_bytes(loop.state_dict())), [t.clone() for t in loop.model.state_dict().values()]


@pytest.mark.parametrize(
    ("scale", "num_parameters"), [("micro", 33_802), ("tiny", 113_674), ("resnet", 77_754)]
)
def test_a_scale_has_the_size_that_it_says_and_begins_at_the_loss_of_a_guess(path, scale, num_parameters):
    assert sum(p.numel() for p in build_classifier(VISION_SCALES[scale]).parameters()) == num_parameters
    task = task_of(path, scale)
    batch = next(task.build_batches(0, 1))
    assert task.num_tokens(batch) == 8
    assert task.loss(task.build_model(), batch).item() == pytest.approx(math.log(10), rel=0.15)


def test_an_unknown_scale_gets_a_hint(path):
    with pytest.raises(
        UserError, match=r"unknown scale 'restnet' of task 'vision' \(did you mean 'resnet'\?\)"
    ):
        task_of(path, "restnet")


@pytest.mark.parametrize("scale", SCALES)
def test_same_config_gives_the_same_model_and_batches(path, scale):
    one, two = task_of(path, scale), task_of(path, scale)
    with torch.random.fork_rng():
        torch.manual_seed(3)  # what the global generator is at does not matter
        before = torch.random.get_rng_state()
        models = one.build_model().state_dict(), two.build_model().state_dict()
        assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(models[0].values(), models[1].values(), strict=True))
    batches = next(one.build_batches(1, 2)), next(two.build_batches(1, 2))
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))


@pytest.mark.parametrize(
    ("scale", "name"), [("micro", "vision"), ("micro", "vision_muon"), ("resnet", "vision")]
)
def test_a_resumed_learner_goes_on_bit_for_bit(path, scale, name):
    task = task_of(path, scale, name)
    whole = loop_of(task)
    for _ in range(3):
        whole.step(0.5)
    resumed = loop_of(task)
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.load_state_dict(whole.state_dict())
    for _ in range(2):
        assert whole.step(0.6) == resumed.step(0.6)
    (digest_a, tensors_a), (digest_b, tensors_b) = held_by(whole), held_by(resumed)
    assert digest_a == digest_b
    assert all(torch.equal(a, b) for a, b in zip(tensors_a, tensors_b, strict=True))


@pytest.mark.parametrize(
    ("scale", "name"), [("micro", "vision"), ("micro", "vision_muon"), ("resnet", "vision")]
)
def test_one_learner_learns_its_images(path, scale, name):
    task = task_of(path, scale, name)
    loop = loop_of(task)
    for _ in range(40):
        loop.step(0.0)
    said = task.evaluation(loop.model)
    assert said["loss"] < 1.0
    assert said["figures"]["accuracy"] > 0.8


def test_an_evaluation_gives_loss_and_accuracy_as_a_naive_count_does(path):
    task = task_of(path)
    model = task.build_model()
    _, held_out = read_images(path)
    losses, right = [], 0
    for pixels_HW, label in zip(held_out.pixels_NHW, held_out.labels_N, strict=True):
        (logits_K,) = model(pixels_HW[None])
        losses.append(-logits_K.log_softmax(0)[label].item())
        right += int(logits_K.argmax() == label)
    said = task.evaluation(model)
    assert said["loss"] == pytest.approx(sum(losses) / len(losses))
    assert said["figures"] == {"accuracy": right / len(losses)}


@pytest.mark.parametrize("scale", SCALES)
def test_evaluation_is_deterministic_and_changes_neither_modes_nor_buffers(path, scale):
    task = task_of(path, scale)
    model = task.build_model()
    model.train()
    model.head.eval()
    modes = [m.training for m in model.modules()]
    before = [t.clone() for t in model.state_dict().values()]
    assert task.evaluation(model) == task.evaluation(model)
    assert task.evaluation(model)["loss"] == task.evaluate(model)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_the_statistics_of_a_resnet_travel_as_buffers_and_its_counters_as_counters():
    kinds = {s.name: s.kind for s in describe(build_classifier(VISION_SCALES["resnet"]))}
    of = {
        kind: {name.rpartition(".")[2] for name, k in kinds.items() if k == kind} for kind in kinds.values()
    }
    assert of["buffer"] == {"running_mean", "running_var"}
    assert of["counter"] == {"num_batches_tracked"}
    assert of["param"] == {"weight", "bias"}


def test_muon_steps_kernels_and_the_head_along_orthogonal_matrices(path):
    task = task_of(path, name="vision_muon")
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    inside = {p for g in optimizer.param_groups if g["orthogonal"] for p in g["params"]}
    assert inside == {p for p in model.parameters() if p.dim() >= 2}
    kernel = model.convs[2].weight
    before = kernel.detach().clone()
    task.loss(model, next(task.build_batches(0, 1))).backward()
    optimizer.step()
    moved = (kernel.detach() - before).flatten(1)
    assert moved.shape == (64, 32 * 9)
    values = torch.linalg.svdvals(moved)
    assert values[0] < 2 * values[15]  # of the gradient, which has few directions, that is far steeper
