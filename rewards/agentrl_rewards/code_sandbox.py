"""The sandboxed half of the code reward: a program that runs one answer's code against its cases.

Started by `agentrl_rewards.code` as a file (`python -I -S code_sandbox.py`), never imported. It
reads one JSON request from standard input, writes one JSON reply and ends.

    launcher (trusted)  --fork-->  init, pid 1 (trusted)  --fork per case-->  the answer's code
                                                                              the tests (asserts)

The launcher enters new mount, network, pid and ipc namespaces, so the code sees no network
interface, no other process, and no files but the interpreter's own (read-only) and a small
in-memory working directory. It runs as a user without capabilities, under resource limits. When
pid 1 exits, the kernel kills every process left in the namespace.

Memory is limited without cgroups, so that the limit works in any container: the code is a single
process with a limited address space, and a system call filter (libseccomp) blocks everything that
holds memory outside of it: child processes, shared memory, message queues, memory files, larger
pipes, passed descriptors, non-local sockets, io_uring and keyrings.

Tests that are Python code run in a separate process that contains nothing of the answer and calls
it through `code_calls.py`. Their text is in a file (`tests_fd`) that only that process reads, so
the answer's process is never forked with the tests in its memory.

    {"code": str, "kind": "asserts"|"stdin"|"function", "cases": [...], "function": str,
     "tests_fd": int, limits}          cases of asserts are [position, length] in that file
    -> {"cases": [{"status": str, "output": str}, ...]}    one per case that was run
    -> {"error": str}                                      the sandbox could not be set up

Linux only. Expected outputs are never sent here: the caller compares them.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import errno
import fcntl
import gc
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CAPABILITY_VERSION_3 = 0x20080522
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
"""System call numbers: the C library has no wrapper."""
MAX_WORK_BYTES = 16 << 20
"""Size limit of the in-memory working directory, which also never exceeds 1/32 of the memory."""
MAX_OUTPUT_BYTES = 1 << 20
"""Limit on what a case may print, and on the length of its report."""
SYSTEM_DIRS = ("/usr", "/lib", "/lib64")

SCMP_ACT_ALLOW, SCMP_ACT_ERRNO = 0x7FFF0000, 0x00050000
SCMP_CMP_NE, SCMP_CMP_EQ, SCMP_CMP_MASKED_EQ = 1, 4, 7
CLONE_THREAD, F_SETPIPE_SZ, AF_UNIX, NOBODY = 0x00010000, 1031, 1, 65534
DENIED_CALLS = """
    fork vfork memfd_create memfd_secret shmget shmat shmctl semget semop semctl msgget msgsnd
    msgrcv msgctl mq_open mq_unlink vmsplice tee splice sendmsg sendmmsg recvmsg recvmmsg
    add_key keyctl request_key io_uring_setup io_uring_enter io_uring_register io_setup
    userfaultfd bpf ptrace perf_event_open process_vm_readv process_vm_writev pidfd_getfd kcmp
    unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen fsmount
    inotify_init inotify_init1 fanotify_init open_by_handle_at setsid mlock mlock2 mlockall
    setsockopt
"""

libc = ctypes.CDLL(None, use_errno=True)


def load_calls() -> ModuleType:
    """Loads `code_calls.py` by its path, because this program runs without installed packages."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "code_calls.py")
    spec = importlib.util.spec_from_file_location("code_calls", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


code_calls = load_calls()


class SetupError(Exception):
    pass


def checked(result: int, what: str) -> None:
    if result != 0:
        raise SetupError(f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    result = libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() or None)
    checked(result, f"mounting {target}")


def enter_namespaces() -> tuple[int, int]:
    """Leaves the host's namespaces and returns the uid and gid to run the answer's code as."""
    flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC
    if os.geteuid() == 0 and libc.unshare(flags) == 0:
        # RLIMIT_NPROC does not count root's processes. Each run gets its own uid, so that its
        # processes do not count against another run's limit.
        user = (1 << 30) + int.from_bytes(os.urandom(3))
        return user, user
    user, group = os.geteuid(), os.getegid()
    checked(libc.unshare(flags | CLONE_NEWUSER), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return NOBODY, NOBODY


def work_bytes(memory: int) -> int:
    return min(MAX_WORK_BYTES, memory // 32)


def build_root(user: int, group: int, memory: int) -> None:
    """Replaces the root file system by a read-only one with the interpreter and an empty /work.

    Raises:
        SetupError: a mount was refused.
    """
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    # Mount over /proc: it exists on every system and is no longer needed. The new root is a
    # directory inside the mount, because a process under chroot may not create user namespaces.
    base = "/proc"
    root = f"{base}/root"
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir(root, 0o755)
    prefix = os.path.realpath(sys.base_prefix)
    stdlib = os.path.dirname(os.path.realpath(os.__file__))
    wanted = [*SYSTEM_DIRS, prefix if prefix != "/" else stdlib]
    for source in dict.fromkeys(wanted):
        if not os.path.isdir(source):
            continue
        if source not in SYSTEM_DIRS and source.startswith("/usr/"):
            continue
        target = root + source
        os.makedirs(target, 0o755, exist_ok=True)
        mount(source, target, None, MS_BIND)
        # In a user namespace, the flags a mount already has are locked and must be repeated.
        kept = os.statvfs(target).f_flag & 0x40F
        flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | kept
        mount(None, target, None, flags)
        hide_packages(target)
    os.mkdir(f"{root}/dev", 0o755)
    with open(f"{root}/dev/null", "w"):
        pass
    mount("/dev/null", f"{root}/dev/null", None, MS_BIND)
    os.mkdir(f"{root}/work")
    with suppress(FileExistsError):  # the interpreter may be installed below /tmp
        os.symlink("work", f"{root}/tmp")
    owner = f"size={work_bytes(memory)},nr_inodes=1024,mode=700,uid={user},gid={group}"
    mount("tmpfs", f"{root}/work", "tmpfs", MS_NOSUID | MS_NODEV, owner)
    mount(None, base, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(base)
    number = PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise SetupError(f"the sandbox does not support {os.uname().machine} processors")
    checked(libc.syscall(number, b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "leaving the old root")
    os.chroot("/root")
    os.chdir("/work")


def hide_packages(root: str) -> None:
    """Mounts empty folders over the site-packages folders below an interpreter's prefix."""
    for library in ("lib", "lib64", "local/lib"):
        with suppress(OSError):
            for name in os.listdir(f"{root}/{library}"):
                for packages in ("site-packages", "dist-packages"):
                    target = f"{root}/{library}/{name}/{packages}"
                    if name.startswith("python") and os.path.isdir(target):
                        flags = MS_RDONLY | MS_NOSUID | MS_NODEV
                        mount("tmpfs", target, "tmpfs", flags, "size=4k,mode=755")


def drop_privileges(user: int, group: int) -> None:
    if os.geteuid() == 0:  # real root, not mapped into a user namespace
        os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    checked(libc.capset(header, (ctypes.c_uint32 * 6)()), "dropping capabilities")
    # pid 1 holds the pipe to the caller, so the code must not be able to attach to it
    checked(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


class Argument(ctypes.Structure):
    """`struct scmp_arg_cmp`: compares one argument of a system call with a value."""

    _fields_ = (
        ("index", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def make_call_filter() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """Returns libseccomp and the system call filter, for the answer's process to load.

    Raises:
        SetupError: libseccomp is missing or rejects a rule.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise SetupError("libseccomp.so.2 is missing (Debian package libseccomp2)") from error
    library.seccomp_init.restype = ctypes.c_void_p
    call_filter = ctypes.c_void_p(library.seccomp_init(SCMP_ACT_ALLOW))

    def deny(name: str, error: int, *conditions: tuple[int, int, int, int]) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number == -1:  # unknown to this libseccomp
            raise SetupError(f"libseccomp does not know the system call {name}; upgrade it")
        arguments = (Argument * len(conditions))(*(Argument(*each) for each in conditions))
        action, count = SCMP_ACT_ERRNO | error, ctypes.c_uint(len(conditions))
        result = library.seccomp_rule_add_array(call_filter, action, number, count, arguments)
        if result != 0:
            raise SetupError(f"system call filter: cannot deny {name}: {os.strerror(-result)}")

    for name in DENIED_CALLS.split():
        deny(name, errno.EPERM)
    deny("clone", errno.EPERM, (0, SCMP_CMP_MASKED_EQ, CLONE_THREAD, 0))
    deny("clone3", errno.ENOSYS)  # a filter can't read its flags; the C library falls back to clone
    deny("fcntl", errno.EPERM, (1, SCMP_CMP_EQ, F_SETPIPE_SZ, 0))
    for name in ("socket", "socketpair"):  # asyncio needs a local socket pair
        deny(name, errno.EPERM, (0, SCMP_CMP_NE, AF_UNIX, 0))
    return library, call_filter


def set_limits(request: dict, user: int) -> None:
    memory, cpu_s = request["memory_bytes"], int(request["deadline_s"]) + 1
    # If the caller is not root, the launcher and pid 1 count in the same user namespace, and
    # asserts run in one more process beside the answer's.
    num_others = (2 if user == NOBODY else 1) + (request["kind"] == "asserts")
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NPROC, request["max_threads"] + num_others),
        (resource.RLIMIT_FSIZE, work_bytes(memory)),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (value, value))


# --- the answer's process -------------------------------------------------------------------------


NO_FILTER = b"no filter"
"""Written in place of a report if the kernel rejects the filter, before the code has run."""


def run_case(
    request: dict, case: object, result_fd: int | None, calls: tuple[int, int] | None
) -> None:
    """Runs the code and one case in this process, writes a report to `result_fd` and exits.

    For asserts, another process runs the tests and reports; this one serves their calls.
    """
    output, status = "", "ok"
    builtins.exit = builtins.quit = sys.exit  # as without -S
    os.environ["TMPDIR"] = "/work"
    atexit._clear()
    sys.set_int_max_str_digits(0)
    kind = request["kind"]
    try:
        names, failure = run_code(request["code"], "__main__" if kind == "stdin" else "answer")
        if calls is not None:
            code_calls.Peer(*calls, names, failure).serve()
            os._exit(0)
        if failure is not None and not (
            kind == "stdin" and isinstance(failure, SystemExit) and failure.code in (None, 0)
        ):
            raise failure
        if kind == "function":
            name = request["function"]
            function = names[name] if name in names else getattr(names["Solution"](), name)
            output = json.dumps(function(*case))  # type: ignore[misc]
        else:
            finish_program(names)
    # Whatever the answer raises, including SystemExit and KeyboardInterrupt, is its result.
    except BaseException as error:
        no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
        status = "memory" if no_memory or isinstance(error, MemoryError) else "error"
        output = f"{type(error).__name__}: {error}"[:500]
    flush()
    if result_fd is not None:
        with suppress(OSError):  # the code may have closed it
            os.ftruncate(result_fd, 0)  # the code may have written to it
            os.lseek(result_fd, 0, os.SEEK_SET)
            write_all(result_fd, json.dumps({"status": status, "output": output}).encode())
    os._exit(0 if status == "ok" else 1)


def run_code(code: str, name: str) -> tuple[dict, BaseException | None]:
    """Runs the answer's code as a module called `name`; returns its globals and what it raised."""
    write_file("answer.py", code)
    sys.argv = ["answer.py"]
    module = ModuleType(name)
    module.__file__ = "answer.py"
    sys.modules[name] = module
    try:
        exec(compile(code, "answer.py", "exec"), vars(module))
    except BaseException as error:  # reported by the caller
        return vars(module), error
    return vars(module), None


def finish_program(names: dict) -> None:
    """Shuts down as the interpreter would: waits for threads, runs exit handlers, closes files."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    flush()
    names.clear()
    gc.collect()


def flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]


def run_tests(case: object, result_fd: int, calls: tuple[int, int], tests_fd: int) -> None:
    """Runs one case's tests against the answer's process, reports to `result_fd` and exits."""
    position, length = case  # pyright: ignore[reportGeneralTypeIssues]
    source = os.pread(tests_fd, length, position).decode("utf-8", "surrogatepass")
    os.close(tests_fd)
    report = code_calls.judge(source, code_calls.Peer(*calls, None))
    write_all(result_fd, json.dumps(report).encode())
    os._exit(0)


def write_file(name: str, text: str) -> None:
    with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def start(
    fds: dict[int, int], call_filter: tuple[ctypes.CDLL, ctypes.c_void_p], run: Callable[[], None]
) -> int:
    """Forks a process that calls `run` and has no open descriptors but these; returns its pid.

    Args:
        fds: descriptor number in the new process -> descriptor of this process.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        moved = {target: fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for target, fd in fds.items()}
        for target, fd in moved.items():
            os.dup2(fd, target)
        null = os.open("/dev/null", os.O_RDWR)
        for target in {0, 1, 2} - fds.keys():
            os.dup2(null, target)
        os.closerange(max(*fds, 2) + 1, 64)
        # closefd=False: the descriptors stay open even if the code closes its streams.
        source = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
        sink = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stdin = sys.__stdin__ = source
        sys.stdout = sys.__stdout__ = sink
        library, rules = call_filter
        if library.seccomp_load(rules) == 0:
            run()
        else:
            os.write(3, NO_FILTER)
    finally:
        os._exit(1)


def judge_case(
    request: dict, case: object, end: float, call_filter: tuple[ctypes.CDLL, ctypes.c_void_p]
) -> dict:
    """Forks the processes of one case and waits until they report or `end` (monotonic seconds)."""
    text = case if request["kind"] == "stdin" and isinstance(case, str) else ""
    # Files in memory, whose size is limited: a process that writes a lot waits for nobody.
    stdin, stdout, result = (os.memfd_create(name) for name in ("stdin", "stdout", "result"))
    os.pwrite(stdin, text.encode("utf-8", "surrogatepass"), 0)
    own_fds = [stdin, stdout, result]
    if request["kind"] == "asserts":
        asked_read, asked_write = os.pipe()
        reply_read, reply_write = os.pipe()
        tests = {3: result, 4: reply_read, 5: asked_write, 6: request["tests_fd"]}
        reporter = start(tests, call_filter, lambda: run_tests(case, 3, (4, 5), 6))
        answer = {0: stdin, 1: stdout, 3: asked_read, 4: reply_write}
        start(answer, call_filter, lambda: run_case(request, case, None, (3, 4)))
        for fd in (asked_read, asked_write, reply_read, reply_write):
            os.close(fd)
    else:
        answer = {0: stdin, 1: stdout, 3: result}
        reporter = start(answer, call_filter, lambda: run_case(request, case, 3, None))
    ended = os.pidfd_open(reporter)
    left_s = max(0.0, end - time.monotonic())
    is_late = not select.select([ended], [], [], left_s)[0]
    exit_code = None if is_late else os.waitstatus_to_exitcode(os.waitpid(reporter, 0)[1])
    kill_everyone()
    output, data = (os.pread(fd, MAX_OUTPUT_BYTES + 1, 0) for fd in (stdout, result))
    for fd in (*own_fds, ended):
        os.close(fd)
    if is_late:
        return {"status": "timeout", "output": ""}
    if max(len(output), len(data)) > MAX_OUTPUT_BYTES:
        return {"status": "output_limit", "output": ""}
    if data == NO_FILTER:
        raise SetupError("the kernel refuses a system call filter")
    report = read_report(data)
    if report is None and request["kind"] == "stdin" and exit_code == 0:
        report = {"status": "ok"}  # os._exit(0), as many programs do
    if report is None:
        return {"status": "exited", "output": "the code exited before its tests ended"}
    if request["kind"] == "stdin" and report["status"] == "ok":
        return {"status": "ok", "output": output.decode("utf-8", "replace")}
    return {"status": report["status"], "output": report["output"]}


def read_report(data: bytes) -> dict | None:
    """Returns the report if it is whole, else None.

    The answer's code can write to this file too, so every field is checked.
    """
    try:
        report = json.loads(data)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(report, dict) and isinstance(report.get("output"), str)
    known = ("ok", "error", "memory", "exited", "unusable")
    return report if is_whole and report.get("status") in known else None


def kill_everyone() -> None:
    """Kills and reaps all processes of the namespace except pid 1, which is the caller."""
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


# --- the launcher --------------------------------------------------------------------------------


def serve(request: dict, reply_fd: int, user: int, group: int, end: float) -> None:
    """Runs the cases as pid 1, until one fails unless `all_cases` is set, and writes the reply."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    outcomes: list[dict] = []
    reply: dict = {"cases": outcomes}
    try:
        call_filter = make_call_filter()
        build_root(user, group, request["memory_bytes"])
        drop_privileges(user, group)
        # Again, because dropping privileges clears it.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        set_limits(request, user)
        for case in request["cases"]:
            outcomes.append(judge_case(request, case, end, call_filter))
            status = outcomes[-1]["status"]
            if status == "timeout" or (status != "ok" and not request["all_cases"]):
                break
    except (SetupError, OSError) as error:
        reply = {"error": str(error)}
    write_all(reply_fd, json.dumps(reply).encode())


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    reply_fd = os.dup(1)
    os.set_inheritable(reply_fd, False)
    end = time.monotonic() + request["deadline_s"]
    try:
        user, group = enter_namespaces()
    except (SetupError, OSError) as error:
        write_all(reply_fd, json.dumps({"error": str(error)}).encode())
        return
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            serve(request, reply_fd, user, group, end)
            status = 0
        finally:
            os._exit(status)
    # pid 1 enforces the deadline and dies with this process. This loop notices if the caller was
    # killed.
    child, poll = os.pidfd_open(pid), select.poll()
    poll.register(child, select.POLLIN)
    poll.register(reply_fd, 0)  # reports only that the reader is gone
    if any(fd == reply_fd for fd, _ in poll.poll()):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
