"""``boundary-bundle completion``: a completion script for a shell, made from the parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .common import file_name

SHELLS = ("bash", "zsh", "fish")


@dataclass
class Option:
    """An option, or a positional argument when it has no ``names``."""

    names: list[str]
    takes_value: bool
    choices: list[str]
    #: 'file', 'folder' or '' for a value that no shell can know.
    kind: str
    help: str
    repeats: bool


@dataclass
class Command:
    name: str
    help: str
    options: list[Option] = field(default_factory=list)


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="write a completion script for a shell",
        description="Write a script to standard output that completes commands, options and their values. Exit "
        "status 0: written.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    parser.set_defaults(function=completion)


def completion(options: argparse.Namespace) -> int:
    """The command."""
    from . import _parser

    parser = _parser()
    make = {"bash": bash, "zsh": zsh, "fish": fish}[options.shell]
    print(make(parser.prog, list(commands_of(parser))), end="")
    return 0


def commands_of(parser: argparse.ArgumentParser) -> Iterator[Command]:
    """What there is to complete."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                options = [_option(one) for one in command._actions if one.help != argparse.SUPPRESS]
                yield Command(name, helps.get(name, ""), options)


def _option(action: argparse.Action) -> Option:
    kind = ""
    if action.type is file_name:
        kind = "folder" if action.metavar == "DIR" else "file"
    elif action.nargs == argparse.REMAINDER or action.metavar == "COMMAND":
        kind = "file"
    return Option(
        list(action.option_strings),
        action.nargs != 0,
        [str(choice) for choice in action.choices or ()],
        kind,
        (action.help or "").replace("%%", "%"),
        action.nargs in ("*", "+", argparse.REMAINDER),
    )


def _words(option: Option) -> list[str]:
    return [name for name in option.names if name != "-h"]


def bash(prog: str, commands: list[Command]) -> str:
    """For bash 4 and later, with or without the bash-completion package."""
    name = re.sub(r"\W", "_", prog)
    cases = []
    for command in commands:
        values = []
        for option in command.options:
            if option.names and option.takes_value:
                values.append(f"                {'|'.join(option.names)}) {_bash_values(option)}; return ;;")
        words = " ".join(word for option in command.options for word in _words(option))
        rest = [option for option in command.options if not option.names]
        positional = _bash_values(rest[0]) if rest else ":"
        cases.append(
            f"        {command.name})\n"
            '            case "$previous" in\n' + "".join(f"{line}\n" for line in values) + "            esac\n"
            '            if [[ "$word" == -* ]]; then\n'
            f'                COMPREPLY=($(compgen -W "{words}" -- "$word"))\n'
            "            else\n"
            f"                {positional}\n"
            "            fi ;;\n"
        )
    names = " ".join(command.name for command in commands)
    return (
        f"# bash completion for {prog}\n"
        f"_{name}() {{\n"
        '    local word="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"\n'
        "    COMPREPLY=()\n"
        '    if [[ "$COMP_CWORD" -eq 1 ]]; then\n'
        f'        COMPREPLY=($(compgen -W "{names} --help" -- "$word"))\n'
        "        return\n"
        "    fi\n"
        '    case "${COMP_WORDS[1]}" in\n' + "".join(cases) + "    esac\n"
        "}\n"
        f"complete -o filenames -F _{name} {prog}\n"
    )


def _bash_values(option: Option) -> str:
    if option.choices:
        return f'COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$word"))'
    if not option.kind:
        return ":"
    # A line a name: file names have blanks in them.
    flag = "-d" if option.kind == "folder" else "-f"
    return f'mapfile -t COMPREPLY < <(compgen {flag} -- "$word")'


def zsh(prog: str, commands: list[Command]) -> str:
    """For zsh's own completion system."""
    name = re.sub(r"\W", "_", prog)
    cases = []
    for command in commands:
        specs = []
        for option in command.options:
            text = _zsh_text(option.help)
            value = f":value:{_zsh_values(option)}" if option.takes_value else ""
            if not option.names:
                specs.append(f"'{'*' if option.repeats else ''}:{text}:{_zsh_values(option)}'")
            for word in option.names:
                specs.append(f"'{word}[{text}]{value}'")
        joined = " \\\n                ".join(specs)
        cases.append(f"            {command.name})\n                _arguments -s \\\n                {joined} ;;\n")
    described = "".join(f"        '{command.name}:{_zsh_text(command.help)}'\n" for command in commands)
    return (
        f"#compdef {prog}\n"
        f"_{name}() {{\n"
        "    local state\n"
        "    local -a commands\n"
        f"    commands=(\n{described}    )\n"
        "    _arguments -C '--help[show the manual]' '1:command:->command' '*::argument:->argument'\n"
        '    case "$state" in\n'
        "        command) _describe command commands ;;\n"
        '        argument) case "$words[1]" in\n' + "".join(cases) + "        esac ;;\n"
        "    esac\n"
        "}\n"
        f'if [[ "$funcstack[1]" == "_{prog}" ]]; then _{name} "$@"; else compdef _{name} {prog}; fi\n'
    )


def _zsh_text(text: str) -> str:
    return re.sub(r"([\[\]:\\])", r"\\\1", text).replace("'", "'\\''")


def _zsh_values(option: Option) -> str:
    if option.choices:
        return f"({' '.join(option.choices)})"
    return {"file": "_files", "folder": "_files -/", "": " "}[option.kind]


def fish(prog: str, commands: list[Command]) -> str:
    """For fish 3 and later."""
    lines = [f"# fish completion for {prog}", f"complete -c {prog} -f"]
    for command in commands:
        first = f"complete -c {prog} -n __fish_use_subcommand -a {command.name}"
        lines.append(f"{first} -d {_fish_text(command.help)}")
        under = f"complete -c {prog} -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            words = [under]
            for word in option.names:
                words.append(f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}")
            if option.choices:
                words.append(f"{'-x ' if option.names else ''}-a {_fish_text(' '.join(option.choices))}")
            elif option.kind == "folder":
                words.append("-x -a '(__fish_complete_directories)'")
            elif option.kind == "file":
                words.append("-r -F" if option.names else "-F")
            elif option.takes_value:
                words.append("-x")
            if option.names or option.choices or option.kind:
                lines.append(f"{' '.join(words)} -d {_fish_text(option.help)}")
    return "\n".join(lines) + "\n"


def _fish_text(text: str) -> str:
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"
