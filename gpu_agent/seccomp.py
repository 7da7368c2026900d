"""A seccomp program against system calls that jobs do not need and that have let programs escape their confinement.

The list is what container engines refuse by default to processes without capabilities, so that a program that runs in
a container runs here too. ``ptrace`` is allowed, for debuggers: the kernel lets a process trace only those of its own
user. A job cannot make a user namespace, in which it could mount and thereby reach kernel code that is otherwise only
root's.
"""

import errno
import platform
import socket
import struct

CLONE_NEWUSER = 0x10000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""``AUDIT_ARCH_...``: a program for another one, such as 32-bit x86, would have other numbers."""
_X32 = 0x40000000

_COMMON = {
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427},
    **{"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433},
    **{"clone3": 435, "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443},
}
NUMBERS = {
    "x86_64": {
        **_COMMON,
        **{"clone": 56, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161},
        **{"swapon": 167, "swapoff": 168, "reboot": 169, "iopl": 172, "ioperm": 173, "acct": 163, "quotactl": 179},
        **{"init_module": 175, "delete_module": 176, "finit_module": 313, "kexec_load": 246, "kexec_file_load": 320},
        **{"add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323},
        **{"open_by_handle_at": 304, "lookup_dcookie": 212, "settimeofday": 164, "clock_settime": 227},
        **{"sethostname": 170, "setdomainname": 171, "socket": 41},
    },
    "aarch64": {
        **_COMMON,
        **{"clone": 220, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51},
        **{"swapon": 224, "swapoff": 225, "reboot": 142, "acct": 89, "quotactl": 60},
        **{"init_module": 105, "delete_module": 106, "finit_module": 273, "kexec_load": 104, "kexec_file_load": 294},
        **{"add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282},
        **{"open_by_handle_at": 265, "lookup_dcookie": 18, "settimeofday": 170, "clock_settime": 112},
        **{"sethostname": 161, "setdomainname": 162, "socket": 198},
    },
}
"""System calls that are refused; ``clone`` and ``unshare`` only where they ask for a user namespace, ``socket`` only
for other families than ``_FAMILIES``."""

_WHERE_FLAGS_SAY = ("clone", "unshare")
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)
"""The last is netlink. What goes through others, such as VSOCK, SMC, TIPC or RDS, is not judged by ``network``."""
_AS_IF_MISSING = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")
"""``ENOSYS``: libraries then do the same in the way of older kernels. The flags of ``clone3`` cannot be looked at."""

_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_GREATER_OR_EQUAL, _JUMP_IF_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def program(machine: str = "") -> bytes:
    """Return the program for a machine, by default this one; empty for one whose system calls are not listed here."""
    machine = machine or platform.machine()
    if machine not in NUMBERS:
        return b""
    numbers = NUMBERS[machine]
    plain = {number: name for name, number in numbers.items() if name not in (*_WHERE_FLAGS_SAY, "socket")}
    code = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD_WORD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        code += [(_JUMP_IF_GREATER_OR_EQUAL, 0, 1, _X32), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    for number, name in sorted(plain.items()):
        refusal = errno.ENOSYS if name in _AS_IF_MISSING else errno.EPERM
        code += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | refusal)]
    for name in _WHERE_FLAGS_SAY:
        code += [
            (_JUMP_IF_EQUAL, 0, 4, numbers[name]),
            (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_AT),
            (_JUMP_IF_SET, 0, 1, CLONE_NEWUSER),
            (_RETURN, 0, 0, _ERROR | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    code += [(_JUMP_IF_EQUAL, 0, len(_FAMILIES) + 2, numbers["socket"]), (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_AT)]
    code += [(_JUMP_IF_EQUAL, len(_FAMILIES) - number, 0, family) for number, family in enumerate(map(int, _FAMILIES))]
    code += [(_RETURN, 0, 0, _ERROR | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
