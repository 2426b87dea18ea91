"""The killable half of the math grader: a program that compares two answers with math-verify.

`agentrl_rewards.math_pool` starts it as a file (`python -P math_worker.py`) and never imports it,
so the user's `__main__` is not run again and the multiprocessing start method does not matter.

    caller  --request lines-->  supervisor  --a request-->  children (forked, limited, disposable)
            <--reply lines----              <--a reply----

The supervisor imports math-verify once and never parses an answer itself. Its children do, one
answer at a time and under RLIMIT_AS. The deadline is CPU time, and ten times as much on the clock:
the kernel's timers end a child that misses it, and the next one is forked from the warm supervisor
in milliseconds. A request for which no child is free waits. Every request gets exactly one reply:

    {"id": int, "answer": str, "reference": str, "deadline_s": float}
    -> {"id": int, "equal": bool}                the comparison completed
    -> {"id": int, "equal": null}                the answer would cost too much to evaluate
    -> {"id": int, "error": str}                 the comparison crashed, or memory did not suffice
    -> {"id": int, "error": str, "late": true}   the comparison missed the deadline

`{"error": str}` without an id says that math-verify is not installed. The supervisor ends its
children and itself at the end of its input, so a caller that is killed leaves no process behind.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHECKS_PER_CHILD = 500
"""A child is replaced after this many checks, because sympy's caches grow."""

WARM_UP = (
    (r"(x-3)^2(x+1)+\frac{1}{2}x", r"x^3-5x^2+3.5x+9"),
    (
        r"\begin{pmatrix} \frac{1}{2} \\ -3 \end{pmatrix}",
        r"\begin{bmatrix} 1 & \sqrt{2} \end{bmatrix}",
    ),
    (r"(-\infty,-2] \cup [3,5)", r"x \leq -2 \text{ or } x > 3"),
    (r"\{1, -2\}", r"(\frac{3}{4}, -1)"),
    (r"2\sqrt{3}+\sqrt[3]{5}i", r"\sin^2 (2\pi/3)+\cos\theta"),
    (r"\log_{2}(x+1)", r"\ln 3 - e^{-2x}"),
    (r"\frac{n!}{k!(n-k)!}", r"\binom{n}{k}"),
    (r"y = -2x^2+3", r"|x-1|"),
    (r"3 \pm \sqrt{5}", r"a_1+b_{2}"),
    (r"x=1, 2", r"x_1 = 1 \text{ and } y < 3"),
)
"""Compared before the first child is forked, so that children inherit the parser's tables. The
first comparison of such an expression takes four times as long as a later one."""

Compare = Callable[[str, str], bool | None]


_COMMAND = re.compile(
    r"\\(?:begin|end)\s*\{\w+\}(?:\{[lcr|]+\})?|\\\\\s*\[[^\]]*\]|\\mathbb\s*\{\w\}|\\[a-zA-Z]+"
)
_NAMES = r"arc(?:sin|cos|tan)|(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|pi"
_FUNCTION = re.compile(rf"(?<![a-zA-Z])(?:{_NAMES}|sqrt|infinity|inf|and|or|choose)(?![a-z])")
_RELATION = re.compile(r"[=<>≤≥≠∈]|\\(?:leq?|geq?|neq?|in|lt|gt)(?![a-zA-Z])")
_SIDE_BY_SIDE = re.compile(r"(?<![_0-9])(?<!frac)(?<!frac )[0-9]+(?:[\s~]|\\[,;: ])+[0-9]")
_TEXT = re.compile(r"\\(?:text|math(?!bb))\w*\s*\{([^{}]*)\}")
_OPENING, _CLOSING = "([{", ")]}"
_BASE = re.compile(r"[0-9]\s*\}?\s*_")


def is_comparable(answer: str, gold: str) -> bool:
    """Returns whether math-verify can judge the pair.

    It ignores words, number bases and the kind of brackets, so pairs in which those matter are not
    comparable.
    """
    if re.fullmatch(r"\(?[a-df-hj-zA-Z]\)?", gold) or _BASE.search(answer) or _BASE.search(gold):
        return False
    answer_kind, gold_kind = list_brackets(answer), list_brackets(gold)
    if answer_kind and gold_kind and answer_kind != gold_kind:
        return False
    if _SIDE_BY_SIDE.search(answer):
        return False  # would be parsed as a product or as a mixed number
    known = set("ei") | set("".join(re.findall("[a-zA-Z]+", words_of(gold))))
    runs = re.findall(r"[a-zA-Z]+", words_of(answer))
    if _RELATION.search(answer):  # an equation may use other variables
        runs = [run for run in runs if len(run) > 1]
    return known.issuperset("".join(runs))


_MATH_WORDS = (
    (re.compile(r"\*\*"), "^"),
    # sin(pi*x), as in program code: without a backslash it would be a product of letters
    (re.compile(rf"\\(?:text|mathrm|operatorname)\s*\{{({_NAMES})\}}"), r"\\\1 "),
    (re.compile(rf"(?<![a-zA-Z\\])({_NAMES})(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(r"\\sqrt\s*(?=\()"), "sqrt"),
    # a proportion of three
    (re.compile(r"^([^:]+):([^:]+):([^:]+)$"), r"(1,\\frac{\2}{\1},\\frac{\3}{\1})"),
    (re.compile(r"\\sqrt\s*\[([357])\]\s*\{\s*-\s*(\w+)\s*\}"), r"(-\\sqrt[\1]{\2})"),
    (re.compile(r"(?<=[*^])\[([^\[\](),]*)\]"), r"(\1)"),  # e^[2*x] is not an interval
    (re.compile(r"\\\\\s*\[[^\]]*(?:pt|e[xm]|[cm]m)\]"), r"\\\\ "),  # line spacing
    # otherwise a number before it would be added, as in a mixed number
    (re.compile(r"(?<=[0-9)}])\s*\\[dt]?binom(?![a-zA-Z])"), r"\\cdot\\binom"),
)
_DEGREES = re.compile(r"([0-9.]+)\s*(?:°|\^\s*\{?\s*\\circ\s*\}?)")


def for_parser(text: str) -> str:
    """Rewrites LaTeX into the form that math-verify's parser understands."""
    for pattern, replacement in _MATH_WORDS:
        text = pattern.sub(replacement, text)
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = _DEGREES.sub(r"(\1\\pi/180)", text)
    return text


def words_of(text: str) -> str:
    text = _TEXT.sub(r" \1 ", text)
    return _FUNCTION.sub(" ", _COMMAND.sub(" ", text))


def list_brackets(text: str) -> str:
    """Returns the brackets around a list, such as `(]` for a half-open interval.

    Empty if one pair of brackets does not enclose the whole text.
    """
    text = re.sub(r"\\left|\\right|\\(?=[{}])|\s", "", text).rpartition("=")[2]
    if text[:1] not in tuple(_OPENING) or text[-1:] not in tuple(_CLOSING):
        return ""
    depth, is_list = 0, False
    for position, char in enumerate(text):
        depth += (char in _OPENING) - (char in _CLOSING)
        if depth == 0 and position < len(text) - 1:
            return ""
        is_list |= char == "," and depth == 1
    return text[0] + text[-1] if is_list else ""


def load_compare() -> Compare:
    """Imports math-verify and compares a few pairs, so that forked children inherit its tables.

    Raises:
        ImportError: math-verify is not installed.
    """
    import logging

    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, grader, parse, verify

    logging.disable(logging.CRITICAL)
    solve_and_compare, symbolic_eq = grader.sympy_solve_and_compare, grader.sympy_symbolic_eq
    tolerance = sympy.Float(0)
    # The caller handles units; math-verify's own would strip the letters c, d, h, s and t.
    normalization = NormalizationConfig(units=False, malformed_operators=True, boxed="last")
    config = (LatexExtractionConfig(normalization_config=normalization),)

    def numbers_equal(gold: Any, answer: Any, *_: Any) -> bool:
        """Takes the place of math-verify's comparison of numbers, which is absolute."""
        if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
            pairs = zip(gold.flat(), answer.flat(), strict=False)
            return gold.shape == answer.shape and all(expressions_equal(*each) for each in pairs)
        return same_value(gold, answer, tolerance) is True

    def expressions_equal(gold: Any, answer: Any) -> bool:
        """Simplifies the difference only if values do not decide."""
        same = same_value(gold, answer, tolerance)
        return symbolic_eq(gold, answer) if same is None else same

    def solutions_equal(gold: Any, answer: Any, *options: Any) -> bool:
        """Compares what solves two relations; those without a solution are not all equal."""
        if gold.lhs == answer.lhs and gold.lhs.is_Symbol and type(gold) is type(answer):
            return same_value(gold.rhs, answer.rhs, tolerance) is True
        if isinstance(gold, sympy.Eq) and are_proportional(gold, answer):
            return True
        return bool(sympy.solve(gold, gold.free_symbols)) and solve_and_compare(
            gold, answer, *options
        )

    grader.INVERSE_RELATIONS[sympy.Ne] = sympy.Ne  # a KeyError otherwise
    grader.sympy_numeric_eq = numbers_equal
    grader.sympy_symbolic_eq = expressions_equal
    grader.sympy_solve_and_compare = solutions_equal

    def parsed(latex: str) -> list[Any]:
        # Wrapped in one box, the text is parsed as a whole or not at all. The default would fall
        # back to the last number it finds, and "1, 2, 3" would equal 3. No timeout here:
        # math-verify's needs the main thread and cannot stop C code; the supervisor's SIGKILL can.
        found = parse(
            "\\boxed{" + latex + "}",
            extraction_config=config,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,  # pyright: ignore[reportArgumentType]
        )
        if not found and "\\pm" in latex:
            return parsed(latex.replace("\\pm", "+") + "," + latex.replace("\\pm", "-"))
        return found

    def compare(answer: str, reference: str) -> bool | None:
        nonlocal tolerance
        if not is_comparable(answer, reference):
            return False
        tolerance = sympy.Float(rounding(answer + " " + reference))
        is_complex = bool(_IMAGINARY.search(words_of(answer + " " + reference)))
        gold = [
            prepared(each, is_complex, bool(_AND.search(reference)))
            for each in parsed(for_parser(reference))
        ]
        # What cannot be read or prepared is not equal to anything: an answer must not escape a 0 by
        # an exception. If the comparison itself raises, the answer has no reward, unless the two
        # are not even of one kind.
        try:
            prediction = parsed(for_parser(answer))
            if any(not is_cheap(expression) for expression in prediction):
                return None
            is_and = bool(_AND.search(answer))
            prediction = [prepared(each, is_complex, is_and) for each in prediction]
        except MemoryError:
            raise
        except Exception:
            return False
        if not gold or not prediction or is_empty(gold[0]) or is_empty(prediction[0], gold[0]):
            return False
        try:
            same = same_value(gold[0], prediction[0], tolerance)
            if same is not None:
                return same
            return verify(
                gold,
                prediction,
                allow_set_relation_comp=True,
                timeout_seconds=None,
                raise_on_error=True,
            )
        except Exception:
            if kind_of(gold[0]) is kind_of(prediction[0]):
                raise
            return False

    for pair in WARM_UP:
        compare(*pair)
    return compare


_AND = re.compile(r"(?<![a-zA-Z])and(?![a-zA-Z])")
_IMAGINARY = re.compile(r"(?<![a-zA-Z])[a-z]?i(?![a-zA-Z])")


def rounding(text: str) -> float:
    """Returns the relative error that decimals of at least ten digits allow; 0 without any."""
    decimals = re.findall(r"[0-9]*\.[0-9]+", text)
    long = [each for each in decimals if len(each.replace(".", "").lstrip("0")) >= 10]
    return max((10.0 ** -len(each.partition(".")[2]) / float(each) for each in long), default=0.0)


def prepared(expression: Any, is_complex: bool, is_and: bool = False) -> Any:
    """Rewrites what math-verify does not, without evaluating relations, which might collapse.

    Decimals become exact, `i` the imaginary unit, `log` of a base a quotient; joined inequalities
    become a set, their intersection if joined by "and" or if one is a `\\ne`; `x = a \\pm b`
    becomes two equations.
    """
    import sympy
    from latex2sympy2_extended.logic import And
    from latex2sympy2_extended.sets import FiniteSet

    def again(part: Any) -> Any:
        return prepared(part, is_complex)

    one_sided = (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt, sympy.Ne)
    if isinstance(expression, sympy.And | sympy.FiniteSet):
        parts = [again(each) for each in getattr(expression, "_unsorted_args", expression.args)]
        inequalities = [each for each in parts if isinstance(each, one_sided)]
        if parts and len(inequalities) == len(parts) and len(expression.free_symbols) == 1:
            is_and |= isinstance(expression, sympy.And) or any(
                isinstance(each, sympy.Ne) for each in parts
            )
            join = sympy.Intersection if is_and else sympy.Union
            return join(*(each.as_set() for each in inequalities))
        if isinstance(expression, sympy.And):
            return And(*parts, evaluate=False)
        return FiniteSet(*parts)
    if isinstance(expression, sympy.Eq) and isinstance(expression.rhs, sympy.FiniteSet):
        sides = [(expression.lhs, each) for each in expression.rhs.args]
        return FiniteSet(*(sympy.Eq(*map(again, pair), evaluate=False) for pair in sides))
    if isinstance(expression, sympy.Rel):
        return expression.func(*map(again, expression.args), evaluate=False)
    if isinstance(expression, sympy.Tuple):
        return sympy.Tuple(*map(again, expression))
    if isinstance(expression, sympy.MatrixBase):
        return expression.applyfunc(again)
    if not isinstance(expression, sympy.Basic):
        return expression
    names = {symbol: str(symbol) for symbol in expression.free_symbols}
    plain = {"real": None} if is_complex else {"real": True}
    expression = expression.xreplace(
        {
            k: sympy.I if is_complex and v == "i" else sympy.Symbol(v, **plain)
            for k, v in names.items()
        }
        | {each: sympy.Rational(str(each)) for each in expression.atoms(sympy.Float)}
    )
    return expression.replace(
        lambda each: isinstance(each, sympy.log) and len(each.args) == 2,
        lambda each: sympy.log(each.args[0]) / sympy.log(each.args[1]),
    )


def is_empty(expression: Any, gold: Any = None) -> bool:
    """Returns whether an expression is a truth value, the empty set, or a relation of numbers.

    All of them are alike. But `2 + 3 = 5` is an answer where the reference is a number.
    """
    import sympy

    if isinstance(expression, sympy.Rel) and not isinstance(gold, sympy.Expr):
        return not expression.free_symbols
    return expression in (sympy.true, sympy.false, sympy.S.EmptySet)


def kind_of(expression: Any) -> type | None:
    import sympy

    kinds = (sympy.MatrixBase, sympy.logic.boolalg.Boolean, sympy.Set, sympy.Tuple, sympy.Expr)
    return next((kind for kind in kinds if isinstance(expression, kind)), None)


def same_value(gold: Any, answer: Any, tolerance: Any) -> bool | None:
    """Returns whether two expressions have the same value; None if that is not decided.

    Rationals are compared exactly, other numbers in 50 digits. Functions are compared at eight
    points, at least three of which have to be positive: sympy does not simplify identities that
    hold only for positive numbers, such as sqrt(x^3) = x^(3/2).

    Args:
        tolerance: relative error allowed, for decimals that stand for a number without an end.
    """
    import sympy

    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return None
    gold, answer = gold.doit(), answer.doit()
    symbols: list[Any] = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if gold == answer:
        return not gold.has(sympy.zoo, sympy.nan)  # 12:00 and 1:00 as quotients
    if not symbols:
        return same_number(gold, answer, tolerance)
    both_have = gold.free_symbols and answer.free_symbols  # a function may be constant
    if len(symbols) > 5 or (both_have and gold.free_symbols != answer.free_symbols):
        return None
    num_positive = 0
    for point in range(8):
        values = {
            symbol: sympy.Rational(31 + 7 * (3 * place + 5 * point) % 41, 19)
            * (-1 if point > 4 and (place + point) % 3 else 1)  # of one sign or of two
            for place, symbol in enumerate(symbols)
        }
        pair: list[Any] = [each.subs(values) for each in (gold, answer)]
        numbers = [each.evalf(30) for each in pair]
        if not all(number.is_Float or number.is_Rational for number in numbers):
            continue
        if pair[0] != pair[1] and same_number(pair[0], pair[1], 0) is False:
            return False
        num_positive += point <= 4
    return True if num_positive >= 3 else None


def are_proportional(gold: Any, answer: Any) -> bool:
    """Returns whether two equations differ by a factor, as `x + y = 1` and `2x + 2y = 2` do."""
    sides = [each.lhs - each.rhs for each in (gold, answer)]
    symbols = {symbol: 3 + place for place, symbol in enumerate(sides[0].free_symbols)}
    values = [side.subs(symbols) for side in sides]
    if any(value.is_zero or not value.is_Rational for value in values):
        return False
    return same_value(sides[0] * values[1], sides[1] * values[0], 0) is True


def same_number(gold: Any, answer: Any, tolerance: Any) -> bool | None:
    import sympy

    if tolerance == 0 and gold.is_Rational and answer.is_Rational:
        return False  # they are in lowest terms
    sizes = []
    for number in (gold, answer, gold - answer):
        parts = number.evalf(60).as_real_imag()
        if not all(each.is_Float or each.is_Rational for each in parts):
            return None
        # where 100 digits cancel, sympy leaves a single bit
        known = [0 if each.is_Float and each._prec == 1 else each for each in parts]
        sizes.append(sympy.sqrt(sum(each**2 for each in known)))
    return bool(sizes[2] <= max(sizes[:2]) * max(tolerance, 1e-50))


MAX_BITS = 50_000
"""Length in bits of the largest number an answer may evaluate to; about 15,000 decimal digits."""
MAX_TERMS = 300
"""Maximum number of terms of an answer after its powers are expanded."""


def is_cheap(expression: object) -> bool:
    """Returns whether a parsed but unevaluated expression is cheap enough to evaluate.

    Bounds the size from the leaves up: every value has at most MAX_BITS bits and every expression
    at most MAX_TERMS terms. Sums, products, integrals, derivatives and limits are never evaluated,
    because their cost cannot be bounded this way.
    """
    import sympy

    unbounded = (
        sympy.Sum,
        sympy.Product,
        sympy.Integral,
        sympy.Limit,
        sympy.Derivative,
        sympy.gamma,
        sympy.zeta,
    )

    def size(each: sympy.Basic) -> tuple[float, float]:
        """Bounds a value's bits and number of terms; raises OverflowError above the limits."""
        inside = [size(part) for part in each.args if isinstance(part, sympy.Basic)]
        bits, terms = max([4.0, *(bits for bits, _ in inside)]), 1.0
        if isinstance(each, unbounded):
            raise OverflowError
        if isinstance(each, sympy.Rational):
            bits = each.p.bit_length() + each.q.bit_length()
        elif isinstance(each, sympy.Add):
            bits, terms = bits + len(inside), sum(terms for _, terms in inside)
        elif isinstance(each, sympy.Mul):
            bits = sum(bits for bits, _ in inside)
            terms = math.prod(terms for _, terms in inside)
        elif isinstance(each, sympy.Pow) and not each.exp.free_symbols:
            exponent = 2.0 ** min(inside[1][0], 64)
            if isinstance(each.exp, sympy.Rational):
                exponent = abs(float(each.exp))
            bits, terms = inside[0][0] * max(exponent, 1), inside[0][1]
            if terms > 1:
                terms = math.comb(math.ceil(min(exponent, MAX_BITS) + terms) - 1, int(terms) - 1)
        elif isinstance(each, sympy.factorial | sympy.binomial) and not each.args[0].free_symbols:
            number = 2.0 ** min(inside[0][0], 64)
            bits = number * inside[0][0]
        if bits > MAX_BITS or terms > MAX_TERMS:
            raise OverflowError
        return bits, terms

    try:
        if isinstance(expression, sympy.MatrixBase):
            return math.prod(expression.shape) <= 36 and all(map(is_cheap, expression.flat()))
        size(expression)  # pyright: ignore[reportArgumentType]
    except OverflowError:
        return False
    return True


def send(fd: int, message: dict[str, object]) -> None:
    os.write(fd, json.dumps(message).encode() + b"\n")  # shorter than a pipe's buffer: never blocks


def serve_child(connection: socket.socket, compare: Compare, memory_bytes: int) -> None:
    """Answers requests until the supervisor closes the connection."""
    if sys.platform == "linux":  # other kernels reject or ignore it
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in connection.makefile("rb"):
        request = json.loads(line)
        # Their signals end the process, in C code too: SIGPROF after so much CPU time, SIGALRM
        # after so much time on the clock.
        signal.setitimer(signal.ITIMER_PROF, request["deadline_s"])
        signal.setitimer(signal.ITIMER_REAL, 10 * request["deadline_s"])
        try:
            reply: dict[str, object] = {"equal": compare(request["answer"], request["reference"])}
        # sympy may raise anything. It concerns one answer only: the caller reports a grader error,
        # and this child is replaced in case its state is damaged.
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(connection.fileno(), reply)


class Supervisor:
    """Hands requests to children and their replies back."""

    def __init__(
        self, compare: Compare, num_children: int, memory_bytes: int, reply_fd: int
    ) -> None:
        self.compare, self.memory_bytes, self.reply_fd = compare, memory_bytes, reply_fd
        self.num_children = num_children
        self.waiting: deque[bytes] = deque()
        """Requests for which no child is free."""
        self.idle: list[Child] = []
        self.busy: dict[int, Child] = {}
        """Descriptor of its connection -> a child at work."""

    def run(self) -> None:
        """Serves until the caller closes the requests' pipe."""
        requests = b""
        while True:
            poll = select.poll()
            for fd in (0, *self.busy):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd:
                    self.pass_reply(self.busy[fd])
                elif chunk := os.read(0, 65536):
                    *lines, requests = (requests + chunk).split(b"\n")
                    self.waiting += lines
                else:
                    return
            while self.waiting and len(self.busy) < self.num_children:
                self.start(self.waiting.popleft())

    def start(self, line: bytes) -> None:
        child = self.idle.pop() if self.idle else self.fork()
        try:
            child.connection.sendall(line + b"\n")
        except OSError:  # it was killed while it was idle
            child.end()
            return self.start(line)
        child.request = line
        child.num_checks += 1
        self.busy[child.connection.fileno()] = child

    def fork(self) -> Child:
        ours, its = socket.socketpair()
        pid = os.fork()
        if pid:
            its.close()
            return Child(pid, ours)
        status = 1
        try:
            for fd in (0, self.reply_fd, ours.fileno(), *self.busy):
                os.close(fd)
            for each in self.idle:
                each.connection.close()
            serve_child(its, self.compare, self.memory_bytes)
            status = 0
        finally:
            os._exit(status)

    def pass_reply(self, child: Child) -> None:
        """Passes a child's reply to the caller, or the way in which it ended."""
        try:
            data = child.connection.recv(65536)
        except ConnectionError:
            data = b""
        del self.busy[child.connection.fileno()]
        request = json.loads(child.request)
        reply = json.loads(data) if data else {}
        if not data or "error" in reply or child.num_checks >= CHECKS_PER_CHILD:
            status = child.end()
            reply = reply or failure(status, request["deadline_s"])
        else:
            self.idle.append(child)
        send(self.reply_fd, {"id": request["id"], **reply})


@dataclass
class Child:
    """A forked process that compares expressions, one pair at a time."""

    pid: int
    connection: socket.socket
    request: bytes = b""
    num_checks: int = 0

    def end(self) -> int:
        """Kills and reaps the process and returns the `os.waitpid` status."""
        os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the id is still this child's
        self.connection.close()
        return os.waitpid(self.pid, 0)[1]


def failure(status: int, deadline_s: float) -> dict[str, object]:
    """Returns the reply for a child that ended during a check, from its `os.waitpid` status."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGPROF, signal.SIGALRM):
        return {"error": f"no result within {deadline_s:g} s", "late": True}
    name = f" ({signal.strsignal(number)})" if number else ""
    return {"error": f"the comparing process died during the check{name}"}


def main() -> None:
    reply_fd = os.dup(1)
    os.dup2(2, 1)  # a stray print must not end up between the replies
    try:
        compare = load_compare()
    except ImportError as error:
        send(reply_fd, {"error": f"{error}: install it with `pip install 'agentrl-gym[math]'`"})
        return
    supervisor = Supervisor(compare, int(sys.argv[1]), int(sys.argv[2]), reply_fd)
    try:
        supervisor.run()
    finally:
        for child in (*supervisor.idle, *supervisor.busy.values()):
            child.end()


if __name__ == "__main__":
    main()
