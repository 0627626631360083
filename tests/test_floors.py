"""The house stands: imports only go down its floors, and what decides does no I/O (docs/design.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
FLOORS = [
    {"units", "errors", "tape"},
    {"core"},
    {"protocol", "chaos"},
    {"methods"},
    {"engine", "train", "ipc", "recipe", "recorder"},
    {"config"},
    {"runtime", "lab", "report", "simulate"},
    {"testing"},
    {
        "cli",
        "compare",
        "bench",
        "plan",
        "farflung",
    },  # the roof puts the house together: its parts may call each other
]
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}

CLOCK = {"time", "datetime"}
CHANCE = {"random", "secrets"}
WORLD = {"os", "io", "pathlib", "tempfile", "socket", "ssl", "asyncio", "threading", "subprocess", "open"}
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "torch.load", "torch.save"}
BANNED = {"core": CLOCK | CHANCE | WORLD, "protocol": CLOCK | CHANCE | WORLD | {"torch", "numpy"}}

TORCH_FREE = ["protocol.learner", "protocol.syncer", "runtime.client", "ipc.channel"]
TORCH_FREE += [f"runtime.{path.stem}" for path in SRC.glob("farflung/runtime/sidecar*.py")]


def imports(tree: ast.AST) -> set[str]:
    """Every name imported anywhere in a module: ``from a import b`` gives ``a.b``."""
    plain = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    return plain | {f"{'.' * n.level}{n.module or ''}.{a.name}" for n in froms for a in n.names}


def reads(tree: ast.AST) -> set[str]:
    """``open`` and ``a.b``: the builtin and every attribute that a module reads."""
    nodes = [
        n for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Load)
    ]
    return {text for n in nodes if (text := ast.unparse(n)) == "open" or "." in text}


def problems(path: str, source: str) -> list[str]:
    """What a file of the package does against the rules; ``path`` is relative to src."""
    part = Path(path).with_suffix("").parts[1].replace("__init__", "farflung")
    if part not in FLOOR:
        return [f"{path}: {part!r} has no floor; give it one here and in docs/design.md"]
    tree, floor, found = ast.parse(source), FLOOR[part], []
    banned = PICKLES | BANNED.get(part, set())
    for name in sorted(imports(tree)):
        package, _, rest = name.partition(".")
        target = rest.split(".")[0] if rest.split(".")[0] in FLOOR else "farflung"
        if not package:
            found.append(f"{path} imports {name}: write absolute imports")
        elif (
            package == "farflung" and target != part and floor < FLOOR["farflung"] and FLOOR[target] >= floor
        ):
            found.append(
                f"{path} (floor {floor}) imports {name} (floor {FLOOR[target]}): imports only go down"
            )
        elif package in banned:
            found.append(f"{path} (floor {floor}) imports {name}: not in {part}/")
    found += [f"{path} (floor {floor}) uses {name}: not in {part}/" for name in sorted(reads(tree) & banned)]
    return found + [
        f"{path} imports {name}: no pickle" for name in sorted(imports(tree) & banned) if "." in name
    ]


def test_imports_only_go_down_and_what_decides_does_no_io() -> None:
    files = sorted(SRC.glob("farflung/**/*.py"))
    found = [p for file in files for p in problems(str(file.relative_to(SRC)), file.read_text())]
    assert len(files) > 50
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("core/a.py", "import farflung.engine.hub", "(floor 1) imports farflung.engine.hub (floor 4)"),
        ("engine/a.py", "from farflung.train import base", "imports farflung.train.base (floor 4)"),
        ("report/a.py", "from farflung import Learner", "imports farflung.Learner (floor 8)"),
        ("core/a.py", "def f():\n    from time import sleep", "imports time.sleep: not in core/"),
        ("protocol/a.py", "import torch.nn", "imports torch.nn: not in protocol/"),
        ("protocol/a.py", "x = open('file')", "uses open: not in protocol/"),
        ("train/a.py", "import torch\nx = torch.load('file')", "uses torch.load"),
        ("train/a.py", "from torch import load", "imports torch.load: no pickle"),
        ("train/a.py", "from . import base", "write absolute imports"),
        ("attic.py", "", "'attic' has no floor"),
        ("report/a.py", "from farflung import tape, units\nimport time", None),
        ("train/a.py", "import safetensors.torch\nx = safetensors.torch.load(b'')", None),
        ("cli.py", "from farflung.bench import merge", None),
    ],
)
def test_the_rules_can_be_broken_and_kept(path: str, source: str, wrong: str | None) -> None:
    found = "\n".join(problems(f"farflung/{path}", source))
    assert wrong in found if wrong else not found


@pytest.mark.parametrize("module", TORCH_FREE)
def test_a_sidecar_runs_without_torch(module: str) -> None:
    code = f"import sys, farflung.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
