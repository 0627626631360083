"""A built-in task: small images in grey and ten classes of them, Fashion-MNIST unless told otherwise."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.core.schedule import warmup_cosine
from farflung.train.base import Batches, Task, TaskConfig
from farflung.train.eval_mode import eval_mode
from farflung.train.images import Batch, Images, read_images
from farflung.train.text_task import adamw
from farflung.train.vision_models import build_classifier, vision_config

EVAL_BATCH_SIZE = 500  # the default number of batches is the whole test set of Fashion-MNIST
VISION_LR = {"micro": 4e-3, "tiny": 3e-3, "resnet": 4e-3}  # of a coarse sweep, one learner, 32 images a step


def vision_task(config: TaskConfig) -> Task:
    """Build the task; the images are read here, once, so that a bad file is told at once.

    A token is an image. Held out is the test set, or as much of it as `eval_batches` says.
    """
    sizes = vision_config(config.scale)
    train, held_out = read_images(config.data.path)
    held_out = held_out.spread(config.eval_batches * EVAL_BATCH_SIZE)
    _, rows, columns = train.pixels_NHW.shape
    lr = config.lr or VISION_LR[config.scale]

    def build_batches(learner_index: int, num_learners: int) -> Batches:
        return train.shard(learner_index, num_learners).batches(config.batch_size, config.seed, learner_index)

    return Task(
        name="vision",
        build_model=lambda: build_classifier(sizes, (rows, columns), seed=config.seed),
        build_optimizer=functools.partial(adamw, lr=lr),
        build_batches=build_batches,
        loss=classification_loss,
        num_tokens=lambda batch: len(batch[1]),
        evaluate=lambda model: loss_and_accuracy(model, held_out)["loss"],
        measure=lambda model: loss_and_accuracy(model, held_out),
        lr_multiplier=lambda own_steps, progress: warmup_cosine(own_steps, progress, config.warmup_steps),
    )


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats per image."""
    logits_BK, labels_B = _logits(model, batch)
    return F.cross_entropy(logits_BK, labels_B)


@torch.no_grad()
def loss_and_accuracy(model: nn.Module, images: Images) -> dict[str, float]:
    """Mean loss (nats per image) and share of right answers in eval mode; each module's own mode is put back."""
    loss, right = 0.0, 0
    with eval_mode(model):
        for batch in images.split(EVAL_BATCH_SIZE):
            logits_BK, labels_B = _logits(model, batch)
            loss += F.cross_entropy(logits_BK, labels_B, reduction="sum").item()
            right += int((logits_BK.argmax(1) == labels_B).sum())
    return {"loss": loss / len(images), "accuracy": right / len(images)}


def _logits(model: nn.Module, batch: Batch) -> Batch:
    """Logits [B, K], and the labels where they are."""
    device = next(model.parameters()).device
    pixels_BHW, labels_B = (part.to(device) for part in batch)
    return model(pixels_BHW), labels_B
