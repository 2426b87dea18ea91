"""Says which system calls a container may make.

The list is Linux's calls without those that the engine's own profile refuses to a process without
capabilities, and without those that tell what is in the page cache. Containers of one image share
its pages there, so code under test could leave what it saw in one container for another to find.
It could also time its reads of files; no profile prevents that.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from agentrl.env.container.engine import engine_errors, is_podman

if TYPE_CHECKING:
    from docker import DockerClient

PAGE_CACHE = """
mincore cachestat preadv2 pwritev2 fadvise64 fadvise64_64 arm_fadvise64_64 readahead
io_uring_setup io_uring_enter io_uring_register
"""
WITH_SYS_ADMIN = """
clone fsconfig fsmount fsopen fspick mount mount_setattr move_mount open_tree pivot_root setns
umount umount2 unshare
"""
"""Calls that mount, which a container with the capability SYS_ADMIN may make."""
ALLOWED = """
_llseek _newselect accept accept4 access alarm arch_prctl bind brk capget capset chdir chmod chown
chown32 chroot clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep
clock_nanosleep_time64 close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit
exit_group faccessat faccessat2 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchown32
fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat
fstat64 fstatat fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue
futex_time64 futex_wait futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu
getcwd getdents getdents64 getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups
getgroups32 getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid
getresgid32 getresuid getresuid32 getrlimit getrusage getsid getsockname getsockopt gettid
gettimeofday getuid getuid32 getxattr inotify_add_watch inotify_init inotify_init1
inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup
io_submit ioctl ioprio_get ioprio_set ipc kill landlock_add_rule landlock_create_ruleset
landlock_restrict_self lchown lchown32 lgetxattr link linkat listen listxattr llistxattr llseek
lremovexattr lseek lsetxattr lstat lstat64 madvise map_shadow_stack membarrier memfd_create mkdir
mkdirat mknod mknodat mlock mlock2 mlockall mmap mmap2 modify_ldt mprotect mq_getsetattr mq_notify
mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink mremap
mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep newfstatat nice open
openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect
poll ppoll ppoll_time64 prctl pread64 preadv prlimit64 process_vm_readv process_vm_writev pselect6
pselect6_time64 ptrace pwrite64 pwritev read readdir readlink readlinkat readv recvfrom recvmmsg
recvmmsg_time64 recvmsg remap_file_pages removexattr rename renameat renameat2 restart_syscall
rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam
sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop semtimedop_time64
sendfile sendfile64 sendmmsg sendmsg sendto set_robust_list set_thread_area set_tid_address
setdomainname setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32
sethostname setitimer setpgid setpriority setregid setregid32 setresgid setresgid32 setresuid
setresuid32 setreuid setreuid32 setrlimit setsid setsockopt setuid setuid32 setxattr sgetmask
shmat shmctl shmdt shmget shutdown sigaction sigaltstack signal signalfd signalfd4 sigpending
sigprocmask sigreturn sigsuspend socketcall socketpair splice ssetmask stat stat64 statfs statfs64
statx symlink symlinkat sync sync_file_range sync_file_range2 syncfs sysinfo tee tgkill time
timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime
timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64
times tkill truncate truncate64 ugetrlimit umask uname unlink unlinkat utime utimensat
utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write writev
"""
NEW_NAMESPACES = 0x7E020000
"""Flags of `clone` that make namespaces."""
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
ENOSYS = 38


def profile(*, sys_admin: bool) -> dict[str, Any]:
    """Returns a seccomp profile in the engine's format.

    Args:
        sys_admin: True for a container that has the capability SYS_ADMIN.
    """

    def allow(name: str, operator: str, value: int, second: int = 0) -> dict[str, Any]:
        test = {"index": 0, "value": value, "valueTwo": second, "op": operator}
        return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [test]}

    allowed = [*ALLOWED.split(), *(WITH_SYS_ADMIN.split() if sys_admin else ())]
    rules = [
        {"names": allowed, "action": "SCMP_ACT_ALLOW"},
        # Programs fall back to older calls, such as `clone`, whose flags can be seen here.
        {"names": ["clone3", *PAGE_CACHE.split()], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
        allow("clone", "SCMP_CMP_MASKED_EQ", NEW_NAMESPACES),
        allow("socket", "SCMP_CMP_NE", 40),  # AF_VSOCK reaches the host of a virtual machine
        *(allow("personality", "SCMP_CMP_EQ", value) for value in PERSONALITIES),
    ]
    architectures = [
        {
            "architecture": "SCMP_ARCH_X86_64",
            "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        },
        {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]},
    ]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 1,
        "archMap": architectures,
        "syscalls": rules,
    }


def seccomp_options(client: DockerClient, *, sys_admin: bool = False) -> list[str]:
    """Returns the `security_opt` of a container that makes no other calls.

    An engine without seccomp, and Podman, which reads profiles from files of its own machine only,
    keep their own rules: for them the list is empty.

    Raises:
        EnvError: the engine does not answer.
    """
    host = os.environ.get("DOCKER_HOST", "")
    if host not in _takes_profiles:
        with engine_errors():
            options = client.info().get("SecurityOptions") or []
            takes = "name=seccomp" in ",".join(options) and not is_podman(client)
        _takes_profiles[host] = takes
    if not _takes_profiles[host]:
        return []
    return [f"seccomp={json.dumps(profile(sys_admin=sys_admin))}"]


_takes_profiles: dict[str, bool] = {}
"""DOCKER_HOST -> whether the engine there takes profiles."""
