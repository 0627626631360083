"""Recipes: one TOML file, every key with a default, every mistake one clear line."""

import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from farflung.chaos.generators import GENERATORS, AnyGenerator, generate
from farflung.chaos.plan import Fault
from farflung.errors import UserError, did_you_mean, field_error

LEARNER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_SEED = 2**63  # of torch's generators
MAX_PORT = 65535

LAB_LEAST = {"latency_s": 0, "jitter": 0, "merge_s": 0, "startup_s": 0, "workers": 0}
LAB_ABOVE_0 = ("step_s", "up_mbps", "down_mbps", "model_bytes")


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the task's data comes from; None is the task's default."""

    path: str | None = None


class Serve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the syncer is reached. Beyond loopback it wants TLS, or an explicit ``insecure = true``."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None  # address that learners dial, when it is not `host`
    insecure: bool = False
    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None  # learners must show a certificate that it signed
    ca: str | None = None  # what learners trust


class SharedUplink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line that the uploads of several learners pass through, one at a time."""

    learners: list[str]
    mbps: float

    def check(self, where: str, learners: Sequence[str]) -> None:
        """Raise UserError, naming `where` it stands, for a line that cannot be."""
        names = f"{where}.learners = {self.learners}"
        for name in self.learners:
            if name not in learners:
                raise UserError(f"{names}: {name!r} is no learner{did_you_mean(name, learners)}")
        if not self.learners or len(set(self.learners)) < len(self.learners):
            raise UserError(f"{names}: must be learners of this run, each once")
        if not 0 < self.mbps < math.inf:
            raise UserError(f"{where}.mbps = {self.mbps}: must be finite and above 0")


class Lab(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `lab` pretends. A list has one entry a learner.

    Args:
        step_s: virtual seconds of a step.
        jitter: relative standard deviation of a step's time.
        latency_s: one way, learner to syncer.
        up_mbps, down_mbps: a learner's bandwidth in Mbit/s; None costs no time.
        shared_uplinks: lines that several learners share.
        merge_s: of a merge at the syncer.
        model_bytes: transfers take as long as if the whole model, in fp32, had so many bytes; None: as it is.
        startup_s: of a learner's process after a kill, beside restart_s.
        workers: processes that compute steps; None takes one a core, 0 computes in the lab's own.
    """

    step_s: float | list[float] = 0.1
    jitter: float = 0.0
    latency_s: float | list[float] = 0.02
    up_mbps: float | list[float] | None = None
    down_mbps: float | list[float] | None = None
    shared_uplinks: list[SharedUplink] = []
    merge_s: float = 0.005
    model_bytes: float | None = None
    startup_s: float = 2.0
    workers: int | None = None

    def check(self, where: str, learners: Sequence[str]) -> None:
        """Raise UserError, naming `where` it stands, for what cannot be pretended."""
        for field in (*LAB_ABOVE_0, *LAB_LEAST):
            value = getattr(self, field)
            here = f"{where}: lab.{field} = {value}"
            if isinstance(value, list) and len(value) != len(learners):
                raise UserError(
                    f"{here}: must be one number, or a list of {len(learners)}: one a learner (num_learners)"
                )
            for one in value if isinstance(value, list) else [value]:
                if one is not None and field in LAB_ABOVE_0 and not 0 < one < math.inf:
                    raise UserError(f"{here}: must be finite and above 0")
                if one is not None and field in LAB_LEAST and not LAB_LEAST[field] <= one < math.inf:
                    raise UserError(f"{here}: must be finite and at least {LAB_LEAST[field]}")
        if self.jitter > 1:
            raise UserError(f"{where}: lab.jitter = {self.jitter}: must be in 0..1")
        for number, uplink in enumerate(self.shared_uplinks):
            uplink.check(f"{where}: lab.shared_uplinks[{number}]", learners)


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run.

    Args:
        method: how learners train together; a name in farflung.methods.
        policy: fields of the method's policy that differ from its defaults.
        task: what is trained: text, text_muon, vision, vision_muon, or package.module:function.
        seed: of weights and data order.
        num_learners: islands.
        scale: size of the model.
        budget_tokens: tokens (of vision: images) of the whole run, over all learners; None: what `steps` take.
        steps: the same budget in steps of each learner.
        batch_size, lr, warmup_steps, eval_batches: of the task; None takes its default.
        pace_s: least seconds of a step, so that timing checks run on half-loaded cores.
        restart_s: pause before a dead island is started again.
        evals: evaluations of the global parameters, evenly over the budget, beside the first and the last.
        threads: torch threads of a learner.
        faults: what is done to whom, and when (farflung.chaos.plan).
        generate: more of it, drawn from a seed (farflung.chaos.generators).
    """

    method: str = "decoupled"
    policy: dict[str, Any] = {}
    task: str = "text"
    seed: int = 0
    num_learners: int = 4
    scale: str = "tiny"
    budget_tokens: int | None = None
    steps: int = 1200
    batch_size: int = 16
    lr: float | None = None
    warmup_steps: int = 60
    eval_batches: int = 20
    pace_s: float = 0.0
    restart_s: float = 1.0
    evals: int = 10
    threads: int = 1
    data: Data = Data()
    serve: Serve = Serve()
    lab: Lab = Lab()
    faults: list[Fault] = []
    generate: list[AnyGenerator] = []

    def learners(self) -> list[str]:
        return [f"learner-{i}" for i in range(self.num_learners)]

    def plan(self) -> list[Fault]:
        """The faults that are given, and those that are drawn."""
        return [*self.faults, *generate(self.generate, self.learners(), self.seed)]


def load_recipe(path: Path | None, settings: list[str]) -> Recipe:
    """Read a recipe and apply ``a.b=c`` settings on top.

    Raises:
        UserError: the file cannot be read, or a key or value is wrong.
    """
    raw = _read(path) if path is not None else {}
    where = str(path) if path is not None else "recipe"
    _read_faults(raw, path.parent if path is not None else Path())
    for setting in settings:
        _set(raw, setting)
    _read_faults(raw, Path())
    return make_recipe(raw, where)


def make_recipe(raw: dict[str, Any], where: str = "recipe") -> Recipe:
    """Check a recipe given as plain values."""
    _check_keys(raw, Recipe, where)
    for table, kind in (("data", Data), ("serve", Serve), ("lab", Lab)):
        if isinstance(raw.get(table), dict):
            _check_keys(raw[table], kind, f"{where}: [{table}]")
    _check_uplinks(raw.get("lab"), where)
    faults = raw.get("faults")
    for number, fault in enumerate(faults if isinstance(faults, list) else [], 1):
        if isinstance(fault, dict):
            _check_keys(fault, Fault, f"{where}: fault {number}")
    _check_generators(raw.get("generate"), where)
    try:
        recipe = msgspec.convert(raw, Recipe)
    except msgspec.ValidationError as error:
        kinds = GENERATORS.values() if "`$.generate" in str(error) else (Recipe, Fault)
        raise UserError(f"{where}: {field_error(error, *kinds)}") from None
    _check_values(recipe, where)
    return recipe


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from None


def _read_faults(raw: dict[str, Any], base: Path) -> None:
    """``faults = "plan.toml"`` names a file with ``[[faults]]``; it lies beside what named it."""
    if isinstance(raw.get("faults"), str):
        path = base / raw["faults"]
        plan = _read(path)
        if list(plan) != ["faults"]:
            raise UserError(f"{path}: a fault plan holds [[faults]] and nothing else")
        raw["faults"] = plan["faults"]


def _set(raw: dict[str, Any], setting: str) -> None:
    """Apply one ``a.b=c``; the value is TOML, or else text."""
    name, equals, text = setting.partition("=")
    if not equals or not name.strip():
        raise UserError(f"--set {setting}: write NAME=VALUE, for example policy.quorum=2")
    try:
        (value,) = tomllib.loads(f"v = {text}").values()
    except ValueError:  # not TOML, or more than one value
        value = text
    *tables, key = name.strip().split(".")
    for table in tables:
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            raise UserError(f"--set {setting}: {table} is not a table")
    raw[key] = value


def _check_keys(raw: dict[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    for key in raw:
        if key not in kind.__struct_fields__:
            raise UserError(f"{where}: unknown key {key!r}{did_you_mean(key, kind.__struct_fields__)}")


def _check_uplinks(lab: Any, where: str) -> None:
    uplinks = lab.get("shared_uplinks") if isinstance(lab, dict) else None
    for number, uplink in enumerate(uplinks if isinstance(uplinks, list) else []):
        if isinstance(uplink, dict):
            _check_keys(uplink, SharedUplink, f"{where}: lab.shared_uplinks[{number}]")


def _check_generators(tables: Any, where: str) -> None:
    for number, table in enumerate(tables if isinstance(tables, list) else [], 1):
        if isinstance(table, dict):
            place, name = f"{where}: generate {number}", table.get("generator")
            if name not in GENERATORS:
                raise UserError(f"{place}: generator = {name!r}{did_you_mean(str(name), GENERATORS)}")
            _check_keys({key: 0 for key in table if key != "generator"}, GENERATORS[name], place)


def _check_values(recipe: Recipe, where: str) -> None:
    for name, least in (
        ("num_learners", 1), ("steps", 1), ("batch_size", 1), ("threads", 1), ("evals", 0), ("pace_s", 0),
        ("restart_s", 0), ("seed", 0), ("eval_batches", 1), ("warmup_steps", 0),
    ):  # fmt: skip
        value = getattr(recipe, name)
        if not least <= value < math.inf:
            raise UserError(f"{where}: {name} = {value}: must be at least {least}")
    if recipe.seed >= MAX_SEED:
        raise UserError(f"{where}: seed = {recipe.seed}: must be below 2^63")
    if recipe.budget_tokens is not None and recipe.budget_tokens < 1:
        raise UserError(f"{where}: budget_tokens = {recipe.budget_tokens}: must be at least 1")
    if not 0 <= recipe.serve.port <= MAX_PORT:
        raise UserError(
            f"{where}: serve.port = {recipe.serve.port}: must be in 0..{MAX_PORT}; 0 takes a free one"
        )
    recipe.lab.check(where, recipe.learners())
    for number, fault in enumerate(recipe.faults, 1):
        fault.check(f"{where}: fault {number}", recipe.learners())
    for number, generator in enumerate(recipe.generate, 1):
        generator.check(f"{where}: generate {number}")
