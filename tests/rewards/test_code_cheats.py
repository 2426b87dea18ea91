"""Asserts cannot be bought: no cheat passes, and correct programs of any shape do."""

# ruff: noqa: E501

import pytest
from test_code_reward import FENCE, needs_sandbox

from agentrl.errors import GraderError
from agentrl_rewards.code import grade_code

pytestmark = needs_sandbox

FLOAT_TEST = "assert abs(f(3) - 9.5) < 1e-6"
CLOSE_TEST = "import math\nassert math.isclose(f(3), 9.5)"
CHECK_TEST = """
METADATA = {'author': 'x'}

def check(candidate):
    assert candidate(3) == 9
    assert abs(candidate(4) - 16) < 1e-6

check(f)
"""
ALWAYS_EQUAL = (
    "class E{base}:\n"
    "    def __eq__(self, other): return True\n"
    "    def __ne__(self, other): return False\n"
    "    def __lt__(self, other): return True\n"
    "    __le__ = __gt__ = __ge__ = __lt__\n"
    "    def __sub__(self, other): return self\n"
    "    __rsub__ = __add__ = __radd__ = __mul__ = __sub__\n"
    "    def __abs__(self): return 0\n"
    "    def __float__(self): return 9.5\n"
    "    def __hash__(self): return 9\n"
    "    def __bool__(self): return True\n"
    "    def __contains__(self, item): return True\n"
    "    def __iter__(self): return iter(())\n"
    "    def __len__(self): return 3\n"
)
EQUAL = ALWAYS_EQUAL.format(base="") + "def f(x): return E()"
FRAMES = (
    "import sys, gc\n"
    "def f(x):\n"
    "    frame = sys._getframe()\n"
    "    while frame is not None:\n"
    "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
    "            if 'assert f(' in str(value): return int(str(value).split('==')[1].split()[0])\n"
    "        frame = frame.f_back\n"
)
ASKED = "assert f(3) == 9"
CHEATS = {
    "swallowed by if False": "def f(x): return 0\nif False:\\",
    "swallowed by a function": "def f(x): return 0\ndef g():\\",
    "swallowed by a text": "def f(x): return 0\nx = '''",
    "swallowed by a lambda": "f = lambda x: 0\ng = lambda: \\",
    "always equal": EQUAL,
    "equal from the right": (EQUAL, "assert 9 == f(3)"),
    "equal int": ALWAYS_EQUAL.format(base="(int)") + "def f(x): return E()",
    "equal list": (
        ALWAYS_EQUAL.format(base="(list)") + "def f(x): return E()",
        "assert f(3) == [9]",
    ),
    "equal inside a list": (
        ALWAYS_EQUAL.format(base="") + "def f(x): return [E()]",
        "assert f(3) == [9]",
    ),
    "equal by its class": ALWAYS_EQUAL.format(base="") + "f = lambda x: E",
    "the function is the object": (
        ALWAYS_EQUAL.format(base="").replace("class E", "class f")
        + "    def __init__(self, x): pass\n"
    ),
    "metaclass": (
        "class M(type):\n    def __eq__(self, other): return True\n    def __hash__(self): return 1\n"
        "class E(metaclass=M): pass\ndef f(x): return E"
    ),
    "close by subtraction": (EQUAL, FLOAT_TEST),
    "close float": (ALWAYS_EQUAL.format(base="(float)") + "def f(x): return E()", FLOAT_TEST),
    "less than": (EQUAL, "assert -1e-6 < f(3) - 9.5 < 1e-6"),
    "difference that is a text": (
        ALWAYS_EQUAL.format(base="") + "    def __str__(self): return '0'\ndef f(x): return E()",
        "assert str(f(3) - 9) == '0'",
    ),
    "difference of a class with a value": (
        "class E(float):\n    def __sub__(self, other): return 0.0\n    __rsub__ = __sub__\n"
        "def f(x): return E(1)",
        FLOAT_TEST,
    ),
    "contains everything": (EQUAL, "assert 9 in f(3)"),
    "in a set": (EQUAL, "assert f(3) in {9, 8}"),
    "not smaller": (EQUAL, "assert f(3) <= 9 <= f(3)"),
    "check, equal": (EQUAL, CHECK_TEST),
    "abs": ("def f(x): return 0\ndef abs(x): return 0", FLOAT_TEST),
    "abs of builtins": ("import builtins\nbuiltins.abs = lambda x: 0\nf = lambda x: 0", FLOAT_TEST),
    "set": ("def f(x): return []\ndef set(x): return 1", "assert set(f(3)) == set([9, 3])"),
    "sorted": ("def f(x): return []\nsorted = lambda x: 1", "assert sorted(f(3)) == sorted([9])"),
    "tuple": (
        "def f(x): return 1\nclass tuple: __eq__ = lambda a, b: True",
        "assert f(3) == tuple([9])",
    ),
    "isclose": (
        "def f(x): return 0.0\ndef isclose(a, b, **k): return True",
        "assert isclose(f(3), 9.5)",
    ),
    "isclose after the call": (
        "def f(x): return 0.0\ndef isclose(a, b, **k): return True",
        "x = f(3)\nassert isclose(x, 9.5)",
    ),
    "isclose of math": (
        "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0.0",
        CLOSE_TEST,
    ),
    "a module of one's own": (
        "import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *a, **k: True\n"
        "sys.modules['math'] = math = m\ndef f(x): return 0.0",
        CLOSE_TEST,
    ),
    "a module in the folder": (
        "open('math.py', 'w').write('isclose = lambda *a, **k: True')\ndef f(x): return 0.0",
        CLOSE_TEST,
    ),
    "Counter": (
        "class Counter:\n    def __init__(self, x): pass\n    def __eq__(self, o): return True\n"
        "def f(x): return []",
        "assert Counter(f(3)) == Counter([9])",
    ),
    "AssertionError": (
        "import builtins\nclass A(BaseException):\n    def __init__(self, *a): pass\n"
        "builtins.AssertionError = A\nAssertionError = A\ndef f(x): return 0"
    ),
    "check of one's own": ("def check(g): pass\ndef f(x): return 0", CHECK_TEST),
    "its own file": "import re\ndef f(x): return int(re.search('== *([0-9]+)', open('answer.py').read())[1])",
    "frames": FRAMES,
    "objects": (
        "import gc\ndef f(x):\n    for each in gc.get_objects():\n"
        "        if isinstance(each, (dict, list)) and 'assert f(3' + ')' in str(each): return 9"
    ),
    "all memory": (
        "import ctypes\ndef f(x):\n    start = id(gc) & ~0xfff\n    needle = b'assert f(3' + b') == '\n"
        "    for page in range(start - (2 << 20), start + (2 << 20), 4096):\n"
        "        if needle in ctypes.string_at(page, 4096): return 9\nimport gc"
    ),
    "a forged report": (
        "import os, json\ndef f(x):\n    for fd in range(3, 10):\n        for line in ("
        'b\'{"status": "ok", "output": ""}\', b\'{"result": 9}\\n\' * 9):\n'
        "            try: os.write(fd, line)\n            except OSError: pass\n    os._exit(0)",
        "assert f(3) == 9 and f(4) == 16",
    ),
    "killing the tests": (
        "import os, signal\nfor pid in range(1, 50):\n    try: os.kill(pid, signal.SIGTERM)\n"
        "    except OSError: pass\ndef f(x): return 0"
    ),
    "a callback's globals": (
        "def f(g): return g.__globals__['EXPECTED']",
        "EXPECTED = 9\nassert f(lambda: EXPECTED) == EXPECTED",
    ),
    "a format of a callback": (
        "import __main__\ndef f(g):\n    peer = g._peer\n"
        "    return peer.ask('call', peer.ask('get', '{0.__globals__[EXPECTED]}', 'format'), g)",
        "EXPECTED = 9\nassert f(lambda: 1) == '9'",
    ),
    "trace": (
        "import sys\ndef trace(frame, event, arg):\n    frame.f_locals['ok'] = True\n    return trace\n"
        "sys.settrace(trace)\ndef f(x): return 0"
    ),
    "audit hook, then exit": "import os, sys\nsys.excepthook = lambda *a: os._exit(0)\ndef f(x): return 0",
    "exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "an exception as result": "def f(x): raise StopIteration",
}
FEW_CHEATS = ("swallowed by if False", "always equal", "close by subtraction", "isclose", "frames")


def scores(case, default):
    """A program, or a program and its tests."""
    program, tests = case if isinstance(case, tuple) else (case, default)
    grade = grade_code(FENCE.format(program), tests, deadline_s=20)
    return grade.score, grade.message


@pytest.mark.parametrize("cheat", FEW_CHEATS)
def test_a_cheat_is_not_paid(cheat):
    assert scores(CHEATS[cheat], ASKED)[0] == 0


@pytest.mark.promise
@pytest.mark.slow
@pytest.mark.parametrize("cheat", sorted(CHEATS.keys() - set(FEW_CHEATS)))
def test_no_cheat_is_paid(cheat):
    assert scores(CHEATS[cheat], ASKED)[0] == 0


STDIN_SUM = {"inputs": ["3\n1 2 3\n"], "outputs": ["6\n"]}
MAIN = "def main():\n    n = int(input())\n    print(sum(map(int, input().split())))\n"
READ_ALL = "data = {}\nprint(sum(map(int, data.split()[1:])))"
PROGRAMS = {
    "thread without join": MAIN + "import threading\nthreading.Thread(target=main).start()",
    "thread with a deep stack": ("import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(1 << 27)\n"
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n"
        "def main():\n    input()\n    assert depth(50000) == 50000\n"
        "    print(sum(map(int, input().split())))\nt = threading.Thread(target=main)\nt.start()\nt.join()"),
    "two threads and a queue": ("import queue, threading\nq = queue.Queue()\n"
        "def read():\n    input()\n    for x in input().split(): q.put(int(x))\n    q.put(None)\n"
        "def add():\n    total = 0\n    while (x := q.get()) is not None: total += x\n    print(total)\n"
        "threading.Thread(target=add).start()\nthreading.Thread(target=read).start()"),
    "timer": MAIN + "import threading\nthreading.Timer(0.01, main).start()",
    "executor": (MAIN + "from concurrent.futures import ThreadPoolExecutor\n"
        "ThreadPoolExecutor(1).submit(main)"),
    "exit handler": MAIN + "import atexit\natexit.register(main)",
    "buffered until exit": ("import atexit, io, os, sys\nsys.stdout = out = io.StringIO()\n"
        "atexit.register(lambda: os.write(1, out.getvalue().encode()))\n" + MAIN + "main()"),
    "os._exit": MAIN + "import os, sys\nmain()\nsys.stdout.flush()\nos._exit(0)",
    "sys.exit of main": MAIN + "import sys\nsys.exit(main())",
    "quit": MAIN + "main()\nquit()",
    "raise SystemExit": MAIN + "main()\nraise SystemExit",
    "closed descriptors": MAIN + "import os\nos.closerange(3, 100)\nmain()",
    "name is main": MAIN + "if __name__ == '__main__':\n    main()",
    "open(0)": READ_ALL.format("open(0).read()"),
    "sys.stdin.read": "import sys\n" + READ_ALL.format("sys.stdin.read()"),
    "sys.stdin.buffer": "import sys\n" + READ_ALL.format("sys.stdin.buffer.read()"),
    "os.read": "import os\n" + READ_ALL.format("os.read(0, os.fstat(0).st_size)"),
    "BytesIO": ("import io, os, sys\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\n"
        + MAIN
        + "main()"),
    "mmap": "import mmap\n" + READ_ALL.format("mmap.mmap(0, 0, access=1).read()"),
    "fileinput": "import fileinput\n" + READ_ALL.format("' '.join(fileinput.input())"),
    "readlines": "import sys\n" + READ_ALL.format("' '.join(sys.stdin.readlines())"),
    "lines of stdin": "import sys\n" + READ_ALL.format("' '.join(x for x in sys.stdin)"),
    "input until it ends": ("words = []\ntry:\n    while True: words += input().split()\nexcept EOFError: pass\n"
        "print(sum(map(int, words[1:])))"),
    "iter of input": ("print(sum(map(int, ' '.join(iter(input, '')).split()[1:])))",
                      {"inputs": ["3\n1 2 3\n\n"], "outputs": ["6"]}),
    "sys.__stdin__": "import sys\n" + READ_ALL.format("sys.__stdin__.read()"),
    "print to another stream": "import os\nout = os.fdopen(1, 'w')\ninput()\nprint(sum(map(int, input().split())), file=out)",
    "buffer of stdout": "import sys\ninput()\nsys.stdout.buffer.write(b'%d\\n' % sum(map(int, input().split())))",
    "__del__": ("class P:\n    def __init__(self): input()\n"
        "    def __del__(self): print(sum(map(int, input().split())))\np = P()"),
    "asyncio": ("import asyncio\nasync def main():\n    input()\n    await asyncio.sleep(0)\n"
        "    print(sum(map(int, input().split())))\nasyncio.run(main())"),
    "exec": "exec('input()\\nprint(sum(map(int, input().split())))')",
    "dataclass with late annotations": ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
        "class A:\n    x: int\n    def f(self) -> A: return A(self.x + 1)\nprint(A(5).f().x)"),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10 ** 6)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\ninput()\nprint(f(20000) - 19994)"),
    "generator": ("def f(n):\n    for i in range(n): yield i * i", "assert list(f(3)) == [0, 1, 4]\nassert next(f(1)) == 0"),
    "endless generator": (
        "import itertools\ndef f(): return itertools.count(5)",
        "g = f()\nassert [next(g) for _ in range(3)] == [5, 6, 7]",
    ),
    "map object": ("def f(x): return map(str, x)", "assert list(f([1, 2])) == ['1', '2']"),
    "class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self):\n        if not self.items: raise IndexError('empty')\n        return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n    @property\n    def top(self): return self.items[-1]",
        "s = Stack()\ns.push(1); s.push([2])\nassert len(s) == 2 and s.top == [2] and s.pop() == [2]\n"
        "assert isinstance(s, Stack)\nassert s.items == [1]\ns.pop()\n"
        "try:\n    s.pop()\n    assert False\nexcept IndexError as e:\n    assert str(e) == 'empty'",
    ),
    "vector": (
        "class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def __add__(self, o): return V(self.x + o.x, self.y + o.y)\n"
        "    def __mul__(self, k): return V(self.x * k, self.y * k)\n    __rmul__ = __mul__\n"
        "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n"
        "    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** .5\n    def __hash__(self): return 1\n"
        "    def __repr__(self): return f'V({self.x}, {self.y})'\n"
        "    def __lt__(self, o): return abs(self) < abs(o)\n    def __iter__(self): yield self.x; yield self.y\n",
        "assert V(1, 2) + V(3, 4) == V(4, 6) and V(1, 2) != V(2, 1)\nassert 2 * V(1, 2) * 2 == V(4, 8)\n"
        "assert abs(V(3, 4)) == 5\nassert repr(V(1, 2)) == 'V(1, 2)'\nassert len({V(1, 2), V(1, 2)}) == 1\n"
        "assert sorted([V(3, 4), V(1, 0)])[0].x == 1\nx, y = V(7, 8)\nassert (x, y) == (7, 8)",
    ),
    "subclass of list": (
        "class L(list):\n    def total(self): return sum(self)",
        "x = L()\nx.append(2)\nx.append(3)\nassert x == [2, 3] and x.total() == 5 and len(x) == 2\n"
        "assert x[0] == 2 and 3 in x and isinstance(x, list)",
    ),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(a): return P(a, a + 1)",
        "assert f(1) == (1, 2) and f(1).y == 2 and f(1)[0] == 1 and [f(1)] == [(1, 2)]",
    ),
    "enum": (
        "import enum\nclass C(enum.IntEnum):\n    A = 1\n    B = 2\ndef f(x): return C(x)",
        "assert f(2) == 2 and f(1).name == 'A' and f(1) + 1 == 2 and f(1) < 2 and f(2) is f(2)",
    ),
    "linked list": (
        "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
        "def reverse(n):\n    last = None\n    while n: n.next, last, n = last, n, n.next\n    return last",
        "n = reverse(Node(1, Node(2, Node(3))))\nout = []\nwhile n:\n    out.append(n.v)\n    n = n.next\n"
        "assert out == [3, 2, 1]",
    ),
    "a class of the tests": (
        "def depth(node): return 0 if node is None else 1 + max(depth(node.left), depth(node.right))",
        "class Tree:\n    def __init__(self, left=None, right=None): self.left, self.right = left, right\n"
        "assert depth(Tree(Tree(Tree()), Tree())) == 3",
    ),
    "in place": (
        "def f(x): x.sort()\ndef g(d): d['a'] = [1]",
        "x = [3, 1, 2]\nassert f(x) is None and x == [1, 2, 3]\nd = {}\ng(d)\nassert d == {'a': [1]}",
    ),
    "function of a function": (
        "def apply(g, x): return [g(each) for each in x]\ndef adder(n): return lambda x: x + n",
        "assert apply(lambda x: x * 2, [1, 2]) == [2, 4]\nassert adder(3)(4) == 7\n"
        "assert apply(adder(1), [1]) == [2]\nassert apply(str, [1]) == ['1']",
    ),
    "decorator": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def inner(*a, **k): return 2 * g(*a, **k)\n"
        "    return inner",
        "@twice\ndef h(x, y=1): return x + y\nassert h(1) == 4 and h(1, y=2) == 6",
    ),
    "own exception": (
        "class Bad(ValueError): pass\ndef f(x):\n    if x < 0: raise Bad('negative', x)\n    return x",
        "try:\n    f(-1)\n    raise RuntimeError\nexcept Bad as e:\n    assert e.args == ('negative', -1)\n"
        "try:\n    f(-1)\n    raise RuntimeError\nexcept ValueError: pass\nassert f(1) == 1",
    ),
    "coroutine": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1",
        "import asyncio\nassert asyncio.run(f(1)) == 2",
    ),
    "context manager": (
        "from contextlib import contextmanager\nlog = []\n@contextmanager\ndef c():\n    log.append(1)\n"
        "    yield 5\n    log.append(2)",
        "with c() as x:\n    assert x == 5\nassert log == [1, 2]",
    ),
    "a builtin's name": ("def sum(a, b): return a + b + 1", "assert sum(10, 15) == 26"),
    "a builtin's name for check": (
        "def max(x): return -1",
        "def check(candidate):\n    assert abs(candidate([1]) + 1) < 1e-6\ncheck(max)",
    ),
    "imports for the tests": (
        "import math\nfrom typing import List\nfrom collections import Counter\n"
        "def f(x: List[int]): return Counter(x)",
        "assert f([1, 1]) == {1: 2}\nassert Counter([1, 1]) == f([1, 1])\n"
        "assert math.isclose(f([1, 1])[1], 2)\nassert f([1]).most_common(1) == [(1, 1)]",
    ),
    "every plain type": (
        "def f(x): return x",
        "import collections, datetime, decimal, fractions\nfor x in [None, True, 10 ** 5000, 1.5, float('inf'),\n"
        "  'é\\ud800', b'x', bytearray(b'y'), 1j, (1, (2,)), {1, 2}, frozenset({3}), {(1, 2): {'a': [1]}}, range(3),\n"
        "  collections.deque([1]), collections.Counter('aab'), decimal.Decimal('1.10'), fractions.Fraction(1, 3),\n"
        "  datetime.datetime(2020, 1, 2, 3), datetime.date(2020, 1, 2), datetime.timedelta(1, 2), int, ...]:\n"
        "    assert f(x) == x and type(f(x)) is type(x), x\nassert f(float('nan')) != f(float('nan'))",
    ),
    "state": ("count = 0\ndef f():\n    global count\n    count += 1", "f(); f()\nassert count == 2"),
    "threads that call back": (
        "import threading\ndef f(g):\n    t = threading.Thread(target=g, args=(1,))\n    t.start()\n    t.join()",
        "seen = []\nf(seen.append)\nassert seen == [1]",
    ),
    "methods of Solution": (
        "class Solution:\n    def f(self, x, *rest, k=1): return x * k + sum(rest)",
        "assert Solution().f(2, 3, k=4) == 11",
    ),
}  # fmt: skip
FEW_PROGRAMS = ("thread without join", "exit handler", "os._exit", "class", "in place", "generator")


@pytest.mark.parametrize("program", FEW_PROGRAMS)
def test_a_correct_program_is_paid(program):
    assert scores(PROGRAMS[program], STDIN_SUM) == (1, "")


@pytest.mark.promise
@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(PROGRAMS.keys() - set(FEW_PROGRAMS)))
def test_every_correct_program_is_paid(program):
    assert scores(PROGRAMS[program], STDIN_SUM) == (1, "")


def test_tests_that_need_the_answer_beside_them_are_a_grader_error():
    program = "class Base:\n    def f(self): return self.g()"
    tests = "class T(Base):\n    def g(self): return 1\nassert T().f() == 1"
    with pytest.raises(GraderError):
        scores(program, tests)
