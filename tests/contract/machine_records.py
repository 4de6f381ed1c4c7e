"""What the workload records on a node that is well: written for these tests, simulated, never seen on a machine."""

from typing import Any

from machine_shapes import Document, Machine

CAPABILITY = {
    "Kepler": "3.7",
    "Maxwell": "5.2",
    "Pascal": "6.0",
    "Volta": "7.0",
    "Ampere": "8.0",
    "Hopper": "9.0",
    "Blackwell": "10.0",
    "Ada Lovelace": "8.9",
    "Turing": "7.5",
}
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
    """All records of ``--tests versions,frameworks``, the launcher's own first."""
    capability = CAPABILITY[machine.model.architecture]
    new = machine.driver > "580"
    driver_cuda = "13.0" if new else "12.2"
    inside = [
        {
            "index": index,
            "name": machine.model.name,
            "uuid": f"GPU-00000000-0000-4000-8000-00000000000{index}",
            "pci_bus_id": gpu.slot,
            "compute_capability": capability,
            "memory_mib": machine.model.memory_mib,
        }
        for index, gpu in enumerate(machine.gpus)
    ]
    number = len(inside)
    build = OF_CUDA_13 if new else OF_CUDA_12
    ok = {"max_error": 0.0}
    found = [
        record("container", {"complete": True, "gpus": number, "busy": []}, seconds=64.2),
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
                "gpus": inside,
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
        found.append(
            record("frameworks.tensor", {**gpu, "allocated_bytes": 786432, **ok}, component=f"cuda:{gpu['index']}")
        )
    found += [
        record("frameworks.amp", {"dtype": "bfloat16", "losses": [2.106, 2.062, 2.025, 1.993]}),
        record("frameworks.compile", {"compute_capability": capability, "compile_seconds": 11.2, "max_error": 1e-5}),
        record("frameworks.cudnn", {"cudnn": build["cudnn"], "enabled": True, "max_error": 1e-5}),
        record("frameworks.dataloader", {"workers": 2, "batches": 16, "pinned": True, "samples_per_second": 9040.9}),
        record(
            "frameworks.memory",
            {
                "total_mib": machine.model.memory_mib - 512,
                "free_mib": machine.model.memory_mib - 1024,
                "peak_mib": 512,
                "reserved_mib": 640,
                "fragmentation_percent": 40.0,
            },
        ),
    ]
    return found + (others(number) if new else others_absent())


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
        record("frameworks.dali", {"version": "1.53.0", "samples": 4}),
    ]


def others_absent() -> list[Document]:
    """An image with PyTorch alone."""
    names = {"versions.tensorflow": "TensorFlow", "frameworks.tensorflow": "TensorFlow", "frameworks.dali": "DALI"}
    return [record(name, {}, device="cpu") | {"skipped": f"{what} is not in the image"} for name, what in names.items()]


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
        "container": CONTAINER,
        "simulated": True,
    }
