"""Read the commands of a shell script, as bash would come to them, without running anything.

Variables, arrays, here-documents and functions that the script itself sets are put in. Branches and loops are followed
where their conditions are about known variables. Where only bash could know a condition, what the branch sets is
`Unknown`, and a command in it is `unsure`.
"""

from __future__ import annotations

import fnmatch
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from getopt import GetoptError, gnu_getopt
from itertools import takewhile
from pathlib import Path

from rlexp.base.secrets import HIDDEN, is_secret, masked
from rlexp.convert.shell_words import ARRAY, ASSIGNMENT, Expansion, ShellTokens, TooMuch, Unknown, joined, like

Status = tuple[bool | None, bool | None]  # whether a command succeeds, for && and ||, and for `if`
SUCCESS: Status = (True, None)  # of a program: most succeed
DECLARES = ("export", "readonly", "declare", "typeset", "local")
SKIPPED = ("then", "else", "elif", "do", "}", "fi", "done", "esac", "time", "exec")  # where a command begins
ASKING = ("grep", "command", "which", "type", "curl", "pgrep", "nc", "ping", "diff", "cmp", "read", "python", "python3")
SILENT = ("echo", "printf", "trap", "alias")
FUNCTION = re.compile(r"(?:function\s+([^\s(){}]+)[ \t]*(?:\([ \t]*\))?|([\w-]+)[ \t]*\([ \t]*\))\s*\{")
ELEMENT = re.compile(r"([A-Za-z_]\w*)\[")
GROUP = re.compile(r"\{(?=\s)|\(+")
ARITHMETIC = re.compile(r"\(\((.*?)\)\)(?!\))", re.S)
MOST_WITHIN = 8  # functions and quoted scripts in each other
MOST_ROUNDS = 200  # of all loops of a script
MOST_COMMANDS = 20_000  # that are followed
MOST_IN_A_TEST = 200  # words
ENDS = "exit"  # the last command of a script that ends before its text does
TRAINER = re.compile(r"openrlhf\.cli|\btrl\b|\bswift\b|\bllamafactory-cli\b|\baxolotl\b|\btrain_\w+\.py")
NUMERIC = {"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
           "-ge": operator.ge}  # fmt: skip


@dataclass(frozen=True)
class Command:
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)  # variables that the script gives to this command
    around: list[str] = field(default_factory=list)  # words of the command that has this one in quotes: srun bash -c
    line: int = 0
    unsure: str = ""  # the line that decides whether it runs, where that is not known
    loop: str = ""  # the variable of the loop that runs it several times
    used: frozenset[str] = frozenset()  # variables of the environment that the script reads too
    sourced: tuple[str, ...] = ()  # files that the script has read with `source` before; they are not read here


@dataclass(frozen=True)
class ScriptCall:
    """How a script is called, as far as it is told."""

    arguments: list[str] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)  # whose values hold, whatever the script sets
    line: int | None = None  # of the command that is meant


def commands(text: str, file: Path | None = None, call: ScriptCall | None = None) -> Iterator[Command]:
    """Yield the commands of a script in their order, those inside quotes (`bash -c "…"`) in place of the word."""
    call = call or ScriptCall()
    own = {name: [str(file)] for name in ("0", "BASH_SOURCE") if file is not None}
    given = {name: [value] for name, value in call.variables.items()}
    script = _Script(text, {"HOME": [str(Path.home())], "PWD": [str(Path.cwd())], **own, **given}, call)
    script.block()
    yield from script.commands
    if script.left:
        yield Command([ENDS], line=script.line)


def _not(holds: bool | None) -> bool | None:
    return None if holds is None else not holds


class _Script(Expansion):
    """Follows a script. What does not run is read too, but not followed; a loop and a function are read each time.
    A condition holds, does not hold, or is None: only bash knows."""

    def __init__(self, text: str, known: dict[str, list[str]], call: ScriptCall) -> None:
        super().__init__(known, call.arguments)
        self.tokens, self.given = ShellTokens(text), call.variables
        self.commands: list[Command] = []  # that have been met
        self.functions: dict[str, ShellTokens] = {}
        self.exported: dict[str, str] = {}
        self.sourced: dict[str, None] = {}  # a set in the order of the script
        self.rounds, self.steps = MOST_ROUNDS, MOST_COMMANDS
        self.line, self.source = 0, ""  # of the command at hand
        self.doubt = ""  # the line that decides whether it runs, where that is not known
        self.status: Status = SUCCESS  # of the last command
        self.left = ""  # the command that leaves a loop, a function or the script
        # What belongs to the function or the quoted script at hand:
        self.depth = 0
        self.prefix: dict[str, str] = {}  # variables given to it
        self.hidden: dict[str, list[str] | None] = {}  # values that it hides by `local`
        self.loops: list[str] = []  # around the command at hand: their variables

    @property
    def next(self) -> str:
        return self.tokens.token.text

    def block(self, *ends: str, runs: bool = True) -> None:
        """Follow commands, with && and || between them, up to one of these words or the end."""
        outer, operator, negated = self.doubt, "", False
        chained: bool | None = True
        while self.next not in ("", *ends):
            if self.tokens.token.operator and self.next != "(":
                text = self.tokens.take().text
                operator = operator if text == "\n" else text
                continue
            if self.next == "!" or self.next in SKIPPED:
                negated ^= self.tokens.take().text == "!"
                continue
            if operator in ("&&", "||"):
                chained = self.status[0] if operator == "&&" else _not(self.status[0])
                self._doubt(chained)
            elif operator not in ("|", "|&"):
                chained, self.doubt = True, outer
            follows = runs and chained is not False and not self.left
            self._command(follows)
            if follows and chained is None:
                self.status = None, None
            elif follows and negated:
                self.status, self.source = (_not(self.status[1]), _not(self.status[1])), f"! {self.source}"
            operator, negated = "", False
        self.doubt = outer

    def _through(self, end: str, runs: bool) -> None:
        """Follow commands up to this word, and go behind it."""
        self.block(end, runs=runs)
        self.tokens.take()

    def _command(self, runs: bool) -> None:
        tokens, line = self.tokens, self.tokens.token.line
        if (function := tokens.take_match(FUNCTION)) is not None:
            if runs:
                self.functions[function[1] or function[2]] = copy(tokens)
            self._through("}", runs=False)
        elif (arithmetic := tokens.take_match(ARITHMETIC)) is not None:
            if runs:
                self.line, self.source, result = line, arithmetic[0], self._counted(arithmetic[1])
                self.status = (None, None) if result is None else (bool(result), bool(result))
        elif (group := tokens.take_match(GROUP)) is not None:
            if group[0] == "{":
                self._through("}", runs)
            else:  # what is in parentheses changes no variable outside, and leaves nothing there
                outer = {**self.known}, {**self.exported}, self.args, self.folder
                self._through(")", runs)
                self.known, self.exported, self.args, self.folder = outer
                self.left = ""
        elif self.next == "if":
            self._if(runs)
        elif self.next in ("while", "until"):
            self._while(runs)
        elif self.next == "for":
            self._for(runs)
        elif self.next == "case":
            self._case(runs)
        elif (words := tokens.take_command()) and runs:
            self.line = line
            self._simple(words)

    def _counted(self, terms: str) -> int | None:
        """Return the value of (( … )), after what it does to a variable: N++, N += 2, N = M * 2."""
        step = re.fullmatch(r"\s*(?:(\+\+|--)\s*)?([A-Za-z_]\w*)\s*(?:(\+\+|--)|([-+*/%]?)=(?!=)(.*))?\s*", terms, re.S)
        if step is None or not (step[1] or step[3] or step[5]):
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))", terms):
                self._forget(name)
            return self.result(terms)
        name, sign = step[2], step[1] or step[3]
        before = self.result(name)
        after = self.result(f"{name} {sign[0]} 1" if sign else f"{name} {step[4]} ({step[5]})" if step[4] else step[5])
        if after is None:
            self._forget(name)
        else:
            self.assign(name, [str(after)])
        return before if step[3] else after

    def _doubt(self, holds: bool | None, keyword: str = "") -> None:
        """Remember the command at hand if it decides whether the next ones run, and only bash knows how."""
        if holds is None and not self.doubt:
            self.doubt = f"line {self.line}, `{keyword}{self.source}`"

    # ---- branches and loops ----

    def _condition(self, end: str, runs: bool) -> bool | None:
        """Follow the keyword and the commands of a condition. Return whether it holds."""
        keyword = self.tokens.take().text
        if keyword == "else":
            return runs
        self._through(end, runs)
        if not runs:
            return False
        self._doubt(self.status[1], f"{keyword} ")
        return _not(self.status[1]) if keyword == "until" else self.status[1]

    def _if(self, runs: bool) -> None:
        outer = self.doubt
        while self.next in ("if", "elif", "else"):
            holds = self._condition("then", runs)
            self.block("elif", "else", "fi", runs=holds is not False)
            runs = runs and holds is not True
        self.tokens.take()
        self.doubt, self.status = outer, SUCCESS if runs else self.status

    def _case(self, runs: bool) -> None:
        outer, line = self.doubt, self.tokens.take().line
        subject, _ = self.tokens.take().text, self.tokens.take()
        while self.next not in ("", "esac"):
            patterns = list[str]()
            while self.next not in ("", ")"):
                token = self.tokens.take()
                patterns += [] if token.operator else [token.text]
            self.tokens.take()
            holds = self._fits(line, subject, patterns) if runs else False
            self.block(";;", ";&", ";;&", "esac", runs=holds is not False)
            runs = runs and holds is not True
            while self.next in (";;", ";&", ";;&", "\n"):
                self.tokens.take()
        self.tokens.take()
        self.doubt, self.status = outer, SUCCESS if runs else self.status

    def _fits(self, line: int, subject: str, patterns: Sequence[str]) -> bool | None:
        text, *texts = map(self.one, (subject, *patterns))
        self.line, self.source = line, shown(["case", subject, "in"])
        known = texts == ["*"] or not any(isinstance(each, Unknown) for each in (text, *texts))
        holds = any(fnmatch.fnmatchcase(text, each) for each in texts) if known else None
        self._doubt(holds)
        return holds

    def _while(self, runs: bool) -> None:
        """Follow the rounds of `while` or `until`: one if only bash knows how many there are."""
        outer, start, status = self.doubt, copy(self.tokens), SUCCESS if runs else self.status
        again = True
        while again:
            self.tokens = copy(start)
            follows = self._condition("do", runs) is not False
            once = bool(self.doubt) or (start.token.text == "while" and self.source in ("true", ":"))
            again = self._round(follows) and not once
            status = self.status if follows else status
        self.doubt, self.status = outer, status

    def _for(self, runs: bool) -> None:
        line, arithmetic = self.tokens.take().line, self.tokens.take_match(ARITHMETIC)
        header = [arithmetic[0]] if arithmetic else self.tokens.take_command("do")
        self._through("do", runs=False)
        start = copy(self.tokens)
        if not runs or not header:
            self._through("done", runs=False)
            return
        name = re.sub(r"\W*(\w*).*", r"\1", header[0], flags=re.S)
        items = [each for word in header[2:] for each in self.split(word)]
        items = [Unknown.of(each, each) if re.search(r"[*?{]", each) else each for each in items]
        self.line, self.source = line, shown(["for", *header])
        if name in self.given:
            items = [self.given[name]]
        elif self.doubt or header[1:2] != ["in"] or any(isinstance(each, Unknown) for each in items):
            items = [Unknown.of(f"${name}", f"${name}", self.doubt or f"line {line}, `{self.source}`")]
        for item in items:
            self.tokens = copy(start)
            self.known[name] = [item]
            if not self._round(True, name):
                return
        if not items:
            self._through("done", runs=False)

    def _round(self, runs: bool, variable: str = "") -> bool:
        """Follow the commands of a loop once. Return whether another round may follow."""
        self.rounds -= runs
        if self.rounds < 0:
            raise TooMuch(f"its loops take more than {MOST_ROUNDS} rounds")
        self.loops.append(variable)
        self._through("done", runs)
        self.loops.pop()
        left = self.left
        self.left = "" if runs and left in ("break", "continue") else left
        return runs and left in ("", "continue")

    # ---- simple commands ----

    def _simple(self, written: list[str]) -> None:
        """Do what a command does to variables, and keep it if it is a program."""
        assigned = [*takewhile(ASSIGNMENT.match, written)]
        self.steps -= 1
        if self.steps < 0:
            raise TooMuch(f"it runs more than {MOST_COMMANDS:,} commands")
        rest, declares = written[len(assigned) :], ""
        if rest and rest[0] in DECLARES:
            declares, *assigned = rest
            rest = []
        words = (
            [self.one(each) for each in rest] if rest[:1] == ["[["] else [e for each in rest for e in self.split(each)]
        )
        documents = [text if literal else self.filled(text) for text, literal in self.tokens.documents]
        values: Iterable[tuple[str, list[str]]] = map(self._value, assigned)
        values = [*values] if declares else values  # of all before any is set
        prefix = dict(self._assign(each, *value, declares, keep=not rest)
                      for each, value in zip(assigned, values, strict=True))  # fmt: skip
        self.source = shown(written)
        self.status = (None, None) if words and words[0] in ASKING else SUCCESS
        match words:
            case ["true" | "false" | ":" as name, *_]:
                self.status = name != "false", name != "false"
            case ["test", *test] | ["[" | "[[", *test, _]:
                self.status = _holds(test), _holds(test)
            case ["exit" | "return" | "break" | "continue" as name, *_]:
                if not self.doubt and (self.loops or name in ("exit", "return")):
                    self.left = "exit" if name == "return" and not self.depth else name
            case ["eval", *others]:
                self._within(ShellTokens(joined(others, " "), self.line), prefix, self.args)
            case [name, *arguments] if name in self.functions and self.depth < MOST_WITHIN:
                self._within(copy(self.functions[name]), prefix, arguments)
            case [name, *others] if not self._builtin(words, documents) and name not in SILENT:
                self.sourced |= dict.fromkeys(others[:1] if name in ("source", ".") else [])
                self._program(words, prefix)

    def _builtin(self, words: Sequence[str], documents: Sequence[str]) -> bool:
        """Do what a command of bash does to variables, arguments or the folder. Return whether it is one."""
        match words:
            case ["unset", *names]:
                for name in names:
                    self.exported.pop(name, None)
                    self.known.pop(name, None)
                    if (element := ELEMENT.match(name)) is not None:
                        self._forget(element[1])
            case ["let", *terms]:
                for term in terms:
                    self._counted(term)
            case ["cd", folder] if folder != "-" and not isinstance(folder, Unknown):
                known = self.folder is not None and not self.doubt
                self.folder = os.path.abspath(os.path.join(self.folder or "", folder)) if known else None
            case ["cd" | "pushd" | "popd", *_]:
                self.folder = None
            case ["printf", "-v", name, *_]:
                self._forget(name)
            case ["read", *others]:
                self._read(others, documents)
            case ["mapfile" | "readarray", *others]:
                name = next((each for each in others if each and not each.startswith("-")), "MAPFILE")
                self._forget(name, f"line {self.line}, `{self.source}`")
            case ["shift", *count]:
                places = int(count[0]) if count and count[0].isdecimal() else 1
                self.args = None if self.doubt or self.args is None else self.args[places:]
            case ["set", "--", *arguments]:
                self.args = None if self.doubt else arguments
            case _:
                return False
        return True

    def _forget(self, name: str, why: str = "") -> None:
        """Give a variable a value that only bash knows."""
        self.assign(name, [Unknown.of(f"${name}", f"${name}", why)])

    def _read(self, words: Sequence[str], documents: Sequence[str]) -> None:
        """Give the variables of `read` what only bash knows, or the here-document that it reads whole."""
        try:
            _, names = gnu_getopt([*words], "aersSd:i:n:N:p:t:u:")
        except GetoptError:
            names = [word for word in words if not word.startswith("-")]
        for name in names:
            whole = like(documents[-1], documents[-1].strip()) if documents and len(names) == 1 else None
            self.assign(name, [Unknown.of(f"${name}", f"${name}") if whole is None else whole])

    def _value(self, written: str) -> tuple[str, list[str]]:
        """Return an assignment as bash makes it, and the elements of its value."""
        array = ARRAY.fullmatch(written)
        word = self.one(written)
        return word, self.words(array[2]) if array else [like(word, word.partition("=")[2])]

    def _assign(self, written: str, word: str, value: list[str], declares: str, *, keep: bool) -> tuple[str, str]:
        """Return the name and the value of an assignment. If it is one for the script, keep it."""
        name, assigns, _ = word.partition("=")
        name = name.removesuffix("+")
        if declares == "local":
            self.hidden.setdefault(name, self.known.get(name))
        if keep and assigns:
            self.used.discard(name)
            self.assign(name, value, more=word.startswith(f"{name}+"), array=ARRAY.fullmatch(written) is not None)
        if declares == "export" and name in self.known:
            self.exported[name] = joined(self.known[name], " ")
        return name, joined(value, " ")

    def assign(self, name: str, value: list[str], *, more: bool = False, array: bool = False) -> None:
        if name in self.given:
            return
        if (element := ELEMENT.match(name)) is not None:
            name, value = element[1], [Unknown.of(f"${element[1]}", f"${element[1]}")]
        before = self.known.get(name, []) if more else []
        adds = bool(before) and not array
        after = [joined([before[0], value[0]])] if adds else [*before, *value]
        if self.doubt and self.known.get(name) != after:
            unknown = Unknown.of(f"${name}", f"${name}", self.doubt)
            after = [joined([before[0], " ", unknown])] if adds else [*before, unknown]
        self.known[name] = after
        if name in self.exported:
            self.exported[name] = joined(after, " ")

    def _within(self, script: ShellTokens, prefix: dict[str, str], args: list[str] | None) -> None:
        """Follow a function, or a script that is one word of a command."""
        outer = self.tokens, self.line, self.args, self.prefix, self.hidden, self.loops
        self.tokens, self.args, self.prefix, self.hidden, self.loops = script, args, self.prefix | prefix, {}, []
        self.depth += 1
        self.block("}")
        self.left = self.left if self.left == "exit" else ""
        for name, value in self.hidden.items():
            self.known.pop(name, None)
            self.known |= {} if value is None else {name: value}
        self.tokens, self.line, self.args, self.prefix, self.hidden, self.loops = outer
        self.depth -= 1

    def _program(self, words: list[str], prefix: dict[str, str]) -> None:
        outer = {**self.known}, {**self.exported}
        inner = [place for place, word in enumerate(words) if self.depth < MOST_WITHIN and _has_command(word)]
        for place in inner:
            count = len(self.commands)
            self._within(ShellTokens(words[place], self.line), prefix, self.args)
            for number, each in enumerate(self.commands[count:], count):
                self.commands[number] = replace(each, around=[*words[:place], *each.around])
        if inner:
            self.known, self.exported = outer
            return
        environment = self.exported | self.prefix | prefix
        self.taken([*environment])
        loop = next((each for each in reversed(self.loops) if each and each not in self.given), "")
        self.commands.append(Command(words, environment, [], self.line, self.doubt, loop, frozenset(self.used),
                                     tuple(self.sourced)))  # fmt: skip


def _holds(words: Sequence[str]) -> bool | None:
    """Say whether the words of `[ … ]` hold: && and || as well as -a and -o, and ! before one test."""
    if len(words) > MOST_IN_A_TEST:
        return None
    for operators, decisive in ((("||", "-o"), True), (("&&", "-a"), False)):
        places = [place for place, word in enumerate(words) if word in operators and 0 < place < len(words) - 1]
        if places:
            sides = _holds(words[: places[0]]), _holds(words[places[0] + 1 :])
            return decisive if decisive in sides else None if None in sides else not decisive
    if words[:1] == ["!"]:
        return _not(_holds(words[1:]))
    if any(isinstance(each, Unknown) for each in words):
        return None
    match words:
        case ["-z" | "-n" as empty, text]:
            return bool(text) == (empty == "-n")
        case [text]:
            return bool(text)
        case ["-f" | "-d" | "-e" | "-s", path]:  # what is here is there too; what is not may be there
            return os.path.exists(path) or None
        case [one, "=" | "==", other]:
            return fnmatch.fnmatchcase(one, other)
        case [one, "!=", other]:
            return not fnmatch.fnmatchcase(one, other)
        case [one, by, other] if by in NUMERIC and all(re.fullmatch(r"-?\d+", each) for each in (one, other)):
            return bool(NUMERIC[by](int(one), int(other)))
    return None


def shown(words: Sequence[str]) -> str:
    """Return the words of a command as they may be shown."""
    texts = []
    for word in words:
        name, equals, _ = word.partition("=")
        hides = equals and ASSIGNMENT.match(word) and is_secret(name)
        texts.append(f"{name}={HIDDEN}" if hides else str(masked("", word)))
    return re.sub(r"(?i)\b(authorization:|bearer)\s+[^'\"]*", rf"\1 {HIDDEN}", " ".join(texts))


def _has_command(text: str) -> bool:
    """Recognize a command of a trainer in one word: it was quoted."""
    match = TRAINER.search(text)
    return match is not None and re.compile(r"\s--|\s\S+\.ya?ml\b").search(text, match.end()) is not None
