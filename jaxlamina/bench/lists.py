"""Options whose text is a list, separated by commas. Knows nothing of what is listed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from jaxlamina.errors import UserError

T = TypeVar("T")
N = TypeVar("N", int, float)


def listed(option: str, text: str, parse: Callable[[str], T], what: str) -> list[T]:
    """Each part as ``parse`` makes it, each once, in the order given. ``UserError`` that parts must be
    ``what``, where ``parse`` raises ``ValueError``."""
    try:
        return list(dict.fromkeys(parse(part) for part in text.split(",")))
    except ValueError:
        raise UserError(f"{option} {text!r} must be {what}") from None


def number(kind: type[N], is_right: Callable[[N], bool]) -> Callable[[str], N]:
    """For `listed`: numbers that are right."""

    def parse(text: str) -> N:
        value = kind(text)
        if not is_right(value):
            raise ValueError(text)
        return value

    return parse


def whole_numbers(option: str, text: str, least: int = 1) -> list[int]:
    """From "2,4,8", of at least ``least``."""
    what = f"whole numbers of at least {least} separated by commas, e.g. {least},8,32"
    return listed(option, text, number(int, lambda n: n >= least), what)


def pair(text: str) -> tuple[int, int]:
    """For `listed`: (64, 4096) from "64x4096", two numbers of at least 1."""
    first, second = map(number(int, lambda n: n >= 1), text.lower().split("x"))
    return first, second


def named(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Names, each once, in the order given. ``UserError`` for one that is not ``known``."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise UserError(f"{option}: {name!r} is not one of {', '.join(known)}")
    return names
