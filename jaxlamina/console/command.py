"""What all commands have in common: options by their old names, help that can be read, copied and searched,
and errors that name options as a command line has them.

Knows click's commands as typer makes them; nothing of what a command does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# Old name → the one name, which help shows.
OLD_NAMES = {
    "--prefix-caching": "--enable-prefix-caching",
    "--no-prefix-caching": "--no-enable-prefix-caching",
    "--random-input-len": "--input-len",
    "--random-output-len": "--output-len",
}

# Plain help, not boxes: there a long option's name is on a line of its own and never cut, however narrow the
# terminal.
HELP: dict[str, Any] = {
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 110},
}


class Command(TyperCommand):
    """A command that also takes the old names of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)

        def renamed(word: str) -> str:
            name, equals, value = word.partition("=")
            new = OLD_NAMES.get(name, name)
            return f"{new}{equals}{value}" if new in own else word

        return super().parse_args(ctx, [*map(renamed, args[:end]), *args[end:]])

    def get_short_help_str(self, limit: int = 0) -> str:
        """The first sentence, whole."""
        return super().get_short_help_str(limit=1000)


def add(app: typer.Typer, name: str, command: Any) -> None:
    """``command`` as a command of ``app``."""
    app.command(name, cls=Command)(command)


def as_options(text: str, app: typer.Typer, words: Sequence[str]) -> str:
    """An error's text with Python's names as the options of the command that ``words`` call: ``max_tokens=0``
    as ``--max-tokens 0``, ``split=False`` as ``--no-split``, ``best_of=None`` as ``no --best-of``.

    The options of `launch` are keys of a file as well, and so they stay.
    """
    command: Any = typer.main.get_command(app)
    for word in words:
        if not isinstance(command, TyperGroup) or word not in command.commands:
            break
        command = command.commands[word]
    if isinstance(command, TyperGroup) or command.name == "launch":
        return text
    known = {p.name: p for p in command.params if p.opts[0].startswith("--")}
    names = "|".join(sorted(filter(known.get, known), key=len, reverse=True))
    value = r"""=('[^']*'|"[^"]*"|\[[^]]*\]|[^\s,;:)'"]+)"""

    def option(match: re.Match[str]) -> str:
        name, given = match.groups()
        param = known[name]
        on, off = param.opts[0], (*param.secondary_opts, f"no {param.opts[0]}")[0]
        if given is None:
            return on if "_" in name else name  # a word such as "model" may just be one
        if given in ("None", "False"):
            return off if given == "False" else f"no {on}"
        return on if given == "True" else f"{on} {given.strip(chr(39) + chr(34))}"

    said = re.sub(rf"""(?<![\w./'"=-])({names})(?:{value})?(?![\w(=])""", option, text)
    return re.sub(r",? or None\b( \([^)]*\))?", "", said) if said != text else text
