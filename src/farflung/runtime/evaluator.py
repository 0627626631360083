"""Evaluation as a client of its own: it reads pinned versions and never holds up a learner.

Each line on standard input is one wish: ``now`` evaluates the syncer's newest parameters; ``PATH <tab> TOKENS``
evaluates that file, and with ``<tab> FOLDER`` behind it the files in there too, one a learner. Each answer is one
JSON line. The first line comes unasked: the parameters that the task begins with.
"""

import argparse
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from farflung.config import read_config
from farflung.runtime.security import client_context


def _load(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Parameters and buffers by name; tied ones appear once."""
    model.load_state_dict(tensors, strict=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="farflung.runtime.evaluator")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--skip-first", action="store_true")
    args = parser.parse_args()
    os.nice(10)  # training goes first
    torch.set_num_threads(1)
    config = read_config(args.run_dir)
    task = config.task()
    model = task.build_model()

    def answer(tokens: int, versions: list[int], **more: Any) -> None:
        figures = task.evaluation(model)
        record = {"t": config.clock(), "kind": "eval", "tokens": tokens, **figures, "versions": versions}
        print(json.dumps(record | more), flush=True)

    def loss_of(path: Path) -> float:
        _load(model, safetensors.torch.load_file(path))
        return task.evaluate(model)

    evaluated: list[int] = []  # versions
    if not args.skip_first:
        answer(0, [])
    headers = {"Authorization": f"Bearer {os.environ['FARFLUNG_TOKEN']}"}
    tls = client_context(config.recipe.serve.ca) if args.connect.startswith("https") else None
    for line in sys.stdin:
        wish, tokens, folder = [*line.rstrip("\n").split("\t"), "", ""][:3]
        if wish == "now":
            request = urllib.request.Request(f"{args.connect}/model", headers=headers)
            try:
                with urllib.request.urlopen(request, context=tls, timeout=60) as response:
                    tensors = safetensors.torch.load(response.read())
                    seen, versions = (
                        response.headers["X-Farflung-Tokens"],
                        response.headers["X-Farflung-Versions"],
                    )
            except OSError:
                continue  # the syncer is away or closing: this evaluation is left out
            if (newest := [int(v) for v in versions.split(",")]) != evaluated:
                evaluated = newest
                _load(model, tensors)
                answer(int(seen), newest)
        elif wish:
            more: dict[str, Any] = {}
            if folder:
                more["workers"] = {p.stem: loss_of(p) for p in sorted(Path(folder).glob("*.safetensors"))}
            _load(model, safetensors.torch.load_file(wish))
            answer(int(tokens), [], **more)


if __name__ == "__main__":
    main()
