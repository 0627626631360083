"""What is to be planned for, from a file: a plan's own TOML, or a recipe, which describes much of it."""

import math
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from farflung.config import build_task, resolve
from farflung.core.traffic import FP32_BYTES
from farflung.core.vectors import describe
from farflung.errors import UserError, did_you_mean
from farflung.plan.candidate import METHOD_NAMES, Candidate
from farflung.plan.setting import Setting
from farflung.recipe import Recipe, load_recipe
from farflung.train.gpt import scale_config

DAY_S = 86_400.0
OWN = ("scale", "model_bytes", "tokens_per_s", "mtbi_days")
"""Keys and options beside the fields of `Setting`: other words for some of them."""
KEYS = (*(f.name for f in fields(Setting)), *OWN)


def read_file(path: Path) -> tuple[dict[str, Any], Candidate | None]:
    """Values for `make_setting`; of a recipe also the choice that it has made.

    Raises:
        UserError: not to be read, not TOML, or a key that neither a plan nor a recipe has.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    recipe_keys = set(Recipe.__struct_fields__) - set(KEYS)
    if not raw.keys() & recipe_keys:
        for key, value in raw.items():
            if key not in KEYS:
                raise UserError(f"{path}: unknown key {key!r}{did_you_mean(key, KEYS)}")
            _check_type(f"{path}: {key}", key, value)
        return raw, None
    return from_recipe(load_recipe(path, []))


def _check_type(where: str, key: str, value: Any) -> None:
    wanted: tuple[type, ...] = (int, float)
    if key == "scale":
        wanted = (str,)
    elif key == "elastic":
        wanted = (bool,)
    elif key in ("islands", "chips"):
        wanted = (int,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and key != "elastic"):
        raise UserError(
            f"{where} = {value!r}: must be {'a number' if float in wanted else wanted[0].__name__}"
        )


def from_recipe(recipe: Recipe) -> tuple[dict[str, Any], Candidate | None]:
    """Learners as islands of one chip; step time, links and the merge as its [lab] has them."""
    lab, config = recipe.lab, resolve(recipe, "plan")
    task = build_task(recipe)
    params = sum(math.prod(spec.shape) for spec in describe(task.build_model()) if spec.kind == "param")
    if lab.model_bytes is not None:
        params = round(lab.model_bytes / FP32_BYTES)
    steps_s = lab.step_s if isinstance(lab.step_s, list) else [lab.step_s]
    usual_s = recipe.pace_s or sorted(steps_s)[(len(steps_s) - 1) // 2]
    found: dict[str, Any] = {
        "params": params, "islands": recipe.num_learners, "step_s": usual_s,
        "slowest": 0.0 if recipe.pace_s else max(0.0, max(steps_s) / usual_s - 1), "jitter": lab.jitter,
        "tokens_per_step": task.num_tokens(next(task.build_batches(0, recipe.num_learners))),
        "budget_tokens": config.budget_tokens, "merge_s": lab.merge_s, "latency_s": _worst(lab.latency_s, max),
    }  # fmt: skip
    for name in ("up_mbps", "down_mbps"):
        value = _worst(getattr(lab, name), min)
        found |= {name: value} if value is not None else {}
    if recipe.method not in METHOD_NAMES:
        return found, None
    return found, Candidate(learners=recipe.num_learners, policy=config.policy, given=True)


def _worst(value: Any, choose: Any) -> Any:
    """The learner that others wait for."""
    if isinstance(value, list):
        known = [x for x in value if x is not None]
        return choose(known) if known else None
    return value


def make_setting(values: dict[str, Any]) -> Setting:
    """A setting from a file's values and the options that override them.

    Raises:
        UserError: what is needed is missing, said twice, or cannot be.

    >>> make_setting({"model_bytes": 4e9, "tokens_per_s": 5e4, "tokens_per_step": 1e5}).step_s
    2.0
    """
    given = dict(values)
    _one_of(given, "params", "scale", "model_bytes")
    scale, model_bytes = given.pop("scale", None), given.pop("model_bytes", None)
    if scale is not None:
        given["params"] = _params_of(scale)
    if model_bytes is not None:
        given["params"] = model_bytes / FP32_BYTES
    if "params" not in given:
        raise UserError("params: give the model's parameters (--params), or --scale, or --model-bytes")
    rate = given.pop("tokens_per_s", None)
    if rate is not None:
        if not rate > 0:
            raise UserError(f"tokens_per_s = {rate}: must be above 0")
        if "step_s" in given:
            raise UserError("step_s and tokens_per_s: give one of them")
        given["step_s"] = given.get("tokens_per_step", 1.0) / rate
    days = given.pop("mtbi_days", None)
    if days is not None:
        given["mtbi_s"] = days * DAY_S
    return Setting(**given)


def without(found: dict[str, Any], overriding: dict[str, Any]) -> dict[str, Any]:
    """A file's values but for what an option says in other words.

    >>> without({"params": 1e9, "step_s": 1.0}, {"scale": "tiny", "tokens_per_s": 5.0})
    {}
    """
    words = ({"params", "scale", "model_bytes"}, {"step_s", "tokens_per_s"}, {"mtbi_s", "mtbi_days"})
    gone = set().union(*(same for same in words if same & overriding.keys()))
    return {name: value for name, value in found.items() if name not in gone}


def _one_of(given: dict[str, Any], *names: str) -> None:
    found = [name for name in names if name in given]
    if len(found) > 1:
        raise UserError(f"{' and '.join(found)}: give one of them")


def _params_of(scale: str) -> int:
    from farflung.train.gpt import GPT

    return sum(p.numel() for p in GPT(scale_config(scale)).parameters())
