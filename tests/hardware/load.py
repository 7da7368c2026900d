"""A load that is known: hold so much memory of a GPU and keep all of it computing, through CUDA's driver alone.

Run as ``python load.py GPU_UUID MEMORY_MIB SECONDS``. It prints ``ready`` once everything computes. Exit status 77: no
CUDA driver here. Standard library only, so that any Python runs it, as any user.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

NO_CUDA = 77
_BLOCKS, _THREADS, _ROUNDS = 2_048, 256, 1 << 18

PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry burn(.param .u32 rounds)
{
    .reg .pred %p;
    .reg .u32 %n, %i;
    .reg .f32 %x, %y;
    ld.param.u32 %n, [rounds];
    mov.u32 %i, 0;
    mov.f32 %x, 0f3F800000;
    mov.f32 %y, 0f3F7FFFFF;
LOOP:
    fma.rn.f32 %x, %x, %y, %y;
    fma.rn.f32 %x, %x, %y, %y;
    fma.rn.f32 %x, %x, %y, %y;
    fma.rn.f32 %x, %x, %y, %y;
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, %n;
    @%p bra LOOP;
    setp.eq.f32 %p, %x, 0f00000000;
    @%p trap;
    ret;
}
\0"""
"""What is computed has to be used, or the compiler of the driver would leave it out."""


def main(gpu: str, memory_mib: int, seconds: float) -> int:
    """Compute for a while."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(error)
        return NO_CUDA

    def call(name: str, *arguments: object) -> None:
        if code := getattr(cuda, name)(*arguments):
            raise OSError(f"{name} failed with CUDA's error {code}")

    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(memory_mib << 20))
    call("cuModuleLoadData", ctypes.byref(module), PTX)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"burn")
    rounds = ctypes.c_uint32(_ROUNDS)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(rounds))
    until, is_ready = time.monotonic() + seconds, False
    while time.monotonic() < until:
        grid, block = (_BLOCKS, 1, 1), (_THREADS, 1, 1)
        call("cuLaunchKernel", kernel, *grid, *block, 0, None, parameters, None)
        call("cuCtxSynchronize")
        if not is_ready:
            print("ready", flush=True)
            is_ready = True
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
