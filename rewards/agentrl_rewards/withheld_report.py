"""Reports the values that tests compare, in canonical form (see `withheld.py`).

`withheld.py` puts the text of this module into the tests, so it uses the standard library alone and
the syntax of Python 3.6. A value is JSON: None, truth values, numbers and strings as they are,
anything else as `[kind, ...]`. Plain data counts by value, whatever its class says about itself.
"""

import collections
import collections.abc
import datetime
import decimal
import enum
import fractions
import hashlib
import json
import os
import re
import types

FILE = ""
"""File to which reports are appended, one line of JSON each: the number of the probe, the value and
the name of the running test. Set by the transformed tests."""
MAX_CHARS = 200000
MAX_DEPTH = 20
PLAIN = (int, float, str)
SPELLED = (datetime.date, datetime.time, datetime.timedelta, range, slice, type(re.compile("")))
NAMED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def value(number, found):
    """Reports the actual side of an assertion."""
    try:
        text = json.dumps(canonical(found), sort_keys=True)
    except Exception as error:
        text = json.dumps(["unprintable", type(error).__name__])
    if len(text) > MAX_CHARS:
        text = json.dumps(["digest", hashlib.sha256(text.encode()).hexdigest()])
    test = json.dumps(os.environ.get("PYTEST_CURRENT_TEST", ""))
    with open(FILE, "a") as file:
        file.write(f"[{number}, {text}, {test}]\n")
    return True


def truth(number, found):
    """Reports whether an assertion holds, where nothing more can be reported."""
    return value(number, bool(found))


class raises:
    """Reports the exception that a block raises, None if it raises none."""

    def __init__(self, number):
        self.number = number
        self.type = self.value = self.exception = self.tb = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None and not issubclass(kind, Exception):
            return False  # a skip, an exit or an interrupt
        self.type, self.value, self.exception, self.tb = kind, error, error, trace
        value(self.number, error)
        return True

    def match(self, *arguments, **options):
        return True


def raised(number, function, *arguments, **options):
    """Calls a function and reports the exception that it raises."""
    with raises(number) as caught:
        function(*arguments, **options)
    return caught


def canonical(found, outer=()):
    """Returns a value in canonical form."""
    kind = type(found)
    if found is None or kind is bool:
        return found
    for plain in PLAIN:
        if issubclass(kind, plain):
            return {int: int.__int__, float: float.__float__, str: str.__str__}[plain](found)
    if issubclass(kind, (bytes, bytearray)):
        return ["bytes", bytes(found).hex()]
    if issubclass(kind, complex):
        return ["complex", found.real, found.imag]
    if id(found) in outer or len(outer) >= MAX_DEPTH:
        return ["again"]
    outer += (id(found),)
    for known, name in ((list, "list"), (tuple, "tuple"), (collections.deque, "deque")):
        if issubclass(kind, known):
            return [name, [canonical(each, outer) for each in known.__iter__(found)]]
    for known in (set, frozenset):
        if issubclass(kind, known):
            return ["set", _sorted(canonical(each, outer) for each in known.__iter__(found))]
    if issubclass(kind, dict):
        return _pairs(dict.items(found), outer)
    if issubclass(kind, type):
        return ["type", _names(found)]
    if issubclass(kind, BaseException):
        return ["raised", _names(kind), str(found)]
    if issubclass(kind, enum.Enum):
        return ["enum", kind.__name__, found.name]
    if issubclass(kind, (decimal.Decimal, fractions.Fraction)):
        return _exact(found)
    if issubclass(kind, SPELLED):
        return ["text", kind.__name__, repr(found)]
    if issubclass(kind, NAMED):
        return ["name", getattr(found, "__qualname__", getattr(found, "__name__", ""))]
    return _of_library(found, kind, outer) or _of_object(found, kind, outer)


def _exact(found):
    try:
        number = fractions.Fraction(found)
    except (ValueError, OverflowError):
        return ["text", "Decimal", str(found)]  # not a number, or infinite
    if number.denominator == 1:
        return int(number)
    return ["number", str(number)]


def _of_library(found, kind, outer):
    """Returns the canonical form of an object of a well-known library; None for any other."""
    known = {base.__module__.split(".")[0] + "." + base.__name__ for base in kind.__mro__}
    if "astropy.Quantity" in known:
        return ["quantity", canonical(found.value, outer), str(found.unit)]
    if "numpy.MaskedArray" in known:
        return ["masked", canonical(found.tolist(), outer)]
    if "numpy.ndarray" in known:
        return ["array", canonical(found.tolist(), outer)]
    if "numpy.generic" in known:
        plain = found.item()
        return ["text", kind.__name__, str(found)] if plain is found else canonical(plain, outer)
    if "pandas.DataFrame" in known or "pandas.Series" in known:
        parts = [found.index.tolist(), found.values.tolist()]
        parts.append(list(found.columns) if "pandas.DataFrame" in known else found.name)
        return ["pandas", canonical(parts, outer)]
    if "pandas.Index" in known:
        return ["array", canonical(found.tolist(), outer)]
    if "xarray.DataArray" in known or "xarray.Dataset" in known:
        return ["xarray", canonical(found.to_dict(), outer)]
    if "sympy.Basic" in known or "sympy.MatrixBase" in known:
        import sympy

        return ["sympy", sympy.srepr(found)]
    return None


def _of_object(found, kind, outer):
    if issubclass(kind, collections.abc.Mapping):
        return _pairs([(key, found[key]) for key in found], outer)
    if isinstance(found, os.PathLike):
        return ["text", "path", str(os.fspath(found))]
    attributes = dict(getattr(found, "__dict__", {}))
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(found, name):
                attributes[name] = getattr(found, name)
    public = {name: each for name, each in attributes.items() if not str(name).startswith("_")}
    if public:
        return ["object", kind.__name__, {str(k): canonical(public[k], outer) for k in public}]
    if kind.__repr__ is object.__repr__:
        return ["object", kind.__name__, {}]
    return ["text", kind.__name__, re.sub("0x[0-9a-fA-F]+", "0x", repr(found))]


def _pairs(items, outer):
    return ["dict", _sorted([canonical(k, outer), canonical(v, outer)] for k, v in items)]


def _sorted(values):
    return sorted(values, key=lambda each: json.dumps(each, sort_keys=True))


def _names(kind):
    return [base.__name__ for base in kind.__mro__]
