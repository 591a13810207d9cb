"""``rdmacm completion``: scripts that let shells complete command lines, made from the parsers of the commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rdmacm.tools.commands import COMMANDS
from rdmacm.tools.output import PROGRAM, Page, Parser, help_of, write

PAGE = Page(
    command="completion",
    summary=COMMANDS["completion"],
    description="""
        Writes a script that lets a shell complete commands, options and their values. Packages install it, and pip
        installs it into an environment, whose directory share/ shells do not read unless XDG_DATA_DIRS (bash, fish) or
        fpath (zsh) names it; the examples are for one user.
    """,
    examples=(
        ("rdmacm completion bash > ~/.local/share/bash-completion/completions/rdmacm", "For bash-completion."),
        ("rdmacm completion zsh > ~/.zfunc/_rdmacm", "For zsh, with ~/.zfunc in fpath."),
        ("rdmacm completion fish > ~/.config/fish/completions/rdmacm.fish", "For fish."),
    ),
    see_also="bash(1), zshcompsys(1), fish(1), rdmacm(1)",
)

#: What the values of an option are, by its metavar: names of files, of hosts, or of programs.
_FILES, _HOSTS, _PROGRAMS = "files", "hosts", "programs"
_KINDS = {
    "FILE": _FILES,
    "PATH": _FILES,
    "CAPTURE": _FILES,
    "HOST": _HOSTS,
    "PEER": _HOSTS,
    "NODE": _HOSTS,
    "ADDR": _HOSTS,
    "ADDRESS": _HOSTS,
    "PROGRAM": _PROGRAMS,
}


@dataclass(frozen=True, slots=True)
class _Argument:
    """An option with its names, or an operand without."""

    names: tuple[str, ...]
    what: str
    #: Whether a value follows; which ones, or what kind they are of.
    has_value: bool
    choices: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True)
class _Command:
    """A command; without a name the program itself."""

    name: str
    summary: str
    arguments: tuple[_Argument, ...]

    @property
    def options(self) -> list[_Argument]:
        """The arguments that are no operands."""
        return [each for each in self.arguments if each.names]

    @property
    def operands(self) -> list[_Argument]:
        """The arguments that are no options."""
        return [each for each in self.arguments if not each.names]


def add_arguments(parser: Parser) -> None:
    """Add the arguments of ``rdmacm completion``."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"The shell: {', '.join(SHELLS)}.")


def run(args: argparse.Namespace) -> int:
    """Write the script."""
    write(script(args.shell))
    return 0


def script(shell: str) -> str:
    """The script for a shell."""
    # Not before: the main module imports this one.
    from importlib import import_module

    main = import_module("rdmacm.tools.main")
    found = [_Command("", "", _arguments(main.program_parser(with_commands=False))[1:])]
    for name in COMMANDS:
        tool = import_module(f"rdmacm.tools.{name}")
        found.append(_Command(name, tool.PAGE.summary, _arguments(main.parser_of(tool))))
    return SHELLS[shell](found)


def _arguments(parser: Parser) -> tuple[_Argument, ...]:
    found = []
    for action in parser.arguments:
        choices = tuple(map(str, action.choices or ()))
        if action.dest == "provider":
            choices = ("auto", "kernel", "soft")
        kind = "" if choices else _KINDS.get(str(action.metavar), "")
        what = re.split(r"\.\s|[:;(]", help_of(action) + " ")[0].strip().rstrip(".")
        found.append(_Argument(tuple(action.option_strings), what, action.nargs != 0, choices, kind))
    return tuple(found)


def _names(arguments: Iterable[_Argument]) -> list[str]:
    return [name for argument in arguments for name in argument.names]


# -- bash ----------------------------------------------------------------------------------------------------

_BASH_KINDS = {_FILES: "compgen -f", _HOSTS: "compgen -A hostname", _PROGRAMS: "compgen -c"}


def _bash(commands: list[_Command]) -> str:
    program, *others = commands
    lines = [
        f"# Completion of {PROGRAM} for bash: {PROGRAM} completion bash",
        f"_{PROGRAM}() {{",
        '    local current=$2 previous=$3 command="" words=""',
        "    local -i at",
        "    COMPREPLY=()",
        "    for ((at = 1; at < COMP_CWORD; at++)); do",
        "        case ${COMP_WORDS[at]} in",
        "        --pcap) at+=1 ;;",
        "        -*) ;;",
        "        *)",
        "            command=${COMP_WORDS[at]}",
        "            break",
        "            ;;",
        "        esac",
        "    done",
        "    case $command in",
        '    "")',
        f'        words="{" ".join([*(each.name for each in others), *_names(program.options), "--pcap"])}"',
        '        [[ $previous == --pcap ]] && words="" && mapfile -t COMPREPLY < <(compgen -f -- "$current")',
        "        ;;",
    ]
    for command in others:
        lines += [f"    {command.name})", *_bash_values(command)]
        words = [word for operand in command.operands for word in operand.choices] + _names(command.options)
        lines.append(f'        words="{" ".join(words)}"')
        for kind in sorted({operand.kind for operand in command.operands if operand.kind}):
            lines.append(f'        [[ $current != -* ]] && mapfile -t COMPREPLY < <({_BASH_KINDS[kind]} -- "$current")')
        lines.append("        ;;")
    lines += [
        "    esac",
        '    mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -W "$words" -- "$current")',
        "}",
        f"complete -o filenames -F _{PROGRAM} {PROGRAM}",
    ]
    return "\n".join(lines) + "\n"


def _bash_values(command: _Command) -> list[str]:
    """The values of the options of a command."""
    lines = ["        case $previous in"]
    for option in command.options:
        if option.has_value:
            source = f'compgen -W "{" ".join(option.choices)}"' if option.choices else _BASH_KINDS.get(option.kind)
            lines.append(f"        {' | '.join(option.names)})")
            if source is not None:
                lines.append(f'            mapfile -t COMPREPLY < <({source} -- "$current")')
            lines += ["            return", "            ;;"]
    return [*lines, "        esac"] if len(lines) > 1 else []


# -- zsh -----------------------------------------------------------------------------------------------------

_ZSH_KINDS = {_FILES: "_files", _HOSTS: "_hosts", _PROGRAMS: "_normal"}


def _zsh(commands: list[_Command]) -> str:
    program, *others = commands
    lines = [
        f"#compdef {PROGRAM}",
        f"# Completion of {PROGRAM} for zsh: {PROGRAM} completion zsh",
        f"_{PROGRAM}() {{",
        "    local curcontext=$curcontext state line",
        "    local -a commands",
        "    commands=(",
        *(f"        {_quoted(f'{each.name}:{each.summary}')}" for each in others),
        "    )",
        "    _arguments -C \\",
        *(f"        {spec} \\" for option in program.options for spec in _zsh_specs(option)),
        "        '--pcap[capture packets]:file:_files' \\",
        "        '1:command:->command' \\",
        "        '*::argument:->argument'",
        "    case $state in",
        "    command) _describe command commands ;;",
        "    argument)",
        "        case $line[1] in",
    ]
    for command in others:
        specs = [spec for argument in command.arguments for spec in _zsh_specs(argument)]
        lines += [f"        {command.name})", "            _arguments \\"]
        lines += [f"                {spec} \\" for spec in specs[:-1]] + [
            f"                {specs[-1]}",
            "            ;;",
        ]
    lines += ["        esac", "        ;;", "    esac", "}", f'_{PROGRAM} "$@"']
    return "\n".join(lines) + "\n"


def _zsh_specs(argument: _Argument) -> list[str]:
    what = re.sub(r"([\[\]:\\])", r"\\\1", argument.what)
    action = f"({' '.join(argument.choices)})" if argument.choices else _ZSH_KINDS.get(argument.kind, " ")
    if not argument.names:
        return [_quoted(f"*:{what}:{action}")]
    value = f":value:{action}" if argument.has_value else ""
    return [_quoted(f"{name}[{what}]{value}") for name in argument.names]


# -- fish ----------------------------------------------------------------------------------------------------

_FISH_KINDS = {_FILES: "", _HOSTS: " -a '(__fish_print_hostnames)'", _PROGRAMS: " -a '(__fish_complete_command)'"}


def _fish(commands: list[_Command]) -> str:
    program, *others = commands
    names = " ".join(each.name for each in others)
    at_first = f"-n 'not __fish_seen_subcommand_from {names}'"
    lines = [
        f"# Completion of {PROGRAM} for fish: {PROGRAM} completion fish",
        f"complete -c {PROGRAM} -f",
        *(f"complete -c {PROGRAM} {at_first} -a {each.name} -d {_fish_text(each.summary)}" for each in others),
        *(f"complete -c {PROGRAM} {at_first}{_fish_option(option)}" for option in program.options),
    ]
    for command in others:
        seen = f"complete -c {PROGRAM} -n '__fish_seen_subcommand_from {command.name}'"
        lines += [f"{seen}{_fish_option(option)}" for option in command.options]
        for operand in command.operands:
            words = f" -a {_fish_text(' '.join(operand.choices))}" if operand.choices else ""
            force = " -F" if operand.kind == _FILES else ""
            if words or operand.kind:
                lines.append(f"{seen}{force}{words or _FISH_KINDS[operand.kind]}")
    return "\n".join(lines) + "\n"


def _fish_option(option: _Argument) -> str:
    names = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in option.names)
    value = ""
    if option.has_value:
        words = f" -a {_fish_text(' '.join(option.choices))}" if option.choices else _FISH_KINDS.get(option.kind, "")
        value = f" -r -F{words}" if option.kind == _FILES else f" -x{words}"
    return f"{names}{value} -d {_fish_text(option.what)}"


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _quoted(text: str) -> str:
    """For zsh, whose quotes have no escapes."""
    return "'" + text.replace("'", "'\\''") + "'"


#: What makes the script of each shell.
SHELLS: dict[str, Callable[[list[_Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
