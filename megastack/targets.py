"""Classes and functions that a configuration names by dotted path: ``{_target_: my.file.MyMLP, width: 3}``.

The current folder is on ``sys.path``, also on ranks, so ``my_file.MyMLP`` names a class in ``my_file.py`` of the
current folder. This module does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from megastack.errors import ConfigError, Violation


def import_path(key: str, path: str) -> Callable[..., Any]:
    """Return the class or function with this dotted path.

    Args:
        key: the configuration key of the path, for errors.
        path: module and name, such as ``my.file.MyMLP``.

    Raises:
        ConfigError: the module cannot be imported, or has no callable of this name.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise ConfigError.of([Violation(key, path, "must be a dotted path", (f"my_file.{name or 'name'}",))])
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        rule = f"importing {module_name} failed with {type(error).__name__}: {error}"
        advice = ("a module on sys.path (the current folder is on it)",)
        raise ConfigError.of([Violation(key, path, rule, advice)]) from error
    target = getattr(module, name, None)
    if not callable(target):
        members = vars(module).items()
        own = [n for n, value in members if n[:1] != "_" and getattr(value, "__module__", None) == module_name]
        near = get_close_matches(name, own, 3) or own[:3]
        rule = f"{module_name} has no class or function {name}"
        raise ConfigError.of([Violation(key, path, rule, (" or ".join(near) or "another name",))])
    return target
