"""Runs one untrusted program in this process, which `sandbox` starts for it and then kills.

A file of its own that imports the standard library only, run as `python -I confined.py`. It
reads a JSON object from stdin, gives up what the program must not have, runs the program, and
writes one line to a pipe: a secret token and the outcome. A program that leaves early, kills the
interpreter or prints what it likes writes no such line.

What is given up (Linux): processes and threads, sockets, signals to others, and other system
calls, by seccomp; files outside the current folder, but for reading, by Landlock. Limits hold
everywhere: memory, CPU time, sizes of files, open files.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import sys
from typing import Any

MAX_MESSAGE = 500

# Names of refused system calls; a machine lacks the old ones.
REFUSED: dict[str, dict[str, int]] = {
    "x86_64": {
        "socket": 41, "connect": 42, "bind": 49, "listen": 50, "socketpair": 53, "clone": 56,
        "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "truncate": 76, "chmod": 90,
        "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101, "setpriority": 141,
        "sched_setscheduler": 144, "setrlimit": 160, "chroot": 161, "mount": 165, "umount2": 166,
        "reboot": 169, "init_module": 175, "tkill": 200, "tgkill": 234, "add_key": 248,
        "request_key": 249, "keyctl": 250, "fchownat": 260, "fchmodat": 268, "unshare": 272,
        "perf_event_open": 298, "prlimit64": 302, "open_by_handle_at": 304, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313, "bpf": 321,
        "execveat": 322, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "truncate": 45, "chroot": 51, "fchmod": 52, "fchmodat": 53,
        "fchownat": 54, "fchown": 55, "unshare": 97, "init_module": 105, "ptrace": 117,
        "sched_setscheduler": 119, "kill": 129, "tkill": 130, "tgkill": 131, "setpriority": 140,
        "reboot": 142, "setrlimit": 164, "socket": 198, "socketpair": 199, "bind": 200,
        "listen": 201, "connect": 203, "add_key": 217, "request_key": 218, "keyctl": 219,
        "clone": 220, "execve": 221, "perf_event_open": 241, "prlimit64": 261,
        "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "finit_module": 273, "bpf": 280, "execveat": 281,
        "userfaultfd": 282,
    },
}  # fmt: skip
# Newer calls have the same number on all machines.
REFUSED_EVERYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438,
    "mount_setattr": 442, "fchmodat2": 452,
}  # fmt: skip
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # x86_64: a second table of the same calls
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
KILL_PROCESS, ERRNO_EPERM, ALLOW = 0x80000000, 0x00050001, 0x7FFF0000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock, on all machines
WRITE_FILE = 1 << 1
WRITES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # remove and make
REFER, TRUNCATE = 1 << 13, 1 << 14  # since Landlock's versions 2 and 3

_libc = ctypes.CDLL(None, use_errno=True)


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jump_true", ctypes.c_uint8),
        ("jump_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("first", ctypes.POINTER(_Instruction))]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def main() -> None:
    """Runs the program that stdin describes; never returns."""
    order = json.loads(sys.stdin.buffer.read())
    token, pipe, source = order["token"], order["pipe"], order["program"]
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    write, leave, dumps = os.write, os._exit, json.dumps  # the program may replace theirs
    outcome: dict[str, Any]
    try:
        _limit(order["limits"])
        if order["isolates"]:
            _refuse_writes(os.getcwd())
            _refuse_calls()
    except (OSError, ValueError, KeyError) as error:
        outcome = {"unavailable": f"{type(error).__name__}: {error}"}
        source = None
    if source is not None:
        try:
            exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
            outcome = {"passed": True}
        except BaseException as error:  # SystemExit too: the tests did not run to their end
            outcome = {"passed": False, "message": _describe(error)}
    write(pipe, f"{token} {dumps(outcome)}\n".encode())
    leave(0)


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
    except BaseException:  # its own `__str__` fails
        return type(error).__name__


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def _refuse_writes(folder: str) -> None:
    """Makes every file outside `folder` read-only for this process, but for /dev/null."""
    version = _call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    handled = WRITES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    attributes = ctypes.c_uint64(handled)
    ruleset = _call(
        CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(8), ctypes.c_uint32(0)
    )
    of_a_file = handled & (WRITE_FILE | TRUNCATE)
    for path, allowed in ((folder, handled), (os.devnull, of_a_file)):
        place = os.open(path, os.O_PATH)
        rule = _PathRule(allowed=allowed, folder=place)
        _call(
            ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0)
        )
        os.close(place)
    _no_new_privileges()
    _call(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _refuse_calls() -> None:
    """Makes the listed system calls fail with EPERM, for good."""
    machine = platform.machine()
    numbers = sorted({*REFUSED[machine].values(), *REFUSED_EVERYWHERE.values()})
    code = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL_PROCESS)]
    code.append((LOAD, 0, 0, 0))
    if machine == "x86_64":
        code.append((JUMP_AT_LEAST, len(numbers) + 1, 0, X32_BIT))
    for i, number in enumerate(numbers):
        code.append((JUMP_EQUAL, len(numbers) - i, 0, number))
    code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO_EPERM)]
    array = (_Instruction * len(code))(*(_Instruction(*one) for one in code))
    program = _Program(len(code), array)
    _no_new_privileges()
    filtered = (ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(program), None, None)
    if _libc.prctl(PR_SET_SECCOMP, *filtered) != 0:
        _fail("seccomp")


def _no_new_privileges() -> None:
    if _libc.prctl(PR_SET_NO_NEW_PRIVS, *(ctypes.c_ulong(value) for value in (1, 0, 0, 0))) != 0:
        _fail("no_new_privs")


def _call(number: int, *arguments: Any) -> int:
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        _fail("Landlock")
    return result


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
