"""The built-in task: next-byte prediction on a text with a small GPT."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.core.schedule import warmup_cosine
from farflung.train.base import Batches, Task, TaskConfig
from farflung.train.eval_mode import eval_mode
from farflung.train.gpt import GPT, scale_config
from farflung.train.text import EVAL_BATCH_SIZE, TextData, read_text, window_batches

# Near the best of a coarse sweep, one learner, 16 windows a step (medium: from the trend, tried once).
PEAK_LR = {"micro": 1e-2, "tiny": 6e-3, "small": 4e-3, "medium": 2e-3}
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


def text_task(config: TaskConfig) -> Task:
    """Build the task; the text is read here, once, so that a wrong path or a short text is told at once."""
    gpt = scale_config(config.scale)
    data = TextData.from_bytes(read_text(config.data.path))
    eval_ND = data.eval_windows(gpt.context, config.eval_batches * EVAL_BATCH_SIZE)
    lr = config.lr or PEAK_LR[config.scale]

    def build_batches(learner_index: int, num_learners: int) -> Batches:
        shard = data.shard(learner_index, num_learners)
        return window_batches(shard, config.batch_size, gpt.context, config.seed, learner_index)

    return Task(
        name="text",
        build_model=lambda: GPT(gpt, seed=config.seed),
        build_optimizer=functools.partial(adamw, lr=lr),
        build_batches=build_batches,
        loss=next_token_loss,
        num_tokens=lambda batch: batch.shape[0] * (batch.shape[1] - 1),
        evaluate=lambda model: mean_loss(model, eval_ND),
        lr_multiplier=lambda own_steps, progress: warmup_cosine(own_steps, progress, config.warmup_steps),
    )


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves vectors (norms, biases) and frozen parameters alone."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=BETAS, fused=True)


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; ``batch`` is int64 [B, T + 1], inputs and targets overlapping."""
    batch = batch.to(next(model.parameters()).device)
    logits_BTV = model(batch[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: nn.Module, windows_ND: Tensor) -> float:
    """Mean loss over uint8 windows [N, T + 1] in eval mode; each module's own mode is put back."""
    with eval_mode(model):
        total = 0.0
        for batch in torch.split(windows_ND, EVAL_BATCH_SIZE):
            total += next_token_loss(model, batch.long()).item() * len(batch)
        return total / len(windows_ND)
