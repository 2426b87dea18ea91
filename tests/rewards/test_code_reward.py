"""Programs are judged by their tests, and cannot get out, stay, cheat by leaving or take long."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agentrl.errors import GraderError
from agentrl_rewards.code import code, extract_code, grade_code, read_tests

FENCE = "Here it is:\n```python\n{}\n```\n"
SQUARE = "def f(x):\n    return x * x"


def sandbox_missing() -> str:
    if sys.platform != "linux":
        return "the sandbox needs Linux"
    try:
        grade_code(FENCE.format("pass"), "pass", deadline_s=20)
    except GraderError as error:
        return str(error)
    return ""


MISSING = sandbox_missing()
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=MISSING or "sandbox present")


def run(program, tests="pass", **options):
    """Grade a program; assert that it leaves no process. One that ends late raises GraderError."""
    grade = grade_code(FENCE.format(program), tests, **{"deadline_s": 5.0, **options})
    require_no_sandbox(timeout_s=20)  # another test's may be about to be killed with its parent
    return grade


def require_no_sandbox(timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while running := sandbox_processes():
        assert time.monotonic() < end, running
        time.sleep(0.02)


def sandbox_processes() -> list[str]:
    """Command lines of sandboxes that run below this process, or below none: left behind."""
    lines, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            parents[int(entry.name)] = int(parent)
            if "code_sandbox.py" in line and state != "Z":
                lines[int(entry.name)] = line
    found = []
    for pid, line in lines.items():
        below = pid
        while pid not in (0, 1, os.getpid()):
            below, pid = pid, parents.get(pid, 0)
        if pid == os.getpid() or below in lines:
            found.append(line)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```", "a"),
        ("```py\na\n```\n```python\nb\n\nc\n```", "b\n\nc"),
        ("```python\na\n```\n```\noutput\n```", "a"),
        ("<think>```python\na\n```</think>```python", None),
        ("```python\nnever closed", None),
        ("```rust\nfn main() {}\n```", None),
        ("print(1)", None),
    ],
)
def test_extract_code(text, expected):
    assert extract_code(text) == expected


@pytest.mark.parametrize(
    "tests",
    [
        *(None, "", [], 3, {}, {"inputs": ["1"], "outputs": []}, [""], {"inputs": "ab"}),
        ["assert f(1) == 1", "assert f(2) =="],
        "def check(candidate):\n    assert candidate(1) == 1",  # never called
    ],
)
def test_tests_that_cannot_be_read_or_would_judge_nothing_are_no_zero(tests):
    with pytest.raises(GraderError):
        read_tests(tests)


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "tests", "score"),
    [
        (SQUARE, "assert f(3) == 9", 1),
        (SQUARE, "assert f(3) == 8", 0),
        (SQUARE, ["assert f(3) == 9", "assert f(2) == 4"], 1),
        ("print(int(input()) ** 2)", {"inputs": ["3\n", "4"], "outputs": ["9", "16\n"]}, 1),
        ("print(int(input()) ** 2)", {"inputs": ["3\n", "4"], "outputs": ["9", "17\n"]}, 0),
        ("print(1)\nexit(0)", {"inputs": [""], "outputs": ["1"]}, 1),
        ("print(1)\nexit(1)", {"inputs": [""], "outputs": ["1"]}, 0),
        (SQUARE, {"inputs": [[3]], "outputs": [9], "fn_name": "f"}, 1),
        (SQUARE, json.dumps({"inputs": [[3]], "outputs": [9], "fn_name": "f"}), 1),
        (
            "class Solution:\n    def g(self, x):\n        return (x, 'é')",
            {"inputs": [[3]], "outputs": [[3, "é"]], "fn_name": "g"},
            1,
        ),
        ("def f(", "pass", 0),
        ("raise ValueError", "pass", 0),
        ("import threading\nt = threading.Thread(target=int)\nt.start()\nt.join()", "pass", 1),
        ("import math, json, heapq, collections, itertools, re, random, ssl", "pass", 1),
    ],
)
def test_verdicts(program, tests, score):
    assert run(program, tests).score == score


@needs_sandbox
@pytest.mark.parametrize(
    ("printed", "expected", "score"),
    [
        ("0.30000000000000004", "0.3", 1),
        ("0.333333", "0.333333333333", 1),
        ("0.5 1", "0.50 1", 1),
        ("-0.0", "0.0", 1),
        ("2", "2.0", 1),
        ("123456789012.5", "123456789012.50001", 1),
        ("inf", "inf", 1),
        ("nan", "3.0", 0),
        ("0.34", "0.333333333333", 0),
        ("0.5 1 2", "0.50 1", 0),
        ("0.5\n1", "0.50 1", 0),
        ("1000001", "1000000", 0),
        ("1.0000001", "1", 0),
        ("1_0.0", "10.0", 0),
        ("0x1.0", "1.0", 0),
        ("1.2.3", "1.2.30", 0),
        ("yes", "YES", 0),
        ("1" + "0" * 5000, "1" + "0" * 5000, 1),
    ],
)
def test_printed_decimals_have_a_tolerance_and_nothing_else(printed, expected, score):
    assert run(f"print({printed!r})", {"inputs": [""], "outputs": [expected]}).score == score


@needs_sandbox
@pytest.mark.parametrize(
    ("result", "expected", "score"),
    [
        ("0.1 + 0.2", 0.3, 1),
        ("[[1 / 3, 1]]", [[0.33333, 1]], 1),
        ("{'a': 0.5000001}", {"a": 0.5}, 1),
        ("2", 2.0, 1),
        ("0.334", 0.33333, 0),
        ("1.000001", 1, 0),
        ("[0.5]", [0.5, 0.5], 0),
        ("'0.5'", 0.5, 0),
        ("float('nan')", 1.5, 0),
        ("10**400", 1.5, 0),
    ],
)
def test_floats_of_a_result_have_a_tolerance(result, expected, score):
    tests = {"inputs": [[]], "outputs": [expected], "fn_name": "f"}
    assert run(f"def f():\n    return {result}", tests).score == score


@needs_sandbox
def test_programs_may_read_and_print_integers_of_any_length():
    tests = {"inputs": ["1" + "0" * 4999 + "7"], "outputs": ["1" + "0" * 4999 + "8"]}
    assert run("print(int(input()) + 1)", tests).score == 1


@needs_sandbox
def test_partial_credit_and_statuses():
    tests = ["assert f(1) == 1", "assert f(1) == 2", "assert f(2) == 4", "assert f(2) == 5"]
    grade = run(SQUARE, tests, partial=True)
    assert grade.score == 0.5
    assert grade.statuses == ("passed", "error", "passed", "error")
    assert run(SQUARE, tests).statuses == ("passed", "error", "not_run", "not_run")


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        'import os\nos.write(3, b\'{"status": "ok", "output": ""}\')\nos._exit(0)',
        "import os\nos.close(3)",
        "print('all tests passed')\nimport os\nos._exit(0)",
        "import os\nos.execv('/usr/bin/true', ['true'])",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(-1, 9)\nassert 0",
        "import threading, os\nthreading.Timer(0.05, os._exit, [0]).start()\nwhile True: pass",
    ],
)
def test_leaving_early_is_no_way_to_pass(program):
    assert run(program, "assert False").score == 0


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(60)", "timeout"),
        ("import signal\nsignal.pthread_sigmask(0, range(1, 65))\nwhile True: pass", "timeout"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
        ("import os\nos.fork()", "error"),
        ("import subprocess\nsubprocess.run(['true'])", "error"),
        # On a machine with no core to spare it does not get to its limit in time.
        ("x = []\nwhile True: x.append(bytearray(10 ** 7))", "memory timeout"),
        ("x = 'a' * 10 ** 11", "memory"),
        ("while True: print('x' * 1000)", "output_limit"),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(10 ** 6))", "error"),
        ("for i in range(10 ** 6): open(str(i), 'w').close()", "error"),
        ("x = 10 ** 10 ** 10", "timeout"),
        ("def f(): f()\nimport sys\nsys.setrecursionlimit(10 ** 9)\nf()", "memory exited timeout"),
    ],
)
def test_bombs_are_contained(program, status):
    """Time and orphans are asserted by `run`."""
    assert run(program, deadline_s=0.5).statuses[0] in status.split()


@needs_sandbox
@pytest.mark.parametrize("max_threads", [1, 4])
def test_threads_have_a_limit_and_processes_are_refused(max_threads):
    program = (
        "import threading, time\n"
        "threads = 1\n"
        "try:\n"
        "    for _ in range(20):\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "        threads += 1\n"
        "except RuntimeError: pass\n"
        "print(threads)"
    )
    tests = {"inputs": [""], "outputs": [str(max_threads)]}
    assert run(program, tests, max_threads=max_threads).score == 1


HOLDS = {
    # Each program asks for 4 MB pieces until it is refused; `held` is how many it got.
    "anonymous memory": "kept.append(mmap.mmap(-1, PIECE)); kept[-1].write(bytes(PIECE))",
    "private mapping": (
        "kept.append(mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS));"
        "kept[-1].write(bytes(PIECE))"
    ),
    "objects": "kept.append(bytearray(PIECE))",
    "System V shared memory": (
        "i = libc.shmget(0, PIECE, 0o1600); assert i >= 0; a = libc.shmat(i, None, 0);"
        "assert a != -1; libc.memset(ctypes.c_void_p(a), 1, PIECE); libc.shmdt(ctypes.c_void_p(a))"
    ),
    "memory file": "f = os.memfd_create('x'); os.write(f, bytes(PIECE)); kept.append(f)",
    "working directory": "open(str(held), 'wb').write(bytes(PIECE))",
    "deleted files": (
        "f = os.open('x', os.O_CREAT | os.O_WRONLY); os.unlink('x');"
        "assert os.write(f, bytes(PIECE)) == PIECE; kept.append(f)"
    ),
    "pipes": (
        "r, w = os.pipe(); fcntl.fcntl(w, 1031, PIECE // 4); kept.extend((r, w));"
        "os.set_blocking(w, False); os.write(w, bytes(PIECE))"
    ),
    "sockets": (
        "a, b = socket.socketpair(); a.setblocking(False); kept.extend((a, b));"
        "held += a.send(bytes(PIECE)) / PIECE - 1"
    ),
    "processes": (
        "p = os.fork(); x = bytearray(PIECE)\n        if p == 0:\n            time.sleep(60)"
    ),
    "message queues": (
        "q = libc.msgget(0, 0o1600); assert q >= 0\n        for _ in range(PIECE // 8192):\n"
        "            assert libc.msgsnd(q, b'1234567' + bytes(8185), 8184, 0o4000) == 0"
    ),
    "thread stacks": (
        "threading.stack_size(PIECE);"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    ),
    "keys": (
        "assert libc.syscall(248, b'user', str(held).encode(), bytes(32000), 32000, -2) >= 0;"
        "held -= 1 - 1 / 128"
    ),
}


@needs_sandbox
@pytest.mark.parametrize("way", HOLDS)
def test_what_code_can_hold_is_bounded_in_every_way(way):
    program = (
        "import ctypes, fcntl, mmap, os, socket, threading, time\n"
        "libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_long\n"
        f"PIECE = 4 << 20\nkept, held = [], 0\n"
        "try:\n"
        "    while held < 100:\n"
        f"        {HOLDS[way]}\n"
        "        held += 1\n"
        "except (OSError, MemoryError, AssertionError, RuntimeError): pass\n"
        "print(held * 4 <= 1.1 * 128)"
    )
    tests = {"inputs": [""], "outputs": ["True"]}
    grade = run(program, tests, memory_bytes=128 << 20, deadline_s=20)
    assert grade.score == 1, grade.message


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.write(3, b'[' * 60000)",
        "import os\nos.write(3, b'[' * 60000)\nos._exit(0)",
        'import os\nos.write(3, b\'{"status": "ok"}\')\nos._exit(0)',
        'import os\nos.write(3, b\'{"status": "passed", "output": ""}\')\nos._exit(0)',
        'import os\nos.write(3, b\'{"status": 7, "output": []}\')\nos._exit(0)',
        "import os, time\nkept = [os.memfd_create('x') for _ in range(40)]\ntime.sleep(60)",
        "import sys\nsys.stdout.write(chr(0xd800))",
        "import os\nos.write(3, bytes(70000))",
        "import os\nos.write(3, b'\\n{' + b'\\xff' * 70000)",
        "import os\nos.write(1, b'\\xff' * 70000)",
    ],
)
def test_what_a_program_writes_is_its_score_never_a_failed_grader(program):
    assert run(program, {"inputs": [""], "outputs": ["7"]}, deadline_s=2.0).score == 0


@needs_sandbox
def test_installed_packages_cannot_be_imported():
    program = (
        "import sys, glob\n"
        "sys.path += glob.glob('/usr/lib/python3*/*-packages') + glob.glob(\n"
        "    '/usr/local/lib/python3*/*-packages') + glob.glob(sys.base_prefix + "
        "'/lib/python3*/*-packages')\n"
        "import pip"
    )
    grade = run(program)
    assert grade.statuses == ("error",) and "No module named 'pip'" in grade.message


@pytest.mark.slow
@needs_sandbox
def test_an_interpreter_below_tmp(tmp_path):
    """A copy of this one's prefix stands there, as from a tool that unpacks interpreters."""
    prefix = Path(tempfile.mkdtemp(dir="/tmp")) / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib").mkdir()
    shutil.copy(os.path.realpath(sys.executable), prefix / "bin" / "python3")
    stdlib = Path(os.__file__).parent
    ignored = shutil.ignore_patterns("site-packages", "dist-packages", "test", "__pycache__")
    shutil.copytree(stdlib, prefix / "lib" / version, ignore=ignored, symlinks=True)
    script = (
        "from agentrl_rewards.code import grade_code\n"
        "print(grade_code('```python\\nimport tempfile\\ntempfile.TemporaryFile()\\n```', 'pass'))"
    )
    done = subprocess.run(
        [prefix / "bin" / "python3", "-c", script],
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHOME": str(prefix)},
        capture_output=True,
        text=True,
    )
    shutil.rmtree(prefix.parent)
    assert "score=1.0" in done.stdout, done.stderr + done.stdout


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)",
        "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)",
        "import socket\nsocket.getaddrinfo('example.com', 80)",
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(chr(0) + 'agentrl-test')",
        "import socket\nsocket.socket(40, socket.SOCK_STREAM)",  # AF_VSOCK
    ],
)
def test_there_is_no_network(program):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        program = program.replace("{port}", str(server.getsockname()[1]))
        assert run(program).statuses == ("error",)
        with pytest.raises(BlockingIOError):
            server.accept()


@needs_sandbox
def test_there_is_nothing_of_the_host_to_see(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "seen")
    secret = tmp_path / "secret.txt"
    secret.write_text("seen")
    for program in (
        f"open({str(secret)!r})",
        f"open({str(Path(__file__))!r})",
        "open('/etc/passwd')",
        "open('/proc/1/environ')",
        "open('/usr/new', 'w')",
        "open('/new', 'w')",
        "import os\nos.listdir('/home')",
        "import os\nos.environ['SECRET_KEY']",
        "import os\nos.environ['HOME']",
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "import ctypes\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
        "import os\nos.chroot('/work')",
        "import os\nos.setuid(0)",
        "import os\nfor fd in range(5, 64):\n    try: os.fstat(fd)\n    except OSError: pass\n"
        "    else: break\nelse: assert False",
    ):
        assert run(program).statuses == ("error",), program
    assert run("import os\nopen('x', 'w').write('y')\nassert os.getcwd() == '/work'").score == 1


@needs_sandbox
def test_expected_outputs_are_not_in_the_sandbox():
    program = (
        "import gc\n"
        "print(any('forty' + 'two' in str(x) for x in gc.get_objects() if isinstance(x, dict)))"
    )
    grade = run(program, {"inputs": ["forty"], "outputs": ["fortytwo"]})
    assert grade.statuses == ("wrong",)
    assert run(program, {"inputs": ["x"], "outputs": ["False"]}).score == 1


@needs_sandbox
def test_nothing_of_one_run_is_left_to_the_next():
    assert run("open('/tmp/mark', 'w').write('x')").score == 1
    assert run("open('/tmp/mark')").score == 0


@needs_sandbox
def test_a_killed_caller_leaves_no_process():
    script = (
        "from agentrl_rewards.code import grade_code\n"
        "grade_code('```python\\nwhile True: pass\\n```', 'pass', deadline_s=60)"
    )
    caller = subprocess.Popen([sys.executable, "-c", script])
    end = time.monotonic() + 10
    while len(sandbox_processes()) < 3:
        assert time.monotonic() < end, "the sandbox did not start"
        time.sleep(0.05)
    caller.kill()
    caller.wait()
    require_no_sandbox(timeout_s=3)


@needs_sandbox
async def test_from_asyncio():
    calls = (code(FENCE.format(SQUARE), f"assert f(3) == {n}") for n in (9, 8, 9, 8))
    assert await asyncio.gather(*calls) == [1, 0, 1, 0]


def test_a_sandbox_that_cannot_be_set_up_is_a_grader_error(monkeypatch, tmp_path):
    broken = tmp_path / "broken.py"
    for program in (
        'print(\'{"error": "unshare: not permitted"}\')',
        "pass",
        "import time; time.sleep(30)",
    ):
        broken.write_text(program)
        monkeypatch.setattr("agentrl_rewards.code.SANDBOX_FILE", broken)
        monkeypatch.setattr("agentrl_rewards.code.GRACE_S", 0.3 if "sleep" in program else 5.0)
        with pytest.raises(GraderError):
            grade_code(FENCE.format("pass"), "pass", deadline_s=0.2 if "sleep" in program else 5)


def test_no_code_scores_0_without_a_process(monkeypatch):
    monkeypatch.setattr("agentrl_rewards.code.SANDBOX_FILE", os.devnull)
    assert grade_code("no code here", "pass").score == 0
    assert grade_code(FENCE.format("#" * 200_000), "pass").score == 0
