"""Remote calls from the process that runs the tests to the process that runs the answer's code.

    tests: f(3) == 9      --{"do": "call", "args": [f, 3]}-->      the answer's f(3)
                          <--------- {"result": 9} ----------

`code_sandbox.py` loads this module by its path, so it may import only the standard library. Each
side has a `Peer`. Plain data (numbers, strings, lists, dictionaries, sets and the like) is copied.
Anything else (an object, a class, a function, a generator) stays in its process, and the other side
gets a `Remote`, which forwards calls, attribute access and operators to it.

The tests must not trust what an object of the answer says about itself. So a `Remote` never equals
plain data and is never ordered against it, and the result of arithmetic with both (`f(3) - 9`)
cannot be used as a number, a string or a truth value. An instance of a subclass of a plain type
counts as the plain value that it holds. In the other direction, the answer can access only the
objects that the tests passed to it: it may call them and apply operators, and it sees the public
attributes of instances of classes that the tests define.
"""

from __future__ import annotations

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import functools
import importlib
import json
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

TESTS_MODULE = "tests"
MAX_MESSAGE_BYTES = 16 << 20
SCALARS = (bool, int, float, str, bytes, complex)
CONTAINERS = (list, tuple, set, frozenset, dict, bytearray)
BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()  # noqa: SIM905
ORDER = ("lt", "le", "gt", "ge")
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "bool": bool, "complex": complex, "float": float, "format": format, "hash": hash,
    "index": operator.index, "int": int, "iter": iter, "len": len, "next": next, "repr": repr,
    "reversed": reversed, "round": round, "str": str,
}  # fmt: skip
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "eq": operator.eq,
    "neg": operator.neg,
    "invert": operator.invert,
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager, *error: manager.__exit__(*error),
    "plain": lambda value: plain_content(value),
    **{name: getattr(operator, name) for name in (*BINARY, *ORDER)},
    **CONVERSIONS,
}


class LostError(Exception):
    """The other process ended or sent something that is not a valid message."""


class UnusableError(Exception):
    """The tests use an object of the answer in a way that a `Remote` does not support."""


class Peer:
    """One end of the pair of pipes.

    Args:
        names: the answer's globals, which the tests may look up. None on the side that runs the
            tests, where requests from the other side are not trusted.
        failure: the exception that the answer's code raised; re-raised in reply to "ready".
    """

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        names: dict[str, Any] | None,
        failure: BaseException | None = None,
    ) -> None:
        self.read_fd, self.write_fd, self.names = read_fd, write_fd, names
        self.failure = failure
        self.lost = False
        self._buffer = bytearray()
        self._lock = threading.RLock()
        self._own: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._others: dict[int, Any] = {}

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Runs an operation on the other side and returns its result.

        Raises:
            LostError: the other process ended or sent something unreadable.
            BaseException: whatever the operation raised there.
        """
        with self._lock:
            self._send(
                {
                    "do": operation,
                    "args": [self.encode(each) for each in args],
                    "kwargs": {name: self.encode(value) for name, value in kwargs.items()},
                }
            )
            reply = self._serve()
        if reply is None:
            raise LostError("the answer's process ended")
        try:
            error = self.decode(reply["raised"]) if "raised" in reply else None
            result = self.decode(reply.get("result"))
            changed = {int(n): self.decode(value) for n, value in reply.get("changed", {}).items()}
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as bad:
            raise self._is_lost(f"the answer's process sent an unreadable value: {bad}") from None
        for position, value in changed.items():
            if position < len(args):
                update(args[position], value)
        if isinstance(error, BaseException):
            raise error
        if "raised" in reply:
            raise self._is_lost("the answer's process raised something that is not an exception")
        return result

    def serve(self) -> None:
        """Handles requests until the other side closes its pipe."""
        if self._serve() is not None:
            raise LostError("got a reply without a request")

    def _serve(self) -> dict[str, Any] | None:
        """Handles requests until a reply arrives and returns it; None if the pipe was closed."""
        while (message := self._receive()) is not None:
            if "do" not in message:
                return message
            self._send(self._carry_out(message))
        return None

    def _carry_out(self, message: dict[str, Any]) -> dict[str, Any]:
        args: list[Any] = []
        before: list[Any] = []
        try:
            args = [self.decode(each) for each in message["args"]]
            kwargs = {name: self.decode(value) for name, value in message["kwargs"].items()}
            before = list(message["args"])
            result = self.encode(self._operation(message["do"], message["args"], args)(**kwargs))
        # The code's own mistakes, SystemExit included, belong to the side that asked.
        except BaseException as error:
            return {"raised": self._encode_error(error)}
        reply: dict[str, Any] = {"result": result}
        changed = {}
        if message["do"] == "call":
            for position, (value, sent) in enumerate(zip(args, before, strict=True)):
                if isinstance(value, CONTAINERS) and (now := self.encode(value)) != sent:
                    changed[str(position)] = now
        return reply | {"changed": changed} if changed else reply

    def _operation(self, name: str, sent: list[Any], args: list[Any]) -> Callable[..., Any]:
        if self.names is not None:
            if name == "ready" and self.failure is not None:
                raise self.failure
            if name == "ready":
                return lambda: None
            if name == "name":
                return lambda: find_name(self.names, args[0])
            if name == "isinstance":
                return lambda: isinstance(*args)
            if name == "await":
                return lambda: run_awaitable(args[0])
        else:
            # Without this check, `"{0.__globals__}".format` could be called to read the tests.
            if not (isinstance(sent[0], dict) and "yours" in sent[0]):
                raise TypeError("not an object of the tests")
            if name in ("get", "set") and (
                type(args[0]).__module__ != TESTS_MODULE or str(args[1]).startswith("_")
            ):
                raise AttributeError(f"the tests hide the attribute {args[1]!r}")
        return functools.partial(OPERATIONS[name], *args)

    # --- messages --------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self.write_fd, data) :]
        except OSError:
            raise self._is_lost("the answer's process ended") from None

    def _receive(self) -> dict[str, Any] | None:
        start = 0
        while (end := self._buffer.find(b"\n", start)) < 0:
            start = len(self._buffer)
            if start > MAX_MESSAGE_BYTES:
                raise self._is_lost("the answer's process sent too much")
            chunk = os.read(self.read_fd, 1 << 16)
            if not chunk:
                self.lost = True
                return None
            self._buffer += chunk
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise self._is_lost("the answer's process sent something that is not a message")
        return message

    def _is_lost(self, message: str) -> LostError:
        self.lost = True
        return LostError(message)

    # --- values ----------------------------------------------------------------------------------

    def encode(self, value: Any) -> Any:
        """Returns plain data as JSON values, and anything else as a numbered reference."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(each) for each in value]
        if kind in (collections.defaultdict, collections.OrderedDict):
            kind, value = dict, dict(value)
        for name, (plain, take_apart, _) in PLAIN.items():
            if plain is kind:
                return {name: self.encode(take_apart(value))}
        if isinstance(value, type) and value in BUILTIN_TYPES:
            return {"builtin": value.__name__}
        if isinstance(value, BaseException):
            return {"error": self._encode_error(value)}
        if kind is Remote and value._peer is self:
            return {"yours": value._number}
        if isinstance(value, type) and "_number" in vars(value):  # an exception class of theirs
            return {"yours": value._number}  # pyright: ignore[reportAttributeAccessIssue]
        return self._encode_own(value)

    def _encode_own(self, value: Any) -> dict[str, Any]:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._own)
            self._own.append(value)  # kept alive, so that its id() is not reused
        message: dict[str, Any] = {"mine": number}
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [each for each in value.__bases__ if issubclass(each, BaseException)]
            message["bases"] = [value.__name__, *map(self.encode, bases)]
        elif isinstance(value, types.CoroutineType):
            message["coroutine"] = True
        elif isinstance(value, SCALARS):
            message["plain"] = self.encode(plain_content(value))
        elif isinstance(value, CONTAINERS):
            message["container"] = next(t.__name__ for t in CONTAINERS if isinstance(value, t))
        return message

    def _encode_error(self, error: BaseException) -> Any:
        try:
            args = [self.encode(each) for each in error.args]
        # An argument of a class that the answer defines may do anything when it is inspected.
        except Exception:
            args = []
        return {"error": [self.encode(type(error)), *args]}

    def decode(self, value: Any) -> Any:
        """Returns the value that `encode` encoded on the other side.

        Raises:
            TypeError, ValueError, KeyError, IndexError: the message is malformed.
        """
        if not isinstance(value, list | dict):
            return value
        if isinstance(value, list):
            return [self.decode(each) for each in value]
        if "mine" in value:
            return self._decode_remote(value)
        ((kind, content),) = value.items()
        if kind == "yours":
            return self._own[content]
        parts = self.decode(content)
        if kind == "builtin":
            return {each.__name__: each for each in BUILTIN_TYPES}[parts]
        if kind == "error":
            return parts[0](*parts[1:])
        return PLAIN[kind][2](parts)

    def _decode_remote(self, value: dict[str, Any]) -> Any:
        number = int(value["mine"])
        if (known := self._others.get(number)) is not None:
            return known
        if "bases" in value:
            name, *bases = value["bases"]
            made: Any = type(str(name), tuple(map(self.decode, bases)), {"_number": number})
        elif value.get("coroutine"):
            remote = Remote(self, number, None)

            async def run() -> Any:
                return self.ask("await", remote)

            return run()
        else:
            plain = self.decode(value["plain"]) if "plain" in value else None
            made = Remote(self, number, plain, container=value.get("container", ""))
        self._others[number] = made
        return made


def pairs(mapping: dict[Any, Any]) -> list[Any]:
    return [[key, value] for key, value in mapping.items()]


def spread(make: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda parts: make(*parts)


PLAIN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    kind.__name__: (kind, take_apart, put_together)
    for kind, take_apart, put_together in (
        (tuple, list, tuple),
        (set, list, set),
        (frozenset, list, frozenset),
        (collections.deque, list, collections.deque),
        (dict, pairs, dict),
        (collections.Counter, pairs, lambda items: collections.Counter(dict(items))),
        (bytes, bytes.hex, bytes.fromhex),
        (bytearray, bytearray.hex, bytearray.fromhex),
        (complex, lambda value: [value.real, value.imag], spread(complex)),
        (range, lambda value: [value.start, value.stop, value.step], spread(range)),
        (decimal.Decimal, str, decimal.Decimal),
        (fractions.Fraction, lambda value: [*value.as_integer_ratio()], spread(fractions.Fraction)),
        (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
        (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
        (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
        (
            datetime.timedelta,
            lambda v: [v.days, v.seconds, v.microseconds],
            spread(datetime.timedelta),
        ),
    )
}
"""Name -> a type whose values are copied, and how it is taken apart into lists, texts and numbers,
and put together. Anything else stays in its process."""

BUILTIN_TYPES = {
    each: None
    for each in (*vars(builtins).values(), type(None), type(...), type(NotImplemented))
    if isinstance(each, type)
}


def plain_content(value: Any) -> Any:
    """Returns the plain value of a subclass instance without calling the subclass's methods."""
    kind = cast(Any, next(each for each in (*SCALARS, *CONTAINERS) if isinstance(value, each)))
    copied: dict[Any, Callable[[Any], Any]] = {
        dict: lambda content: dict(dict.items(content)),
        bool: int.__index__,
        int: int.__index__,
        float: float.__float__,
        complex: complex.__complex__,
        str: lambda text: str.__getitem__(text, slice(None)),
        bytes: lambda data: bytes.__getitem__(data, slice(None)),
    }
    return copied.get(kind, lambda values: kind(kind.__iter__(values)))(value)


def update(old: Any, new: Any) -> None:
    """Copies the changes that a remote call made to a mutable argument back into `old`."""
    if type(old) is not type(new):
        return
    if isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, set | dict):
        old.clear()
        old.update(new)


def run_awaitable(awaitable: Any) -> Any:
    import asyncio  # slow to import, and few answers need it

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


def find_name(names: dict[str, Any] | None, name: str) -> Any:
    if names is None or name not in names:
        raise NameError(f"name {name!r} is not defined")
    return names[name]


def remote_iterator(remote: Any) -> Iterator[Any]:
    while True:
        try:
            item = next(remote)
        except StopIteration:
            return
        yield item


def _convert(remote: Remote, name: str, *args: Any) -> Any:
    if name != "next" and (plain := remote._plain) is not None:
        return CONVERSIONS[name](plain, *args)
    if remote._mixed:
        raise TypeError(f"{name}() of a result computed by one of the answer's objects")
    return remote._peer.ask(name, remote, *args)


def _calculate(name: str, left: Any, right: Any) -> Any:
    """Applies a binary operator to two values, at least one of which is a `Remote`."""
    remotes = [each for each in (left, right) if type(each) is Remote]
    peer = remotes[0]._peer
    if len(remotes) == 2:
        result = peer.ask(name, left, right)
        mixed = left._mixed or right._mixed
    elif remotes[0]._plain is not None:
        plain = [each._plain if type(each) is Remote else each for each in (left, right)]
        return OPERATIONS[name](*plain)
    elif name in ORDER:
        raise TypeError("an object of the answer is not ordered against plain data")
    else:
        result, mixed = peer.ask(name, left, right), True
    if mixed and type(result) is Remote and result._scalar is None and not result._container:
        return Remote(peer, result._number, mixed=True)
    if mixed:
        raise TypeError(f"{name} of plain data and one of the answer's objects gave plain data")
    return result


def _forwarded(name: str) -> Any:
    return lambda self, *args, **kwargs: self._peer.ask(name, self, *args, **kwargs)


def _conversion(name: str) -> Any:
    return lambda self, *args: _convert(self, name, *args)


def _operator(name: str) -> tuple[Any, Any]:
    """Returns the method for the operand on the left, and the one for that on the right."""
    return (
        lambda self, other: _calculate(name, self, other),
        lambda self, other: _calculate(name, other, self),
    )


class Remote:
    """A reference to an object in the other process."""

    def __init__(
        self, peer: Peer, number: int, plain: Any = None, container: str = "", mixed: bool = False
    ) -> None:
        vars(self).update(_peer=peer, _number=number)
        vars(self).update(_scalar=plain, _container=container, _mixed=mixed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, value)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        raise UnusableError("tests cannot derive a class from one of the answer's classes")

    @property
    def _plain(self) -> Any:
        """The plain value of an instance of a subclass of a plain type, else None."""
        return self._peer.ask("plain", self) if self._container else self._scalar

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # isinstance() reads this
        if self._container:
            return next(each for each in CONTAINERS if each.__name__ == self._container)
        return Remote if self._scalar is None else type(self._scalar)

    def __instancecheck__(self, instance: Any) -> bool:
        return bool(self._peer.ask("isinstance", instance, self))

    def __eq__(self, other: object) -> bool:
        if type(other) is Remote:
            return bool(self._peer.ask("eq", self, other))
        return (plain := self._plain) is not None and bool(plain == other)

    def __contains__(self, item: Any) -> bool:
        return any(each == item for each in self)

    def __iter__(self) -> Iterator[Any]:
        if (plain := self._plain) is not None:
            return iter(plain)
        return remote_iterator(_convert(self, "iter"))

    __call__, __getitem__ = map(_forwarded, ("call", "getitem"))
    __setitem__, __delitem__ = map(_forwarded, ("setitem", "delitem"))
    __enter__, __neg__, __invert__ = map(_forwarded, ("enter", "neg", "invert"))

    def __exit__(self, kind: Any, error: Any, _: object) -> Any:
        return self._peer.ask("exit", self, kind, error, None)

    __abs__, __bool__, __complex__, __next__ = map(_conversion, ("abs", "bool", "complex", "next"))
    __float__, __format__, __hash__ = map(_conversion, ("float", "format", "hash"))
    __index__, __int__, __len__ = map(_conversion, ("index", "int", "len"))
    __repr__, __reversed__, __round__ = map(_conversion, ("repr", "reversed", "round"))
    __str__ = _conversion("str")
    (__lt__, _), (__le__, _), (__gt__, _), (__ge__, _) = map(_operator, ORDER)
    del _
    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("truediv")
    __floordiv__, __rfloordiv__ = _operator("floordiv")
    __mod__, __rmod__ = _operator("mod")
    __pow__, __rpow__ = _operator("pow")
    __matmul__, __rmatmul__ = _operator("matmul")
    __and__, __rand__ = _operator("and_")
    __or__, __ror__ = _operator("or_")
    __xor__, __rxor__ = _operator("xor")
    __lshift__, __rlshift__ = _operator("lshift")
    __rshift__, __rrshift__ = _operator("rshift")


# --- the process that runs the tests --------------------------------------------------------------

HELPERS = {
    name: module
    for module, names in (
        ("math", "math isclose fabs isnan isinf floor ceil trunc sqrt pi inf nan"),
        ("collections", "collections Counter OrderedDict defaultdict deque namedtuple"),
        ("copy", "copy deepcopy"),
        ("decimal", "decimal Decimal"),
        ("fractions", "fractions Fraction"),
        ("cmath", "cmath"),
        ("datetime", "timedelta"),
        ("itertools", "itertools"),
        ("json", "json"),
        ("random", "random"),
        ("re", "re"),
        ("string", "string"),
        ("typing", "typing List Dict Tuple Set Any Optional Union Callable Iterable"),
    )
    for name in names.split()
}
"""Name -> module, for names that tests often use without importing them, because most answers do.
Like builtins, they mean the standard library's unless the answer was asked to define that name."""


def run_tests(source: str, peer: Peer) -> None:
    """Runs the tests, looking up names they do not define in the answer; raises what they raise."""
    tree = ast.parse(source)
    exec(compile(tree, "tests.py", "exec"), TestNames(peer, names_of_answer(tree)))


class TestNames(dict[str, Any]):
    """The tests' globals: their own names first, then builtins and `HELPERS`, then the answer's."""

    def __init__(self, peer: Peer, of_answer: set[str]) -> None:
        super().__init__(__name__=TESTS_MODULE, __builtins__=builtins)
        self.peer, self.of_answer = peer, of_answer

    def __missing__(self, name: str) -> Any:
        if name not in self.of_answer and hasattr(builtins, name):
            raise KeyError(name)
        if name not in self.of_answer and (module_name := HELPERS.get(name)) is not None:
            module = importlib.import_module(module_name)
            self[name] = module if name == module_name else getattr(module, name)
            return self[name]
        value = self.peer.ask("name", name)
        if type(value) is Remote:
            self[name] = value  # plain data is not cached: the answer may rebind the name
        return value


def names_of_answer(tree: ast.Module) -> set[str]:
    """Returns the names that the tests take from the answer even though Python defines them too.

    An answer may define `sum` or `gcd` because the task asks for it, or `abs` and `isclose` to fool
    the tests. A name passed to one of the tests' own functions, as in `check(sum)`, is the
    answer's. Without one, and only if the tests use no name that Python lacks, the names whose
    calls contain no other call are the answer's.
    """
    bound = {
        each.id
        for each in ast.walk(tree)
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
    }
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(each.name)
        elif isinstance(each, ast.arg):
            bound.add(each.arg)
        elif isinstance(each, ast.alias):
            bound.add((each.asname or each.name).partition(".")[0])
        elif isinstance(each, ast.ExceptHandler) and each.name:
            bound.add(each.name)
    own = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    known = {*dir(builtins), *HELPERS}
    handed_over = {
        argument.id
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in own
        for argument in call.args
        if isinstance(argument, ast.Name) and argument.id not in bound
    }
    loaded = {
        each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and each.id not in bound
    }
    if handed_over or loaded - known:
        return handed_over
    return {
        call.func.id
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id in loaded
        and not any(isinstance(each, ast.Call) for part in call.args for each in ast.walk(part))
    }


def report_of(error: BaseException) -> dict[str, str]:
    """Returns the status and message to report for tests that raised `error`."""
    status = "memory" if isinstance(error, MemoryError) else "error"
    return {"status": status, "output": f"{type(error).__name__}: {error}"[:500]}


def judge(source: str, peer: Peer) -> dict[str, str]:
    """Waits until the answer's code has run, runs the tests and returns their status and output."""
    sys.set_int_max_str_digits(0)
    try:
        peer.ask("ready")
        run_tests(source, peer)
    except BaseException as error:
        report = report_of(error)
        if peer.lost:
            report["status"] = "exited"
        elif isinstance(error, UnusableError):
            report["status"] = "unusable"
        return report
    if peer.lost:
        return {"status": "exited", "output": "the code exited before its tests ended"}
    return {"status": "ok", "output": ""}
