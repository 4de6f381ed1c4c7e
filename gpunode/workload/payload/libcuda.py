"""The driver's libraries by ctypes, and CUDA's own interface: its start, its version, its GPUs, a kernel on each."""

from __future__ import annotations

import ctypes
import os
import time
import uuid
from pathlib import Path
from typing import Any

from gpunode.workload.payload.image import module_version, version_in_name
from gpunode.workload.payload.isolate import SkipPart, Trouble, one_line

MAX_GPUS = 64
NAME_BYTES = 128
# CUdevice_attribute
_MAJOR, _MINOR, _BUS, _DEVICE, _DOMAIN = 75, 76, 33, 34, 50


# CUresult
MISMATCH, NO_COMPAT = 803, 804


def versions(module: str | None) -> dict[str, Any]:
    """Return the values of ``versions.cuda``. Raises SkipPart without the library, Trouble if it is broken.

    ``module``: the version of the kernel module by NVML, used if /proc does not show it.
    """
    library = DriverLibrary("libcuda.so.1")
    path = os.path.realpath(library.path or library.name)
    result = library.call("cuInit", ctypes.c_uint(0))
    values: dict[str, Any] = {
        "library": path,
        "version": version_in_name(path),
        "result": result,
        "forward_compat": is_forward_compat(path, module_version() or module, result),
    }
    number = ctypes.c_int()
    if library.call("cuDriverGetVersion", ctypes.byref(number)) == 0 and number.value:
        values["cuda_version"] = cuda_version(number.value)
    if result != 0:
        values["result_name"] = error_name(library, result)
        return values
    count = ctypes.c_int()
    if library.call("cuDeviceGetCount", ctypes.byref(count)) == 0:
        values["count"] = count.value
        values["gpus"] = [gpu(library, index) for index in range(min(count.value, MAX_GPUS))]
        values["device"] = "cuda" if count.value else "cpu"
    return values


def is_forward_compat(path: str, module: str | None, result: int) -> bool:
    """Return whether this libcuda is cuda-compat's, which replaces that of an older driver.

    The folder is not sufficient: older toolkits mount it among the driver's own libraries. A library that is newer than
    the module and works can only be cuda-compat's. One that is refused differs from the library of an update without a
    reboot in its branch: an update mostly stays in the module's branch, cuda-compat never does.
    """
    if "/compat/" in path:
        return True
    inside, outside = as_numbers(version_in_name(path)), as_numbers(module)
    if not inside or not outside or inside <= outside:
        return False
    return result == 0 or (result in (MISMATCH, NO_COMPAT) and inside[0] > outside[0])


def as_numbers(version: str | None) -> tuple[int, ...]:
    """Return ``580.95.05`` as numbers that compare; empty for None and for a version that is only a major one."""
    numbers = tuple(int(part) for part in (version or "").split(".") if part.isdigit())
    return numbers if len(numbers) > 1 else ()


def error_name(library: DriverLibrary, code: int) -> str | None:
    """Return ``CUDA_ERROR_SYSTEM_DRIVER_MISMATCH``."""
    name = ctypes.c_char_p()
    if library.call("cuGetErrorName", ctypes.c_int(code), ctypes.byref(name)) != 0 or not name.value:
        return None
    return name.value.decode(errors="replace")


def gpu(library: DriverLibrary, index: int) -> dict[str, Any]:
    """Return one GPU; None for values that CUDA does not report."""
    values: dict[str, Any] = {"index": index}
    handle = ctypes.c_int()
    if library.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index)) != 0:
        return values
    buffer = ctypes.create_string_buffer(NAME_BYTES)
    if library.call("cuDeviceGetName", buffer, ctypes.c_int(NAME_BYTES), handle) == 0:
        values["name"] = buffer.value.decode(errors="replace")
    number = uuid_of(library, handle)
    if number is not None:
        values["uuid"] = number
    values["pci_bus_id"] = "{:04x}:{:02x}:{:02x}.0".format(
        *tuple(attribute(library, handle, a) for a in (_DOMAIN, _BUS, _DEVICE))
    )
    values["compute_capability"] = f"{attribute(library, handle, _MAJOR)}.{attribute(library, handle, _MINOR)}"
    size = ctypes.c_size_t()
    if library.call("cuDeviceTotalMem_v2", ctypes.byref(size), handle) == 0:
        values["memory_mib"] = size.value // 2**20
    return values


def uuid_of(library: DriverLibrary, handle: ctypes.c_int) -> str | None:
    """Return ``GPU-…``, or ``MIG-…`` of a MIG device; None if the library does not report which of the two it is."""
    raw = (ctypes.c_ubyte * 16)()
    newest = library.has("cuDeviceGetUuid_v2")
    function = "cuDeviceGetUuid_v2" if newest else "cuDeviceGetUuid"
    if not library.has(function) or library.call(function, ctypes.byref(raw), handle) != 0:
        return None
    # For a MIG device version 2 returns its own UUID, the older one its GPU's. The name distinguishes the two.
    buffer = ctypes.create_string_buffer(NAME_BYTES)
    library.call("cuDeviceGetName", buffer, ctypes.c_int(NAME_BYTES), handle)
    kind = "MIG" if newest and b" MIG " in buffer.value else "GPU"
    return f"{kind}-{uuid.UUID(bytes=bytes(raw))}"


def attribute(library: DriverLibrary, handle: ctypes.c_int, number: int) -> int:
    """Return one of CUDA's device attributes, 0 if it is not reported."""
    value = ctypes.c_int()
    library.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), handle)
    return value.value


class DriverLibrary:
    """A loaded library of the driver."""

    def __init__(self, name: str) -> None:
        """Load the library; raise SkipPart if there is none, Trouble if it exists and cannot be loaded."""
        try:
            self._handle = ctypes.CDLL(name)
        except OSError as err:
            # The same message may be about a library that this one needs: then this one exists, and is broken.
            if str(err).startswith(name + ":") and "No such file" in str(err):
                raise SkipPart(f"{name} is not in the container") from None
            raise Trouble(f"{name} cannot be loaded: {err}") from None
        self.name = name
        self.path = loaded_file(name)

    def call(self, function: str, *arguments: Any) -> int:
        """Return the return code of a function; Trouble if the library has no function of that name."""
        return int(self._function(function)(*arguments))

    def has(self, function: str) -> bool:
        """Return False in a release of the library that lacks the function."""
        return hasattr(self._handle, function)

    def text(self, function: str, code: int) -> str | None:
        """Return the name of a return code, from a function ``const char *f(int)``."""
        try:
            named = self._function(function)
        except Trouble:
            return None
        named.restype = ctypes.c_char_p
        result = named(code)
        return result.decode(errors="replace")[:200] if result else None

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._handle, name)
        except AttributeError:
            raise Trouble(f"{self.path or self.name} has no function {name}: is it the real library?") from None


def loaded_file(name: str) -> str | None:
    """Return the file behind a library of this process, from its memory map."""
    stem = name.split(".so", maxsplit=1)[0] + ".so"
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = (line.split(None, 5)[5] for line in lines if line.count("/"))
    return next((path for path in paths if Path(path).name.startswith(stem)), None)


def cuda_version(number: int) -> str:
    """Return CUDA 13.0 for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"


ELEMENTS = 2**16
"""256 blocks: more than any GPU has multiprocessors."""
BLOCK = 256
FACTOR, ADDEND = 3, 1
LEAST_CAPABILITY = (5, 0)
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


def kernel(uuid: str | None) -> dict[str, Any]:
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
    if as_numbers(values["compute_capability"]) < LEAST_CAPABILITY:
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
