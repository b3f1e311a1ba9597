"""A method's own options, checked against the signature of its recipe: the recipe is the only list of them.

    def gasloc(n: int, *, alpha: float = 1.0, momentum: Literal["local", "mixed", "outer"] = "outer") -> Method: ...

makes `alpha` and `momentum` keys of `[method]`; arguments without a default, and those that are objects, are not options.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gossamer.app.settings.options import unknown_option
from gossamer.app.wording import describe, nearest, show
from gossamer.core.errors import BadInput

_SCALARS = (bool, int, float, str)


def find_recipe(name: str) -> Callable[..., Any]:
    """The recipe of a name in `gossamer.recipes.REGISTRY`, or of a dotted path to one of your own.

    Raises:
        BadInput: no such recipe, or something else that has that path.
    """
    recipes: Mapping[str, Callable[..., Any]] = importlib.import_module("gossamer.recipes").REGISTRY
    if name in recipes:
        return recipes[name]
    module_name, _, attribute = name.replace(":", ".").rpartition(".")
    if not module_name:
        near = nearest(name, recipes)
        hint = f'; did you mean "{near}"?' if near else "."
        raise BadInput(f'method.name = "{name}" is not a method{hint} Known: {", ".join(recipes)}')
    if (here := str(Path.cwd())) not in sys.path:  # the `gossamer` script, unlike `python -m`, does not look in the current folder
        sys.path.append(here)
    try:
        recipe = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever the module does while it is imported
        near = _meant(module_name, attribute)
        hint = f'; did you mean "{near}"?' if near else ""
        raise BadInput(
            f"method.name = {show(name)} cannot be imported ({type(error).__name__}: {error}): give module.function, importable from here"
            + hint
        ) from error
    if not callable(recipe):
        raise BadInput(f'method.name = "{name}" is {show(recipe)}: expected a function that returns a Method')
    _check_takes_setting(name, recipe)
    return recipe


def _meant(module_name: str, attribute: str) -> str | None:
    """What a path that cannot be imported is a mistyped one of: a function of the module, or a module of this folder; None: of nothing."""
    if module := sys.modules.get(module_name):
        near = nearest(attribute, (n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module_name))
        return near and f"{module_name}.{near}"
    if "." in module_name:
        return None
    try:
        near = nearest(module_name, sorted(path.stem for path in Path.cwd().glob("*.py")))
    except OSError:  # a folder that cannot be read
        return None
    return f"{near}.{attribute}" if near and near != module_name else None


def _check_takes_setting(name: str, recipe: Callable[..., Any]) -> None:
    """A recipe's first argument is a setting, by name or by type, and it needs no other: nothing else is called on a configuration's
    word."""
    try:
        parameters = list(inspect.signature(recipe).parameters.values())
        hints = get_type_hints(recipe)
    except Exception as error:
        raise BadInput(f'method.name = "{name}" has no signature that can be read ({error}): expected a function of a setting') from error
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_it = (
        len(needed) == 1
        and needed[0] is parameters[0]
        and needed[0].kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        and (needed[0].name == "setting" or hints.get(needed[0].name) is importlib.import_module("gossamer.recipes").Setting)
    )
    if not takes_it:
        raise BadInput(
            f'method.name = "{name}" is no recipe: it takes ({", ".join(p.name for p in parameters)}); expected a function that takes '
            "a setting first, then options with defaults, and returns a Method"
        )


def known_options(recipe: Callable[..., Any], reserved: Collection[str] = ()) -> dict[str, Any]:
    """The options of a recipe: name -> type, of its arguments that have a default and can be written in a file."""
    hints = get_type_hints(recipe)
    return {
        name: hints.get(name, type(parameter.default))
        for name, parameter in inspect.signature(recipe).parameters.items()
        if parameter.default is not inspect.Parameter.empty and name not in reserved and _writable(hints.get(name, type(parameter.default)))
    }


def check_options(recipe: Callable[..., Any], options: Mapping[str, Any], reserved: Collection[str] = ()) -> dict[str, Any]:
    """`options` as keyword arguments of `recipe`: names known, values of the annotated type (a whole number may stand for a number,
    a list for a tuple).

    Args:
        recipe: returns a method.
        options: from `[method]`, as written.
        reserved: arguments that other sections of the configuration fill.

    Raises:
        BadInput: an unknown option, with the nearest known one, or a value of the wrong kind.

    >>> def recipe(n: int, *, alpha: float = 1.0, form: Literal["a", "b"] = "a") -> None: ...
    >>> check_options(recipe, {"alpha": 2, "form": "b"})
    {'alpha': 2.0, 'form': 'b'}
    """
    known = known_options(recipe, reserved)
    title = getattr(recipe, "__name__", str(recipe))
    checked: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise unknown_option(name, title, known, reserved)
        fits, checked[name] = _convert(known[name], value)
        if not fits:
            hint = nearest(value, _choices(known[name])) if isinstance(value, str) else None
            raise BadInput(
                f"method.{name} = {show(value)}: {title} expects {describe(_written(known[name]))}"
                + (f'; did you mean "{hint}"?' if hint else "")
            )
    return checked


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _writable(annotation: Any) -> bool:
    """True when a TOML value can be of this type (of one member of a union)."""
    return any(
        member in _SCALARS
        or get_origin(member) is Literal
        or (get_origin(member) in (tuple, list) and all(a is Ellipsis or _writable(a) for a in get_args(member)))
        for member in _members(annotation)
    )


def _written(annotation: Any) -> Any:
    """The members of a union that can be written in a file."""
    kept = [m for m in _members(annotation) if _writable(m)]
    return Union[tuple(kept)]  # noqa: UP007


def _choices(annotation: Any) -> list[str]:
    return [a for m in _members(annotation) if get_origin(m) is Literal for a in get_args(m) if isinstance(a, str)]


def _convert(annotation: Any, value: Any) -> tuple[bool, Any]:
    """(True, the value in the annotated type), or (False, None)."""
    for member in _members(annotation):
        origin, args = get_origin(member), get_args(member)
        if origin is Literal and any(value == a and type(value) is type(a) for a in args):
            return True, value
        if member is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return True, value if int in _members(annotation) and isinstance(value, int) else float(value)
        if member in (bool, int, str) and type(value) is member:
            return True, value
        if origin in (tuple, list) and isinstance(value, list | tuple):
            kinds = [args[0]] * len(value) if origin is list or args[-1] is Ellipsis else list(args)
            items = [_convert(kind, item) for kind, item in zip(kinds, value, strict=False)]
            if len(kinds) == len(value) and all(fits for fits, _ in items):
                return True, origin(item for _, item in items)
    return False, None
