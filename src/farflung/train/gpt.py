"""A plain byte-level GPT, sized by one dial.

Shape letters: B batch, T positions, C width (``dim``), H heads, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.errors import UserError, did_you_mean

INIT_STD = 0.02  # GPT-2


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT; ``context`` is the longest input in tokens."""

    dim: int
    num_layers: int
    num_heads: int
    context: int
    vocab_size: int = 256

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "context", "vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"GPTConfig.{name} = {getattr(self, name)}: give a whole number of at least 1"
                )
        if self.dim % self.num_heads:
            raise UserError(
                f"GPTConfig.dim = {self.dim} is not divisible by num_heads = {self.num_heads}: change one"
            )


SCALES: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "micro": GPTConfig(dim=32, num_layers=2, num_heads=2, context=64),  # 0.035 M parameters
        "tiny": GPTConfig(dim=64, num_layers=2, num_heads=4, context=64),  # 0.12 M
        "small": GPTConfig(dim=128, num_layers=4, num_heads=4, context=128),  # 0.84 M
        "medium": GPTConfig(dim=256, num_layers=4, num_heads=8, context=128),  # 3.25 M
    }
)


def scale_config(scale: str) -> GPTConfig:
    """Return the sizes behind a scale name, or raise UserError with the closest known name."""
    if scale not in SCALES:
        raise UserError(f"unknown scale {scale!r}{did_you_mean(scale, SCALES)}")
    return SCALES[scale]


class Attention(nn.Module):
    """Causal self-attention, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        qkv = self.qkv(x_BTC).view(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, C/H]
        y_BHTc = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out_BTC: Tensor = self.proj(y_BHTc.transpose(1, 2).reshape(B, T, C))
        return out_BTC


class MLP(nn.Module):
    """Two linear maps around a GELU, four times as wide inside, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.proj = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out_BTC: Tensor = self.proj(F.gelu(self.up(x_BTC), approximate="tanh"))
        return out_BTC


class Block(nn.Module):
    """One pre-norm transformer layer, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.dim, bias=False)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim, bias=False)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attn(self.attn_norm(x_BTC))
        out_BTC: Tensor = x_BTC + self.mlp(self.mlp_norm(x_BTC))
        return out_BTC


class GPT(nn.Module):
    """Decoder-only transformer: learned positions, pre-norm, tied embeddings, no biases.

    The same ``seed`` gives the same bits; the global random state is neither read nor changed.
    Layers are named ``blocks.0``, ``blocks.1``, ...: fragment plans by layer find them there.

    >>> sum(p.numel() for p in GPT(SCALES["micro"]).parameters())
    34976
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # the constructors below draw values that init replaces
            self.tok = nn.Embedding(config.vocab_size, config.dim)
            self.pos = nn.Embedding(config.context, config.dim)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
            self.norm = nn.LayerNorm(config.dim, bias=False)
        self._init_weights(seed)

    @torch.no_grad()
    def _init_weights(self, seed: int) -> None:
        """GPT-2's: normal(0, 0.02), and the maps into the residual stream smaller by sqrt(2 layers)."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                into_residual = name.endswith("proj.weight")
                std = INIT_STD / (2 * self.config.num_layers) ** 0.5 if into_residual else INIT_STD
                p.normal_(0.0, std, generator=generator)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Map tokens [B, T] (int64, T <= context) to logits [B, T, V]; position t sees tokens up to t."""
        x_BTC = self.tok(tokens_BT) + self.pos.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return F.linear(self.norm(x_BTC), self.tok.weight)
