"""What the workload records on a node that is well: written for these tests, simulated, never seen on a machine."""

from typing import Any

from machine_shapes import Document, Machine

OF_CUDA_13 = {
    "version": "2.14.1+cu130",
    "cuda": "13.0",
    "cudnn": "9.24.0",
    "nccl": "2.30.7",
    "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
}
OF_CUDA_12 = {
    "version": "2.5.1+cu121",
    "cuda": "12.1",
    "cudnn": "9.1.0",
    "nccl": "2.21.5",
    "architectures": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
}
CONTAINER = {"image": "registry.example/validator:1", "engine": "docker 28.5.1", "gpus": "cdi"}


def records(machine: Machine) -> list[Document]:
    """All records of ``--tests versions,gpus,frameworks``, the launcher's own first."""
    capability = machine.gpus[0]["compute_capability"]
    new = machine.driver > "580"
    driver_cuda = "13.0" if new else "12.2"
    inside = [
        {
            **{key: gpu[key] for key in ("index", "name", "uuid", "pci_bus_id", "compute_capability")},
            "memory_mib": gpu["memory_total_mib"],
        }
        for gpu in machine.gpus
    ]
    managed = [{**gpu, "result": 0, "memory_used_mib": 4, "mig_mode": False} for gpu in inside]
    number = len(inside)
    build = OF_CUDA_13 if new else OF_CUDA_12
    documents = [
        record(
            "container",
            {"complete": True, "gpus": number, "busy": [], "uuids": [gpu["uuid"] for gpu in inside]},
            seconds=64.2,
        ),
        record(
            "versions.system",
            {
                "python": "3.12.3",
                "os": "Ubuntu 24.04.3 LTS",
                "module_version": machine.driver,
                "driver_libraries": {"libcuda.so.1": machine.driver, "libnvidia-ml.so.1": machine.driver},
                "cuda": build["cuda"],
                "libraries": [{"name": "libcudart", "path": "/usr/local/cuda/lib64/libcudart.so", "version": None}],
                "devices": ["/dev/nvidia0", "/dev/nvidiactl"],
                "build": {
                    "cuda_home": "/usr/local/cuda",
                    "nvcc": build["cuda"],
                    "nvcc_in_path": build["cuda"],
                    "compiler": "13.3.0",
                    "ninja": True,
                    "libaio": True,
                },
            },
            device="cpu",
        ),
        record(
            "versions.limits",
            {
                "shm_bytes": 8 * 2**30,
                "memlock_bytes": -1,
                "stack_bytes": 64 * 2**20,
                "nofile": 1048576,
                "cpus": machine.cores,
            },
            device="cpu",
        ),
        record(
            "defaults.limits",  # an engine that is set for training: default-shm-size, default-ulimits
            {
                "shm_bytes": 4 * 2**30,
                "memlock_bytes": -1,
                "stack_bytes": 8 * 2**20,
                "nofile": 1048576,
                "cpus": machine.cores,
            },
            device="cpu",
        ),
        record(
            "versions.nvml",
            {
                "library": f"/usr/lib/libnvidia-ml.so.{machine.driver}",
                "result": 0,
                "driver_version": machine.driver,
                "cuda_version": driver_cuda,
                "count": number,
                "gpus": managed,
            },
        ),
        record(
            "versions.cuda",
            {
                "library": f"/usr/lib/libcuda.so.{machine.driver}",
                "version": machine.driver,
                "result": 0,
                "cuda_version": driver_cuda,
                "count": number,
                "forward_compat": False,
                "gpus": inside,
            },
        ),
        record("versions.torch", {**build, "available": True, "count": number, "gpus": inside}),
    ]
    for gpu in inside:
        documents += of_one(machine, gpu, build)
    documents += [
        record(
            "frameworks.compile",
            {"compute_capability": capability, "compile_seconds": 11.2, "cached_seconds": 3.1, "max_error": 1e-5},
        ),
        record("frameworks.dataloader", {"workers": 2, "batches": 16, "pinned": True, "samples_per_second": 9040.9}),
        *of_all(inside),
    ]
    return documents + (others(number) if new else others_absent())


def of_one(machine: Machine, gpu: dict[str, Any], build: dict[str, Any]) -> list[Document]:
    """What every GPU runs in a process of its own."""
    common = {key: gpu[key] for key in ("index", "uuid", "name")} | {"gpu_uuid": gpu["uuid"]}
    component = f"cuda:{gpu['index']}"
    capability = gpu["compute_capability"]
    total = machine.gpus[0]["memory_total_mib"] - 512
    parts: dict[str, dict[str, Any]] = {
        "gpus.kernel": {**gpu, "elements": 1048576, "wrong": 0, "jit_seconds": 0.031},
        "frameworks.tensor": {**gpu, "allocated_bytes": 786432, "max_error": 0.0},
        "frameworks.amp": {"dtype": "bfloat16", "losses": [2.106, 2.062, 2.025, 1.993]},
        "frameworks.matmul": {"dtype": "bfloat16", "size": 8192, "rounds": 5, "wrong": 0, "seconds": 0.0021},
        "frameworks.cudnn": {"cudnn": build["cudnn"], "enabled": True, "max_error": 1e-5},
        "frameworks.memory": {
            "total_mib": total,
            "free_mib": total - 512,
            "tested_mib": total * 7 // 8,
            "wrong": 0,
            "peak_mib": total * 7 // 8,
            "reserved_mib": total * 7 // 8,
        },
    }
    documents = [record(name, {**common, **values}, component=component) for name, values in parts.items()]
    if float(capability) >= 8.9:
        return [*documents, record("frameworks.fp8", {**common, "wrong": 0}, component=component)]
    reason = f"compute capability {capability}, FP8 begins with 8.9"
    return [*documents, record("frameworks.fp8", common, device="cpu", component=component) | {"skipped": reason}]


def of_all(inside: list[dict[str, Any]]) -> list[Document]:
    """What all GPUs do together."""
    number = len(inside)
    names = ("frameworks.p2p", "frameworks.collective")
    if number < 2:
        return [record(name, {}, device="cpu") | {"skipped": "only one GPU"} for name in names]
    access = [[True] * number for _ in range(number)]
    reduced = {"backend": "nccl", "ranks": number, "wrong": 0, "seconds": 0.0008, "transports": {"P2P/CUMEM": 32}}
    return [
        record(names[0], {"uuids": [gpu["uuid"] for gpu in inside], "access": access, "wrong": []}),
        record(names[1], {**reduced, "nvls": False, "warning": None}),
    ]


def others(number: int) -> list[Document]:
    """An image with TensorFlow and DALI as well."""
    return [
        record(
            "versions.tensorflow",
            {"version": "2.21.0", "built_with_cuda": True, "cuda": "12.5", "cudnn": "9", "count": number},
        ),
        record(
            "frameworks.tensorflow",
            {
                "count": number,
                "memory_growth": True,
                "compute_dtype": "float16",
                "thread_mode": "gpu_private",
                "max_error": 0.0,
            },
        ),
        record(
            "frameworks.tensorflow-training",
            {
                "ranks": number,
                "parameters": 4 * 4096**2,
                "wrong": 0,
                "max_gradient_error": 2e-7,
                "single_seconds": 0.018,
                "step_seconds": 0.019 if number > 1 else 0.018,
                "efficiency": 0.947 if number > 1 else 1.0,
                "xla_error": None,
                "xla_max_error": 0.0,
                "xla_seconds": 1.4,
                "input_samples_per_second": 3800.0,
                "parallel_samples_per_second": 41000.0,
                "cpus": 112,
                "intra_op_threads": 0,
                "inter_op_threads": 0,
                "thread_mode": "gpu_private",
                "thread_count": "2",
            },
        ),
        record("frameworks.dali", {"version": "1.53.0", "samples": 4}),
    ]


def others_absent() -> list[Document]:
    """An image with PyTorch alone."""
    parts = ("versions.tensorflow", "frameworks.tensorflow", "frameworks.tensorflow-training")
    names = {**dict.fromkeys(parts, "TensorFlow"), "frameworks.dali": "DALI"}
    return [
        record(name, {}, device="cpu") | {"skipped": f"{package} is not in the image"}
        for name, package in names.items()
    ]


def record(
    name: str, values: dict[str, Any], device: str = "cuda", component: str = "node", seconds: float = 1.5
) -> Document:
    """One record as the launcher hands it on."""
    return {
        "record": name,
        "schema": "gpunode.record/1",
        "device": device,
        "component": component,
        "seconds": seconds,
        "values": values,
        "error": None,
        "skipped": None,
        "undetermined": None,
        "container": CONTAINER,
        "simulated": True,
    }
