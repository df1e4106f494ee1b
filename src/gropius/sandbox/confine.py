"""Confinement that a process applies to itself, where namespaces are forbidden: Landlock and seccomp.

Runs inside, before driver.py; standard library only. Landlock leaves the Python installation readable and one folder
writable; everything else (home, data, /proc, /etc) cannot be opened. seccomp refuses sockets, signals to others,
leaving the process group, and the calls of seccomp.py.
"""

from __future__ import annotations

import ctypes
import os
import struct

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH = 1
KEEP_CAPABILITIES, SEARCH, CAPSET = 8, 1 << 2, {"x86_64": 126, "aarch64": 91}
NO_NEW_PRIVS, SET_SECCOMP, FILTER_MODE, SET_PDEATHSIG, SET_DUMPABLE = 38, 22, 2, 1, 4
READ_FILE, READ_DIR, EXECUTE, WRITE_FILE, TRUNCATE = 4, 8, 1, 2, 1 << 14


class ConfinementFailed(Exception):
    """The kernel refused a part of the confinement; the program must not run."""


def call(libc: ctypes.CDLL, number: int, *arguments: object) -> int:
    """A raw system call; raises ConfinementFailed with the errno."""
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise ConfinementFailed(f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return int(result)


def landlock_version() -> int:
    """The Landlock interface the kernel offers; 0 when it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def confine(readable: list[str], writable: list[str], devices: list[str], filter_bytes: bytes) -> None:
    """Restrict this process and all its children: paths by Landlock, calls by the seccomp filter."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(SET_PDEATHSIG, 9, 0, 0, 0)
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise ConfinementFailed("no_new_privs")
    version = landlock_version()
    if version < 1:
        raise ConfinementFailed("the kernel has no Landlock")
    files = (1 << (13 + (version >= 2) + (version >= 3))) - 1
    if version >= 5:
        files |= 1 << 15  # ioctl on devices
    network = 3 if version >= 4 else 0
    scoped = 3 if version >= 6 else 0
    attributes = struct.pack("=QQQ", files, network, scoped)[: 8 + 8 * (version >= 4) + 8 * (version >= 6)]
    ruleset = call(libc, CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    everything = files & ~(1 << 15)
    rules = [(path, READ_FILE | READ_DIR | EXECUTE) for path in readable] + [(path, everything) for path in writable]
    rules += [(path, READ_FILE | WRITE_FILE) for path in devices]
    for path, access in rules:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rule = struct.pack("=Qi", access & files, fd)
        call(libc, ADD_RULE, ruleset, ctypes.c_int(PATH_BENEATH), rule, ctypes.c_uint32(0))
        os.close(fd)
    call(libc, RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)
    program = ctypes.create_string_buffer(filter_bytes)
    header = struct.pack("HxxxxxxP", len(filter_bytes) // 8, ctypes.addressof(program))
    if libc.prctl(SET_SECCOMP, FILTER_MODE, header, 0, 0) != 0:
        raise ConfinementFailed("seccomp")


def change_user(uid: int) -> None:
    """Become `uid` without privileges, except to search folders: the Python installation may lie below a private one.

    What can be opened at all stays decided by Landlock; the handle calls that the capability would allow are refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    sets = struct.pack("=6I", SEARCH, SEARCH, 0, 0, 0, 0)
    call(libc, CAPSET[os.uname().machine], struct.pack("=Ii", 0x20080522, 0), sets)
