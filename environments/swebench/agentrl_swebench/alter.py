"""Makes mutants of tests for control runs.

A mutant is a test with one constant changed: an input, an expected value, a parameter, an argument
of a helper, or the exception that it expects. It differs from the original test in nothing else.

    assert merge([(1, 3), (3, 5)]) == [(1, 5)]      assert merge([(1, 3), (3, 5)]) == [(1, 4)]
    assert parse("2 kg").unit == "kg"               assert parse("2 kg").unit == "unit"
    with pytest.raises(ValueError):                 with pytest.raises(KeyError):

A patch that sees a test beside its mutants must not be able to tell which one the author wrote. So
a changed value is as plausible as the author's where that can be had: another value of the same
file, or one with a digit that is a little higher or lower.

A correct solution may still pass some mutants; `audit` keeps those that the reference solution
fails.
"""

from __future__ import annotations

import ast
import builtins
import functools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from agentrl.runtime import parse_python

Function = ast.FunctionDef | ast.AsyncFunctionDef

_EXCEPTIONS = (
    "ValueError",
    "TypeError",
    "KeyError",
    "AttributeError",
    "IndexError",
    "RuntimeError",
    "NotImplementedError",
    "ZeroDivisionError",
)
_WARNINGS = ("UserWarning", "DeprecationWarning", "FutureWarning", "RuntimeWarning")
_NO_BASES = ("BufferError", "TabError", "FloatingPointError", "ChildProcessError")
"""Exceptions from which no project derives its own, so that no solution raises one of them where
the test expects an exception of the project."""

_EXPECTS = re.compile(r"assert\w*|raises|warns|approx|isclose|allclose", re.IGNORECASE)
"""Names of calls whose arguments say what is expected."""
_MAY_EXPECT = re.compile(r"match|equal|expect|check|verify")
"""Names of helpers whose arguments may say so."""
_BUILDS = re.compile(r"[A-Z]\w*|set|frozenset|list|tuple|dict|array|sorted")
"""Names of calls that build a value from their arguments."""
_EXPECTED = re.compile(r"expect|want|desired|correct|answer|result|output|^(exp|ref|out)$")
"""Names of variables and parameters that hold what is expected."""
_EXPECTED_VALUE, _PERHAPS, _INPUT = 0, 1, 2
"""Ranks of values. A correct solution fails a test with another expected value, because it gives
the same result as before; with another input it may pass. So inputs are changed only in tests
without other values."""
_OPPOSITES = {
    "assertTrue": "assertFalse",
    "assertEqual": "assertNotEqual",
    "assertIn": "assertNotIn",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
}
_OPPOSITES |= {opposite: name for name, opposite in _OPPOSITES.items()}
"""Methods of unittest for tests without a value to change."""
_FRAGILE = re.compile(
    r"sleep|wait|join|alarm|timeout|delay|interval|patch|[sg]etattr|delattr|import|fixture|skip|xfail"
    r"|fail|open",
    re.IGNORECASE,
)
"""Names of calls and keywords whose arguments, if changed, delay the test or break it for every
solution."""


@dataclass(slots=True, frozen=True, order=True)
class Edit:
    """A replacement in a file; `start` and `end` count bytes from the file's start."""

    start: int
    end: int
    text: str


@dataclass(slots=True, frozen=True)
class TestName:
    """The class and the function of a test."""

    __test__ = False  # keeps pytest from collecting this class

    cls: str
    """"" if the function is in no class."""
    function: str


@dataclass(slots=True, frozen=True)
class Slot:
    """One form of a test in an altered file: its name there and the changes in it."""

    name: str
    edits: tuple[Edit, ...] = ()
    """Empty for the original test."""


def python_tests(source: str) -> dict[TestName, Function]:
    """Returns the functions of a module and of its classes by name; {} if this version of Python
    cannot parse it. Of several functions with one name it returns the last, which Python runs."""
    try:
        module = parse_python(source)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return dict(_functions(module, ""))


def _functions(node: ast.AST, cls: str) -> Iterator[tuple[TestName, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield TestName(cls, child.name), child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, child.name)


def draw_edits(
    source: str,
    function: Function,
    choose: random.Random,
    number: int,
    *,
    last_resort: bool = False,
) -> list[Edit]:
    """Draws up to `number` changes of a test, spread over its values; expected values come before
    inputs. Changes of one value have different results, and changes of different values do not
    overlap.

    Args:
        last_resort: draw changes that can be told from what an author writes, too: any other value,
            and assertions turned into their opposites. They are drawn anyway if there are no
            others.
    """
    content = source.encode()
    starts = _line_starts(content)
    context = _context(source, function)
    drawn: list[tuple[int, float, list[Edit]]] = []
    for node, rank in _values(function):
        start, end = _span(node, starts)
        old = content[start:end].decode()
        others: list[str | None] = [*_plausible(node, old, context, choose)]
        if last_resort:
            others += [_any_other(node, old, choose) for _ in range(number)]
        texts = [each for each in dict.fromkeys(others) if each and _is_another(node, old, each)]
        if texts:
            in_test, in_file = _occurs(old, context, but=1)
            key = choose.random() ** (1.0 if in_test else 5.0 if in_file else 20.0)
            drawn.append((rank, -key, [Edit(start, end, text) for text in texts]))
    for node in ast.walk(function) if last_resort else ():
        if isinstance(node, ast.Assert):
            start, end = _span(node.test, starts)
            text = _opposite(node.test, content[start:end].decode())
            drawn.append((_INPUT + 1, 0.0, [Edit(start, end, text)]))
        elif isinstance(node, ast.Call) and (opposite := _OPPOSITES.get(_called(node))):
            end = _span(node.func, starts)[1]
            drawn.append((_INPUT + 1, 0.0, [Edit(end - len(_called(node)), end, opposite)]))
    if not drawn and not last_resort:
        return draw_edits(source, function, choose, number, last_resort=True)
    if not last_resort and any(rank < _INPUT for rank, _, _ in drawn):
        drawn = [each for each in drawn if each[0] < _INPUT]
    taken: list[Edit] = []
    rounds: dict[tuple[int, int], list[Edit]] = defaultdict(list)
    for rank, _, edits in sorted(drawn):
        if all(edits[0].start >= each.end or edits[0].end <= each.start for each in taken):
            taken.append(edits[0])
            for number_drawn, edit in enumerate(edits):
                rounds[rank, number_drawn].append(edit)
    return [edit for each in sorted(rounds) for edit in rounds[each]][:number]


def with_slots(source: str, slots: Sequence[tuple[Function, Sequence[Slot]]]) -> str:
    """Returns the module's source with each of the given functions replaced by its slots, in
    order."""
    content = source.encode()
    starts = _line_starts(content)
    edits = []
    for function, its_slots in slots:
        first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
        start, end = starts[first - 1], _span(function, starts)[1]
        definition = starts[function.lineno - 1] + function.col_offset
        match = re.match(rb"(?:async\s+)?def\s+", content[definition:end])
        named = definition + (match.end() if match else 0)
        blocks = []
        for slot in its_slots:
            rename = Edit(named, named + len(function.name.encode()), slot.name)
            block = content[start:end]
            for edit in sorted([*slot.edits, rename], reverse=True):
                at = edit.start - start
                block = block[:at] + edit.text.encode() + block[edit.end - start :]
            blocks.append(block.decode())
        gap = "\n\n" if function.col_offset else "\n\n\n"
        edits.append(Edit(start, end, gap.join(blocks)))
    for edit in sorted(edits, reverse=True):
        content = content[: edit.start] + edit.text.encode() + content[edit.end :]
    return content.decode()


def _line_starts(content: bytes) -> list[int]:
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _span(node: ast.expr | ast.stmt, starts: list[int]) -> tuple[int, int]:
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
    return starts[node.lineno - 1] + node.col_offset, starts[end_line - 1] + end_column


def _values(function: Function) -> Iterator[tuple[ast.expr, int]]:
    """Yields the values in a test that may be changed, each with its rank."""
    for decorator in function.decorator_list:
        # Other decorators decide whether a test runs.
        if isinstance(decorator, ast.Call) and _called(decorator) == "parametrize":
            yield from _parameters(decorator)
    for statement in function.body:
        yield from _values_below(statement, _INPUT)


def _parameters(decorator: ast.Call) -> Iterator[tuple[ast.expr, int]]:
    """Yields the values of a test's parameters; the first argument names the parameters."""
    if len(decorator.args) < 2:
        return
    texts = [n.value for n in ast.walk(decorator.args[0]) if isinstance(n, ast.Constant)]
    names = [name.strip() for text in texts if isinstance(text, str) for name in text.split(",")]
    expects = [bool(_EXPECTED.search(name)) for name in names]
    # One of several is likely to be expected, whatever its name.
    rest = _INPUT if any(expects) or len(names) == 1 else _PERHAPS
    ranks = [_EXPECTED_VALUE if each else rest for each in expects]
    rows = decorator.args[1]
    for row in rows.elts if isinstance(rows, ast.List | ast.Tuple) else ():
        values = row.args if isinstance(row, ast.Call) else getattr(row, "elts", [])
        if len(ranks) == 1 or len(values) != len(ranks):
            yield from _values_below(row, ranks[0] if len(ranks) == 1 else _PERHAPS)
        else:
            for value, rank in zip(values, ranks, strict=True):
                yield from _values_below(value, rank)


def _values_below(node: ast.AST, rank: int) -> Iterator[tuple[ast.expr, int]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.JoinedStr | ast.ImportFrom):
        return
    if isinstance(node, ast.keyword) and _FRAGILE.search(node.arg or ""):
        return
    if isinstance(node, ast.Assert):
        yield from _values_below(node.test, _EXPECTED_VALUE)
        return  # the assertion's message affects nothing
    if isinstance(node, ast.Assign):
        names = [each.id for each in node.targets if isinstance(each, ast.Name)]
        if any(_EXPECTED.search(name) for name in names):
            rank = _EXPECTED_VALUE
    if isinstance(node, ast.Subscript):
        yield from _values_below(node.value, rank)
        yield from _values_below(node.slice, _INPUT)
        return
    if isinstance(node, ast.Call):
        yield from _values_of_call(node, rank)
        return
    if isinstance(node, ast.Constant) and (node.value is not None or rank < _INPUT):
        yield node, rank
    if isinstance(node, ast.List | ast.Tuple | ast.Dict):
        yield node, rank
    for child in ast.iter_child_nodes(node):
        yield from _values_below(child, rank)


def _values_of_call(node: ast.Call, rank: int) -> Iterator[tuple[ast.expr, int]]:
    name = _called(node)
    if _FRAGILE.search(name):
        return
    yield from _values_below(node.func, rank)
    if re.fullmatch(r"raises|warns|assert(?:Raises|Warns)\w*", name):
        if node.args:
            yield node.args[0], _EXPECTED_VALUE
        for argument in node.args[1:]:
            yield from _values_below(argument, _INPUT)
        for keyword in node.keywords:
            yield from _values_below(keyword, _EXPECTED_VALUE)
        return
    if _EXPECTS.fullmatch(name):
        rank = _EXPECTED_VALUE
    elif _MAY_EXPECT.search(name):
        rank = _PERHAPS
    elif _BUILDS.fullmatch(name):
        rank = max(rank, _PERHAPS)
    else:
        rank = _INPUT
    for child in (*node.args, *node.keywords):
        yield from _values_below(child, rank)


def _called(node: ast.Call) -> str:
    function = node.func
    return getattr(function, "attr", "") or getattr(function, "id", "")


@dataclass(slots=True, frozen=True)
class _Context:
    """Counts of values in a test and in the rest of its file: the source texts of constants, the
    words in strings, and names, such as those of exceptions."""

    test: Counter[str]
    others: Counter[str]


def _context(source: str, function: Function) -> _Context:
    starts = _line_starts(source.encode())
    in_test = _count(function, source.encode(), starts)
    return _Context(in_test, _count_all(source) - in_test)


@functools.lru_cache(maxsize=4)
def _count_all(source: str) -> Counter[str]:
    content = source.encode()
    return _count(parse_python(source), content, _line_starts(content))


def _count(node: ast.AST, content: bytes, starts: list[int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in ast.walk(node):
        if isinstance(each, ast.Constant):
            start, end = _span(each, starts)
            text = content[start:end].decode(errors="replace")  # some Pythons misplace f-strings
            found[text] += 1
            if isinstance(each.value, str):
                found.update(piece.group() for piece in _pieces(text))
        elif isinstance(each, ast.Name):
            found[each.id] += 1
    return found


def _plausible(node: ast.expr, text: str, context: _Context, choose: random.Random) -> list[str]:
    """Returns sources of other values that do not stand out beside this one: they are of its kind,
    and occur elsewhere in the test, or only elsewhere in the file, or nowhere, as it does. Where
    there are few of those, changed values follow them."""
    if isinstance(node, ast.Constant):
        fellows = _fellows(text, context, choose)
        is_alone = context.test[text] + context.others[text] == 1
        if not fellows and not is_alone:
            return []
        if isinstance(node.value, str | bytes):
            changed = [_another_string(text, context, choose) for _ in range(8) if _pieces(text)]
        elif node.value is ... or isinstance(node.value, bool | None):
            changed = []
        else:
            near = (_another_number(text, choose) for _ in range(16))
            changed = [each for each in near if not context.test[each] + context.others[each]]
        return fellows + changed if len(fellows) < 8 else fellows
    if isinstance(node, ast.Name) and isinstance(getattr(builtins, node.id, None), type):
        here = _occurs(node.id, context, but=1)
        return [each for each in _other_exceptions(node.id) if _occurs(each, context) == here]
    return []


def _occurs(text: str, context: _Context, but: int = 0) -> tuple[bool, bool]:
    """Tells whether a value occurs in the test, more than `but` times, and in the rest of its
    file."""
    return context.test[text] > but, context.others[text] > 0


def _fellows(text: str, context: _Context, choose: random.Random) -> list[str]:
    """Returns the values or words of the same kind that occur where this one occurs once more: in
    the test, or else in its file. Frequent ones are likely to come first. Returns [] if this one
    occurs nowhere else."""
    if context.test[text] > 1:
        among = context.test
    elif context.others[text]:
        among = Counter({k: n for k, n in context.others.items() if k not in context.test})
    else:
        return []
    fellows = {each: n for each, n in among.items() if each != text and _is_like(each, text)}
    return sorted(
        fellows, key=lambda each: choose.random() ** (1 / fellows[each] ** 1.5), reverse=True
    )


def _is_like(one: str, other: str) -> bool:
    """Tells whether two values are of one kind, so that either may stand for the other."""
    kinds = []
    for text in (one, other):
        if text in ("True", "False", "None"):
            kinds.append(("singleton",))
        elif text[0].isdigit():
            kinds.append(("." in text, not text.isdigit()))
        elif "'" in text or '"' in text:
            words = _pieces(text)
            kinds.append((text[: 2 if text[0].isalpha() else 1], len(words) == 1))
        else:
            kinds.append((text.islower(), text.isupper(), text.isalpha(), len(text) > 1))
    return kinds[0] == kinds[1] and (not one[0].isdigit() or abs(len(one) - len(other)) < 2)


def _any_other(node: ast.expr, text: str, choose: random.Random) -> str | None:
    """Returns the source of any other value; None if this value cannot be changed."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool | None):
            return choose.choice(["True", "False", "None"])
        if isinstance(node.value, str | bytes):
            if _pieces(text):
                return _another_string(text, _Context(Counter(), Counter()), choose)
            closing = 3 if len(text) >= 6 and text.endswith(('"""', "'''")) else 1
            return text[:-closing] + choose.choice("abcdefgh") + text[-closing:]
        return None if node.value is ... else _another_number(text, choose)
    if isinstance(node, ast.List | ast.Tuple | ast.Dict):
        empty = not (node.keys if isinstance(node, ast.Dict) else node.elts)
        forms = {ast.List: "[{}]", ast.Tuple: "({},)", ast.Dict: "{{{}: 0}}"}
        return forms[type(node)].format(choose.randrange(10)) if empty else None
    if isinstance(node, ast.Name | ast.Attribute):
        others = _other_exceptions(getattr(node, "id", ""))
        return choose.choice(others) if others else None
    return None


def _is_another(node: ast.expr, text: str, other: str) -> bool:
    """Tells whether a constant's new source means another value."""
    if not isinstance(node, ast.Constant):
        return True
    try:
        old, new = (ast.literal_eval(f"({each})") for each in (text, other))
    except (SyntaxError, ValueError):
        return False  # the change made an escape or a prefix of the string invalid
    return old != new or type(old) is not type(new)


def _other_exceptions(name: str) -> list[str]:
    """Returns the names of exceptions that are neither bases of the expected one nor derived from
    it."""
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type):
        return [*_NO_BASES]
    return [
        each
        for each in (_WARNINGS if issubclass(kind, Warning) else _EXCEPTIONS)
        if not issubclass(getattr(builtins, each), kind)
        and not issubclass(kind, getattr(builtins, each))
    ]


def _another_number(text: str, choose: random.Random) -> str:
    """Returns a number with one digit higher or lower, most often a little."""
    digits = [k for k, letter in enumerate(text) if letter.isdigit()]
    # Another digit than 0 first, so that a round number stays round.
    at = choose.choice([k for k in digits if text[k] != "0"] or digits)
    return text[:at] + _another_digit(text[at], choose) + text[at + 1 :]


def _another_string(text: str, context: _Context, choose: random.Random) -> str:
    """Returns the source of a string with one word, letter or digit changed."""
    piece = choose.choice(_pieces(text))
    old = piece.group()
    if fellows := _fellows(old, context, choose):
        new = fellows[0]
    else:
        at = choose.randrange(len(old))
        change = _another_digit if old.isdigit() else _another_letter
        new = old[:at] + change(old[at], choose) + old[at + 1 :]
    return text[: piece.start()] + new + text[piece.end() :]


def _pieces(text: str) -> list[re.Match[str]]:
    """Returns the words and numbers within the quotes of a string's source."""
    quotes = re.match(r"""[A-Za-z]*["']+""", text)
    start = quotes.end() if quotes else 0
    return [*re.compile(r"(?<!\\)(?:[A-Za-z]+|[0-9]+)").finditer(text, start)]


def _another_digit(digit: str, choose: random.Random) -> str:
    others = [k for k in range(1, 10) if k != int(digit)]
    near = [1 / (k - int(digit)) ** 2 for k in others]
    return str(choose.choices(others, near)[0])


def _another_letter(letter: str, choose: random.Random) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    letters = letters if letter.islower() else letters.upper()
    return choose.choice(letters.replace(letter, ""))


def _opposite(node: ast.expr, text: str) -> str:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return text.removeprefix("not").strip()
    return f"not ({text})"


_LITERAL = r"""(?P<value>-?\d+(?:\.\d+)?|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
_ELSEWHERE = tuple(
    re.compile(form.replace("LITERAL", _LITERAL))
    for form in (
        # Jest, Vitest, Chai, RSpec
        r"\.(?:toBe|toEqual|toStrictEqual|equals?|eql?|deepEqual|to eq)\(\s*LITERAL\s*\)",
        r"\bto (?:eq|eql|be)\s+LITERAL\s*$",
        # JUnit, PHPUnit, minitest: the expected value is first
        r"\b(?:assertEquals|assertSame|assert_equal)[\s(]+LITERAL\s*,",
        # Rust, node's assert, Perl's Test::More, Catch2: the expected value is last
        r"\bassert_eq!\(.+,\s*LITERAL\s*\)",
        r"\b(?:strictEqual|equal|is|same|cmp_ok)\s*\(.+?,\s*LITERAL\s*(?:\)|,)",
        # Go, C and C++
        r"!=\s*LITERAL\s*[{)]",
        r"\b(?:ASSERT|EXPECT)_(?:EQ|STREQ)\(.+,\s*LITERAL\s*\)",
    )
)


def alter_text(source: str, choose: random.Random, lines: Collection[int]) -> str:
    """Returns tests in another language than Python with the expected literals of some lines
    changed: those that the form of a common assertion shows to be expected values.

    Args:
        lines: numbers of the lines that may be changed, from 0.
    """
    words = Counter(
        piece.group() for text in re.findall(_LITERAL, source) for piece in _pieces(text)
    )
    context = _Context(Counter(), words)

    def changed(match: re.Match[str]) -> str:
        old = match.group("value")
        start = match.start("value") - match.start()
        if old[0] not in "'\"":
            new = _another_number(old, choose)
        elif _pieces(old):
            new = _another_string(old, context, choose)
        else:
            new = old[:-1] + choose.choice("abcdefgh") + old[-1]
        return match.group()[:start] + new + match.group()[start + len(old) :]

    texts = source.split("\n")
    for number in sorted(lines):
        for form in _ELSEWHERE:
            altered = form.sub(changed, texts[number])
            if altered != texts[number]:
                texts[number] = altered
                break
    return "\n".join(texts)
