"""A small kernel that the driver compiles from PTX: runs on every GPU, needs nothing of the image."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble, one_line
from gpunode.workload.payload.libcuda import as_numbers, error_name, gpu
from gpunode.workload.payload.library import DriverLibrary

ELEMENTS = 2**16
"""256 blocks: more than any GPU has multiprocessors."""
BLOCK = 256
FACTOR, ADDEND = 3, 1
LEAST = (5, 0)
"""Compute capability of the oldest target that every PTX compiler since CUDA 6 supports."""
LOG_BYTES = 4096
# CUjit_option
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6
# Code for a target runs on every later GPU. The index is multiplied and added in 32 bits, as in the check below.
PTX = f"""\
.version 5.0
.target sm_50
.address_size 64

.visible .entry affine(.param .u64 source, .param .u64 result, .param .u32 count)
{{
    .reg .pred %done;
    .reg .b32 %index, %block, %width, %limit, %value;
    .reg .b64 %from, %to, %offset;

    ld.param.u64 %from, [source];
    ld.param.u64 %to, [result];
    ld.param.u32 %limit, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %index, %tid.x;
    mad.lo.s32 %index, %block, %width, %index;
    setp.ge.u32 %done, %index, %limit;
    @%done bra END;
    cvta.to.global.u64 %from, %from;
    cvta.to.global.u64 %to, %to;
    mul.wide.u32 %offset, %index, 4;
    add.s64 %from, %from, %offset;
    add.s64 %to, %to, %offset;
    ld.global.u32 %value, [%from];
    mad.lo.s32 %value, %value, {FACTOR}, {ADDEND};
    st.global.u32 [%to], %value;
END:
    ret;
}}
"""


class CudaDriver:
    """The driver's interface; every error is raised as Trouble."""

    def __init__(self) -> None:
        self.library = DriverLibrary("libcuda.so.1")

    def do(self, function: str, *arguments: Any) -> None:
        """Call a function; Trouble with the error's name if it fails."""
        result = self.library.call(function, *arguments)
        if result != 0:
            raise Trouble(f"{function}: {error_name(self.library, result) or 'error'} ({result})")


def run(uuid: str | None) -> dict[str, Any]:
    """Return the values of ``gpus.kernel``, for the only device in CUDA_VISIBLE_DEVICES of this process.

    Raises Trouble if CUDA has another device than that with ``uuid``, or none; SkipPart below compute capability 5.0.
    """
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    driver = CudaDriver()
    driver.do("cuInit", ctypes.c_uint(0))
    count, device = ctypes.c_int(), ctypes.c_int()
    driver.do("cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise Trouble(f"CUDA has no device {uuid or ''}".rstrip())
    driver.do("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
    values = gpu(driver.library, 0)
    cuda_uuid = values.get("uuid")
    # Libraries before CUDA 11.4 report a MIG device with the UUID of its GPU.
    if uuid is not None and cuda_uuid is not None and cuda_uuid[:4] == uuid[:4] and cuda_uuid != uuid:
        raise Trouble(f"CUDA returns {cuda_uuid} instead of {uuid}")
    if as_numbers(values["compute_capability"]) < LEAST:
        raise SkipPart(f"compute capability {values['compute_capability']}, the kernel is compiled for 5.0 or later")
    context = ctypes.c_void_p()
    driver.do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver.do("cuCtxSetCurrent", context)
    started = time.monotonic()
    function = compiled(driver)
    values["jit_seconds"] = round(time.monotonic() - started, 3)
    values["elements"] = ELEMENTS
    values["wrong"] = launched(driver, function)
    del values["index"]
    return {**values, "device": "cuda"}


def compiled(driver: CudaDriver) -> ctypes.c_void_p:
    """Return the kernel, compiled by the driver; Trouble with the compiler's message."""
    log = ctypes.create_string_buffer(LOG_BYTES)
    options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
    # A size is passed in the pointer itself.
    values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p).value, LOG_BYTES)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    text = ctypes.c_char_p(PTX.encode())
    try:
        driver.do("cuModuleLoadDataEx", ctypes.byref(module), text, ctypes.c_uint(2), options, values)
    except Trouble as trouble:
        words = one_line(log.value.decode(errors="replace"))
        raise Trouble(f"{trouble}{': ' + words if words else ''}") from None
    driver.do("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"affine"))
    return function


def launched(driver: CudaDriver, function: ctypes.c_void_p) -> int:
    """Return how many of the elements that the kernel computed are wrong."""
    numbers = ctypes.c_uint32 * ELEMENTS
    size = ctypes.c_size_t(ctypes.sizeof(numbers))
    inputs = numbers(*range(ELEMENTS))
    outputs = numbers()
    source, result, number = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint32(ELEMENTS)
    driver.do("cuMemAlloc_v2", ctypes.byref(source), size)
    driver.do("cuMemAlloc_v2", ctypes.byref(result), size)
    driver.do("cuMemcpyHtoD_v2", source, inputs, size)
    parameters = (ctypes.c_void_p * 3)(*(ctypes.addressof(argument) for argument in (source, result, number)))
    unit, nothing = ctypes.c_uint(1), ctypes.c_void_p()
    blocks, threads, shared = ctypes.c_uint(ELEMENTS // BLOCK), ctypes.c_uint(BLOCK), ctypes.c_uint(0)
    driver.do("cuLaunchKernel", function, blocks, unit, unit, threads, unit, unit, shared, nothing, parameters, nothing)
    driver.do("cuCtxSynchronize")
    driver.do("cuMemcpyDtoH_v2", outputs, result, size)
    wanted = numbers(*range(ADDEND, ADDEND + FACTOR * ELEMENTS, FACTOR))
    if bytes(outputs) == bytes(wanted):
        return 0
    return sum(1 for index in range(ELEMENTS) if outputs[index] != wanted[index])
