"""Tasks by name: the built-in ones, or ``package.module:function`` for one of your own."""

import importlib
from collections.abc import Callable

from farflung.errors import UserError, did_you_mean
from farflung.train.base import Batches, DataConfig, Task, TaskConfig
from farflung.train.muon import text_muon, vision_muon
from farflung.train.text_task import text_task
from farflung.train.vision_task import vision_task

__all__ = ["TASKS", "Batches", "DataConfig", "Task", "TaskConfig", "load_task"]

TASKS: dict[str, Callable[[TaskConfig], Task]] = {
    "text": text_task,
    "text_muon": text_muon,
    "vision": vision_task,
    "vision_muon": vision_muon,
}


def load_task(name: str, config: TaskConfig) -> Task:
    """Build a task by its name in TASKS, or by ``package.module:function`` (TaskConfig -> Task).

    UserError: unknown name, a module that does not import, no such function, or a result that is no Task.
    What the function itself raises passes through.
    """
    build = _import_function(name) if ":" in name else TASKS.get(name)
    if build is None:
        raise UserError(
            f"task = {name!r}: unknown{did_you_mean(name, TASKS)}; write package.module:function for your own"
        )
    task = build(config)
    if not isinstance(task, Task):
        raise UserError(
            f"task = {name!r}: the function returned {type(task).__name__}: return a farflung.train.task.Task"
        )
    return task


def _import_function(name: str) -> Callable[[TaskConfig], Task]:
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does while it is imported
        raise UserError(
            f"task = {name!r}: importing {module_name!r} failed ({type(error).__name__}: {error}): "
            "check the name; its folder must be the one you start from, or on PYTHONPATH"
        ) from error
    function: Callable[[TaskConfig], Task] | None = getattr(module, function_name, None)
    if function is None or not callable(function):
        hint = did_you_mean(function_name, [n for n in vars(module) if not n.startswith("_")])
        raise UserError(f"task = {name!r}: {module_name} has no function {function_name!r}{hint}")
    return function
