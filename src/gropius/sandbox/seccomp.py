"""The seccomp filter: which system calls a program is refused, as classic BPF for the kernel.

A refused call fails with EPERM (`clone3` with ENOSYS, so that the C library falls back to `clone`, whose flags a filter
can see). A call of another architecture kills the process. Numbers are those of the Linux headers.
"""

from __future__ import annotations

import platform
import struct

# name: (x86_64, aarch64); −1 where the architecture has no such call
_ESCAPE = {
    "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "sethostname": (170, 161),
    "setdomainname": (171, 162), "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268), "perf_event_open": (298, 241),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "bpf": (321, 280), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442), "personality": (135, 92), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "iopl": (172, -1),
    "ioperm": (173, -1), "mknod": (133, -1), "mknodat": (259, 33), "quotactl": (179, 60), "syslog": (103, 116),
    "fanotify_init": (300, 262), "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235),
    "vmsplice": (278, 75), "lookup_dcookie": (212, 18),
}  # fmt: skip
_NETWORK = {"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)}
# refused where there is no process namespace: what would leave the process group, or reach another process
_SHARED_PIDS = {
    "setsid": (112, 157), "setpgid": (109, 154), "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
}  # fmt: skip
_CLONE, _CLONE3, _TGKILL = (56, 220), (435, 435), (234, 131)
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEW{USER,PID,NET,IPC,UTS,CGROUP,NS} and CLONE_NEWTIME

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def supported() -> bool:
    """True when the numbers of this machine's architecture are known."""
    return platform.machine() in _AUDIT_ARCH


def build_filter(own_pids: bool = True, machine: str = "") -> bytes:
    """The filter as an array of `sock_filter`.

    own_pids: the program lives in its own process namespace; without one, signals and sessions are refused as well.
    machine: "x86_64" or "aarch64"; "" is this one.
    """
    machine = machine or platform.machine()
    column = ("x86_64", "aarch64").index(machine)
    refused = {**_ESCAPE, **_NETWORK, **({} if own_pids else _SHARED_PIDS)}
    ops = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        ops += [(_JUMP_GREATER_EQUAL, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]  # the x32 calls
    for numbers in refused.values():
        if numbers[column] >= 0:
            ops += [(_JUMP_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _EPERM)]
    ops += [(_JUMP_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ENOSYS)]
    ops += [
        (_JUMP_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_AND, 0, 0, _NAMESPACE_FLAGS),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *op) for op in ops)
