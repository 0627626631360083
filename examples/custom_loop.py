"""Your own model in your own loop, on as many machines as you like.

    farflung serve --set budget_tokens=2_000_000      # prints the join token and the address
    FARFLUNG_TOKEN=... python examples/custom_loop.py --connect http://127.0.0.1:PORT --name ada
    FARFLUNG_TOKEN=... python examples/custom_loop.py --connect http://127.0.0.1:PORT --name bob

Start as many as you like, whenever you like; kill one, and start it again under its name. The task: tell two
interleaved spirals apart. A "token" is whatever you count: here one point of the plane.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import farflung as ff


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)
        )

    def forward(self, points):
        return self.layers(points)


def spirals(seed, batch_size=128):
    """Batches without end: points on two spirals, and which of the two each lies on."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        label = torch.randint(2, (batch_size,), generator=generator)
        turn = torch.rand(batch_size, generator=generator)
        angle = 3 * math.pi * turn + math.pi * label
        points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1)
        yield points + 0.01 * torch.randn(batch_size, 2, generator=generator), label


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connect", required=True, help="address that `farflung serve` printed")
    parser.add_argument("--name", required=True, help="of this learner; the same after a restart")
    args = parser.parse_args()

    torch.set_num_threads(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ff.Learner(
        model, optimizer, ff.methods.decoupled(), connect=args.connect, name=args.name
    ) as learner:
        batches = learner.batches(spirals(seed=learner.index))  # ends when the run's budget is spent
        for step, (points, label) in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (1 - learner.progress)  # follows the whole run, not this process
            loss = F.cross_entropy(model(points), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 200 == 0:
                print(f"{args.name}: {learner.progress:4.0%} of the run, loss {loss:.4f}", flush=True)
            learner.step(num_tokens=len(points), loss=loss.item())
        print(f"{args.name}: {learner.end_reason}, loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
