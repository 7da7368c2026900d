"""BPF programs that the kernel runs for the processes of a control group, as bytecode: no compiler is needed."""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

_SYSTEM_CALL = {"x86_64": 321, "aarch64": 280}
_MAP_CREATE, _PROG_LOAD, _PROG_ATTACH, _OBJ_GET_INFO, _BTF_LOAD = 0, 5, 8, 15, 18
_MAP_GET_NEXT_ID, _MAP_GET_FD = 12, 14
_ALLOW_MULTI = 2
_SK_STORAGE, _NO_PREALLOC = 24, 1
_ATTRIBUTES_BYTES = 128

LOAD_BYTE, LOAD_HALF, LOAD, LOAD_LONG, STORE, STORE_HALF, STORE_VALUE = 0x71, 0x69, 0x61, 0x79, 0x63, 0x6B, 0x62
MOVE, MOVE_VALUE, ADD_VALUE, AND_VALUE, TO_NETWORK = 0xBF, 0xB7, 0x07, 0x57, 0xDC
IF_EQUAL, IF_NOT, IF_ABOVE, IF_BELOW, IF_SAME, GO = 0x15, 0x55, 0x25, 0xA5, 0x1D, 0x05
CALL, END, _LOAD_MAP = 0x85, 0x95, 0x18

Instruction = tuple[int, int, int, int | str, int] | str
"""Code, target, source, offset or the label to jump to, and value; a text alone is a label."""


def op(code: int, target: int = 0, source: int = 0, at: int | str = 0, value: int = 0) -> Instruction:
    return (code, target, source, at, value)


YES_OR_NO: tuple[Instruction, ...] = (
    *("yes", op(MOVE_VALUE, 0, value=1), op(END)),
    *("no", op(MOVE_VALUE, 0, value=0), op(END)),
)
"""The end of a program that decides: it allows at one label, and refuses at the other."""


def load_map(target: int, descriptor: int) -> list[Instruction]:
    return [op(_LOAD_MAP, target, 1, 0, descriptor), op(0)]  # of double length


def assembled(program: Sequence[Instruction]) -> bytes:
    """Return the bytes of a program with its labels resolved."""
    labels: dict[str, int] = {}
    code: list[tuple[int, int, int, int | str, int]] = []
    for each in program:
        if isinstance(each, str):
            labels[each] = len(code)
        else:
            code.append(each)
    return b"".join(
        struct.pack("BBhi", code, source << 4 | target, at if isinstance(at, int) else labels[at] - number - 1, value)
        for number, (code, target, source, at, value) in enumerate(code)
    )


def load(kind: int, attach_type: int, program: bytes) -> int:
    """Have the kernel check a program and return its descriptor; ``OSError`` if the kernel refuses it."""
    code, license_text = ctypes.create_string_buffer(program, len(program)), ctypes.create_string_buffer(b"Apache-2.0")
    addresses = (ctypes.addressof(code), ctypes.addressof(license_text))
    head = struct.pack("IIQQ", kind, len(program) // 8, *addresses)
    return _call(_PROG_LOAD, head + bytes(68 - len(head)) + struct.pack("I", attach_type))


def attach(group: Path, attach_type: int, program: int) -> None:
    """Have the kernel run a program for a group, beside others, as long as the group lives; repeating it is a no-op."""
    folder = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _call(_PROG_ATTACH, struct.pack("IIII", folder, program, attach_type, _ALLOW_MULTI))
    except OSError as error:
        if error.errno != errno.EINVAL:  # it is attached already
            raise
    finally:
        os.close(folder)


def socket_map(name: str) -> int:
    """Return the descriptor of the host's map with this name, from sockets to 32-bit numbers; make it if need be.

    Each call makes one, so that at least one exists; then every caller uses the oldest.

    Raises:
        OSError: The kernel has no such maps, or this process may not use them.
    """
    integer = struct.pack("IIII", 1, 1 << 24, 4, 32)  # BTF: one type, for key and value alike
    types = struct.pack("HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(integer), len(integer), 3) + integer + b"\0u\0"
    text = ctypes.create_string_buffer(types, len(types))
    described = _call(_BTF_LOAD, struct.pack("QQII", ctypes.addressof(text), 0, len(types), 0))
    try:
        sizes = struct.pack("IIIIIII16s", _SK_STORAGE, 4, 4, 0, _NO_PREALLOC, 0, 0, name.encode())
        made = _call(_MAP_CREATE, sizes + struct.pack("IIII", 0, described, 1, 1))
    finally:
        os.close(described)
    try:
        return _oldest_map(name)
    finally:
        os.close(made)


def _oldest_map(name: str) -> int:
    number = 0
    while True:
        number = _call(_MAP_GET_NEXT_ID, struct.pack("II", number, 0), answer_at=4)
        try:
            descriptor = _call(_MAP_GET_FD, struct.pack("I", number))
        except FileNotFoundError:  # it has just gone
            continue
        info = ctypes.create_string_buffer(40)
        _call(_OBJ_GET_INFO, struct.pack("IIQ", descriptor, len(info), ctypes.addressof(info)))
        if info.raw[24:40].rstrip(b"\0") == name.encode() and info.raw[:4] == struct.pack("I", _SK_STORAGE):
            return descriptor
        os.close(descriptor)


def _call(command: int, attributes: bytes, answer_at: int | None = None) -> int:
    """Return the result of ``bpf``, or what it writes into its attributes; descriptors are closed on exec."""
    number = _SYSTEM_CALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES_BYTES)
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    arguments = (ctypes.c_long(number), ctypes.c_int(command), buffer, ctypes.c_uint(len(buffer)))
    if (result := int(library.syscall(*arguments))) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result if answer_at is None else int(struct.unpack_from("I", buffer, answer_at)[0])
