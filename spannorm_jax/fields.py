"""Types and ranges of dataclass fields, checked: what tyro and JSON let through, and what nobody would mean."""

import functools
import math
import typing
from typing import Any, Literal

from spannorm_jax.errors import UserError, nearest

MOST = 2**31  # no whole number of a configuration is larger


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def matches(value: Any, hint: Any) -> bool:
    """Whether a plain JSON value fits a field's type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple) and all(matches(v, args[0]) for v in value)
    if args:  # a union
        return any(matches(value, a) for a in args)
    if hint is type(None):
        return value is None
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return 'one of ' + ', '.join(map(str, typing.get_args(hint)))
    return getattr(hint, '__name__', str(hint)) if not typing.get_args(hint) else str(hint)


def place(cfg: Any, name: str) -> str:
    """The dotted name of a field of a section: model.layers of a ModelConfig."""
    section = type(cfg).__name__.removesuffix('Config').lower()
    return f'{section}.{name}' if section else name


def takes_float(hint: Any) -> bool:
    return float in (hint, *typing.get_args(hint))


def check_types(cfg: Any) -> None:
    """Raise UserError where a field holds a value that its type does not allow (dataclasses do not check), or a number out of reach."""
    for name, hint in field_types(type(cfg)).items():
        value = getattr(cfg, name)
        check_number(place(cfg, name), value)
        if isinstance(value, int) and not isinstance(value, bool) and takes_float(hint):
            continue  # an int where a float is asked for
        if not matches(value, hint):
            known = [str(a) for a in typing.get_args(hint)] if typing.get_origin(hint) is Literal else []
            hintful = f'; {nearest(str(value), known)}' if known else ''
            raise UserError(f'{place(cfg, name)} = {value!r}: expected {describe(hint)}{hintful}')


def check_number(name: str, value: Any) -> None:
    """Raise UserError where `value`, if it is a number, is not finite or out of reach."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f'{name} = {value}: expected a finite number')
    if isinstance(value, int) and not abs(value) < MOST:
        raise UserError(f'{name} = {repr(value)[:80]}: expected a whole number below 2^31 in size')


def check_range(
    cfg: Any, names: tuple[str, ...], low: float, high: float = math.inf, open_low: bool = False, open_high: bool = False
) -> None:
    """Raise UserError where a field that is set lies outside [low, high], an open end excluded."""
    for name in names:
        value = getattr(cfg, name)
        if value is None or low < value < high or (value == low and not open_low) or (value == high and not open_high):
            continue
        ends = f'{"(" if open_low else "["}{low:g}, {high:g}{")" if open_high or high == math.inf else "]"}'
        raise UserError(f'{place(cfg, name)} = {value!r} is outside {ends}')


def positive(cfg: Any, name: str) -> None:
    value = getattr(cfg, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f'{place(cfg, name)} = {value!r} must be a whole number of at least 1')
