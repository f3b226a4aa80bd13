"""Which tables and figures of which papers there are, and ours beside them.

Knows where each is made; nothing of how it is shown.
"""

from __future__ import annotations

from types import ModuleType

from jaxlamina.errors import UserError
from jaxlamina.planner import lamina_2024, lamina_2025
from jaxlamina.planner.comparison import Reproduction

PAPERS: dict[str, ModuleType] = {"lamina-2024": lamina_2024, "lamina-2025": lamina_2025}


def items(paper: str) -> dict[str, str]:
    """Each item of a paper that is not here yet as "", else what it needs. ``UserError`` for an unknown
    paper."""
    module = _module(paper)
    return {name: "" for name in module.ITEMS} | {name: needs for name, (_, needs) in module.NOT_YET.items()}


def reproduce(paper: str, item: str) -> Reproduction:
    """One table or figure. ``UserError`` for an unknown one, and for one that is not reproduced yet, with
    what it needs."""
    module = _module(paper)
    if item in module.NOT_YET:
        what, needs = module.NOT_YET[item]
        raise UserError(f"{paper} {item} ({what}) is not reproduced yet: it needs {needs}")
    if item not in module.ITEMS:
        raise UserError(f"{paper} has no item {item!r} here; known: {', '.join(items(paper))}")
    found: Reproduction = module.ITEMS[item]()
    return found


def _module(paper: str) -> ModuleType:
    if paper not in PAPERS:
        raise UserError(f"no paper {paper!r} here; known: {', '.join(PAPERS)}")
    return PAPERS[paper]
