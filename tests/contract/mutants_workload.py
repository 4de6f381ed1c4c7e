"""Mutants of the checks on what a workload recorded inside a container."""

from typing import Any

from bundles import Base, Edit, Missing, Mutant, hgx, hgx_b200, pcie_4, result, t4

from gpunode.checks import Status, registry

WARN, ERROR = Status.WARN, Status.ERROR
REAL = Edit(("simulated",), None, False)
STANDARD = tuple(
    check.id for check in registry if check.level == "standard" and not check.id.startswith("performance.")
)
OF_RECORDS = tuple(check for check in STANDARD if check != "container.runs")


def value(base: Base, record: str, *keys: str | int, new: Any) -> list[Edit]:
    """Another value in a record."""
    return [result(base(), record, "values", *keys, new=new)]


def broke(base: Base, record: str, error: str) -> list[Edit]:
    """The part broke: no values, an error."""
    document = base()
    return [result(document, record, "error", new=error), result(document, record, "values", new={})]


def left_out(base: Base, record: str, reason: str) -> list[Edit]:
    """The part was left out."""
    document = base()
    return [result(document, record, "skipped", new=reason), result(document, record, "values", new={})]


def alone(base: Base, record: str, key: str, text: str) -> list[Edit]:
    """That record is the only one: the container did not come to run."""
    (only,) = [part for part in base()["results"] if part["record"] == record]
    return [Edit(("results",), None, [{**only, "values": {}, key: text}])]


def not_known(base: Base, record: str, reason: str) -> list[Edit]:
    """The part has no result, and that is nobody's fault here."""
    document = base()
    return [result(document, record, "undetermined", new=reason), result(document, record, "values", new={})]


def without_torch(base: Base) -> list[Edit]:
    """The image has TensorFlow alone."""
    gone = {"values": {}, "device": "cpu", "skipped": "PyTorch is not in the image"}
    of_torch = {*OF_TORCH, "frameworks.fp8", "frameworks.p2p", "frameworks.collective"}
    return [
        Edit(("results",), None, [part | gone if part["record"] in of_torch else part for part in base()["results"]])
    ]


def without(base: Base, record: str, component: str) -> list[Edit]:
    """The record of one device is not there."""
    kept = [part for part in base()["results"] if (part["record"], part["component"]) != (record, component)]
    return [Edit(("results",), None, kept)]


ON_GPU = (
    "framework.amp",
    "framework.compile",
    "framework.cudnn",
    "framework.cudnn-version",
    "framework.dataloader",
    "framework.matmul",
    "framework.memory",
    "framework.nccl-version",
    "framework.tensor",
)


OF_TORCH = (
    "versions.torch",
    *(f"frameworks.{part}" for part in ("tensor", "amp", "matmul", "compile", "cudnn", "dataloader", "memory")),
)


def on_the_processor(base: Base) -> list[Edit]:
    """PyTorch found no GPU: everything of it ran on the processor."""
    document = base()
    return [result(document, name, "device", new="cpu") for name in OF_TORCH] + [
        result(document, "versions.torch", "values", "available", new=False),
        result(document, "versions.torch", "values", "count", new=0),
        result(document, "versions.torch", "values", "gpus", new=[]),
        result(document, "frameworks.memory", "skipped", new="no GPU with readable memory"),
        result(document, "frameworks.memory", "values", new={}),
    ]


NO_IMAGE = "the image registry.example/validator:1 is not here, and the registry does not answer"
MUTANTS = [
    Mutant(
        "container.runs",
        "no image",
        hgx,
        alone(hgx, "container", "error", NO_IMAGE),
        becomes=ERROR,
        skips=OF_RECORDS,
    ),
    Mutant("container.runs", "broke off", t4, value(t4, "container", "complete", new=False), becomes=ERROR),
    Mutant("container.runs", "nobody saw its end", t4, value(t4, "container", "complete", new=None), becomes=ERROR),
    Mutant("container.gpus", "CUDA counts one less", hgx, value(hgx, "versions.cuda", "count", new=7)),
    Mutant("container.gpus", "PyTorch counts none", t4, on_the_processor(t4), skips=ON_GPU),
    Mutant(
        "container.gpus",
        "a build for CUDA uses none of the GPUs that CUDA counts",
        t4,
        [
            *value(t4, "versions.torch", "available", new=False),
            *value(t4, "versions.torch", "unavailable", new="RuntimeError: CUDA unknown error"),
            *(edit for part in OF_TORCH[1:] for edit in broke(t4, part, "PyTorch 2.5.1 (CUDA 12.1) finds no GPU")),
        ],
        skips=tuple(check for check in ON_GPU if not check.endswith("-version")),
    ),
    Mutant(
        "container.gpus",
        "another GPU than the one that was handed in",
        hgx,
        value(hgx, "versions.nvml", "gpus", 3, "uuid", new="GPU-somebody-else"),
    ),
    Mutant(
        "container.gpus",
        "a GPU that is lost",
        hgx,
        [
            *value(hgx, "versions.nvml", "gpus", 3, "result", new=15),
            *value(hgx, "versions.nvml", "gpus", 3, "result_name", new="GPU is lost"),
        ],
    ),
    Mutant(
        "container.gpus",
        "MIG inside, and none outside",
        hgx,
        [
            *value(hgx, "versions.nvml", "gpus", 3, "mig_mode", new=True),
            *value(hgx, "versions.nvml", "gpus", 3, "mig_devices", new=[{"index": 0, "uuid": "MIG-0"}]),
        ],
    ),
    Mutant("container.compute", "wrong by one element", hgx, value(hgx, "gpus.kernel", "wrong", new=1)),
    Mutant("container.compute", "nothing computed on one of them", hgx, without(hgx, "gpus.kernel", "cuda:3")),
    Mutant(
        "container.compute",
        "another process took the GPU",
        t4,
        not_known(t4, "gpus.kernel", "another process has started on it: 9000 MiB are in use"),
        becomes=ERROR,
    ),
    Mutant("container.gpus", "fewer than given", hgx, value(hgx, "container", "gpus", new=9)),
    Mutant(
        "container.gpus",
        "the fabric is not ready",
        hgx,
        [
            *value(hgx, "versions.cuda", "result", new=802),
            *value(hgx, "versions.cuda", "result_name", new="CUDA_ERROR_SYSTEM_NOT_READY"),
        ],
    ),
    Mutant(
        "container.gpus",
        "no library of the driver",
        t4,
        [
            REAL,
            *left_out(t4, "versions.nvml", "libnvidia-ml.so.1 is not in the container"),
            *left_out(t4, "versions.cuda", "libcuda.so.1 is not in the container"),
            *value(t4, "versions.system", "driver_libraries", new={}),
        ],
        skips=("container.library", "container.forward-compat"),
    ),
    Mutant(
        "container.gpus",
        "CUDA crashes",
        t4,
        [REAL, *broke(t4, "versions.cuda", "crashed with SIGSEGV: Fatal Python error: Segmentation fault")],
        skips=("container.forward-compat",),
    ),
    Mutant(
        "container.library",
        "libraries of another driver",
        t4,
        value(t4, "versions.system", "driver_libraries", "libcuda.so.1", new="580.95.05"),
    ),
    Mutant(
        "container.library",
        "NVML talks to another module",
        t4,
        value(t4, "versions.nvml", "driver_version", new="535.247.01"),
    ),
    Mutant(
        "container.library",
        "another module since",
        t4,
        value(t4, "versions.system", "module_version", new="535.247.01"),
    ),
    Mutant(
        "container.library",
        "NVML refuses the module",
        hgx,
        [
            *value(hgx, "versions.nvml", "result", new=18),
            *value(hgx, "versions.nvml", "result_name", new="Driver/library version mismatch"),
        ],
        skips=("container.gpus",),
    ),
    Mutant(
        "container.library",
        "CUDA refuses the module",
        t4,
        value(t4, "versions.cuda", "result", new=803),
        skips=("container.gpus",),
    ),
    Mutant(
        "container.forward-compat",
        "not with this GPU",
        pcie_4,
        [
            *value(pcie_4, "versions.cuda", "forward_compat", new=True),
            *value(pcie_4, "versions.cuda", "result", new=804),
        ],
        skips=("container.gpus",),
    ),
    Mutant(
        "container.gpus",
        "CUDA does not start, with cuda-compat in use",
        hgx,
        [
            *value(hgx, "versions.cuda", "forward_compat", new=True),
            *value(hgx, "versions.cuda", "result", new=802),
        ],
        skips=("container.forward-compat",),
    ),
    Mutant(
        "container.forward-compat",
        "older than the driver",
        hgx,
        [
            *value(hgx, "versions.cuda", "forward_compat", new=True),
            *value(hgx, "versions.cuda", "version", new="570.124.06"),
            *value(hgx, "versions.cuda", "cuda_version", new="12.8"),
        ],
    ),
    Mutant(
        "container.forward-compat",
        "the driver has that CUDA itself",
        hgx,
        value(hgx, "versions.cuda", "forward_compat", new=True),
        becomes=WARN,
    ),
    Mutant(
        "container.cuda",
        "the image's is above the driver's, and it has no PyTorch",
        hgx,
        [*without_torch(hgx), *value(hgx, "versions.system", "cuda", new="14.0.2")],
        skips=(
            *(*ON_GPU, "framework.build-tools", "framework.wheel"),
            *("framework.fp8", "framework.p2p", "framework.collective"),
        ),
    ),
    Mutant(
        "container.cuda",
        "PyTorch's is above the driver's, and so it finds no GPU",
        t4,
        [
            *value(t4, "versions.torch", "cuda", new="13.0"),
            *value(t4, "versions.system", "build", "nvcc", new="13.0"),
            *value(t4, "versions.system", "build", "nvcc_in_path", new="13.0"),
            *on_the_processor(t4),
        ],
        skips=ON_GPU,
    ),
    Mutant(
        "container.cuda",
        "a newer minor of the same major",
        hgx,
        value(hgx, "versions.torch", "cuda", new="13.2"),
        becomes=WARN,
    ),
    Mutant(
        "container.shm",
        "Docker's default",
        t4,
        value(t4, "defaults.limits", "shm_bytes", new=64 * 2**20),
        becomes=WARN,
    ),
    Mutant(
        "container.memlock",
        "limited, with RDMA",
        hgx,
        value(hgx, "defaults.limits", "memlock_bytes", new=65536),
        becomes=WARN,
    ),
    Mutant("container.stack", "unlimited", t4, value(t4, "defaults.limits", "stack_bytes", new=-1), becomes=WARN),
    Mutant("container.stack", "small", t4, value(t4, "defaults.limits", "stack_bytes", new=65536), becomes=WARN),
    Mutant(
        "framework.wheel",
        "no code for Blackwell, and so nothing runs",
        hgx_b200,
        [
            *value(hgx_b200, "versions.torch", "architectures", new=["sm_75", "sm_80", "sm_86", "sm_90"]),
            *(
                edit
                for part in ("tensor", "amp", "cudnn")
                for edit in broke(
                    hgx_b200, f"frameworks.{part}", "RuntimeError: CUDA error: no kernel image is available"
                )
            ),
        ],
    ),
    Mutant(
        "framework.wheel",
        "code for Hopper's own instructions is not for Ada",
        pcie_4,
        value(pcie_4, "versions.torch", "architectures", new=["sm_75", "sm_90", "sm_90a", "compute_90"]),
    ),
    Mutant(
        "framework.wheel",
        "a build for the processor",
        t4,
        [
            REAL,
            *value(t4, "versions.torch", "cuda", new=None),
            *value(t4, "versions.torch", "architectures", new=[]),
            *on_the_processor(t4),
        ],
        skips=(*ON_GPU, "framework.build-tools"),
    ),
    Mutant(
        "framework.wheel",
        "PyTorch does not load",
        t4,
        not_known(t4, "versions.torch", "PyTorch cannot be imported: OSError: libcublas.so.12: cannot open"),
        becomes=ERROR,
        skips=("framework.build-tools", "framework.cudnn-version", "framework.nccl-version"),
    ),
    Mutant(
        "framework.wheel",
        "no framework in the image",
        t4,
        [edit for record in OF_TORCH for edit in left_out(t4, record, "PyTorch is not in the image")],
        becomes=WARN,
        skips=(*ON_GPU, "framework.build-tools"),
    ),
    Mutant(
        "framework.cudnn-version",
        "not for Volta and older",
        hgx,
        [*value(hgx, "versions.torch", "cudnn", new="8.9.7"), *value(hgx, "versions.torch", "cuda", new="13.0")],
    ),
    Mutant("framework.cudnn-version", "none", t4, value(t4, "versions.torch", "cudnn", new=None)),
    Mutant("framework.nccl-version", "made before CUDA 13", hgx, value(hgx, "versions.torch", "nccl", new="2.27.3")),
    Mutant("framework.nccl-version", "none for eight GPUs", hgx, value(hgx, "versions.torch", "nccl", new=None)),
    Mutant("framework.tensor", "wrong by one", hgx, value(hgx, "frameworks.tensor", "max_error", new=1.0)),
    Mutant("framework.tensor", "not on the GPU", hgx, value(hgx, "frameworks.tensor", "allocated_bytes", new=0)),
    Mutant("framework.tensor", "hangs", t4, broke(t4, "frameworks.tensor", "did not return within 180 s")),
    Mutant("framework.amp", "the loss is not a number", t4, value(t4, "frameworks.amp", "losses", 2, new=None)),
    Mutant("framework.amp", "the loss grows", t4, value(t4, "frameworks.amp", "losses", 3, new=9.0)),
    Mutant(
        "framework.amp",
        "no time was left for it",
        t4,
        not_known(t4, "frameworks.amp", "not run: the 900 s for all are used up"),
        becomes=ERROR,
    ),
    Mutant("framework.matmul", "one element wrong", hgx, value(hgx, "frameworks.matmul", "wrong", new=1)),
    Mutant("framework.fp8", "one element wrong", hgx, value(hgx, "frameworks.fp8", "wrong", new=1)),
    Mutant("framework.p2p", "a copy arrives wrong", hgx, value(hgx, "frameworks.p2p", "wrong", new=[[0, 3]])),
    Mutant(
        "framework.p2p",
        "not between two that nvidia-smi lets",
        hgx,
        value(hgx, "frameworks.p2p", "access", 0, 1, new=False),
        becomes=WARN,
    ),
    Mutant("framework.collective", "a sum is wrong", hgx, value(hgx, "frameworks.collective", "wrong", new=1)),
    Mutant(
        "framework.collective",
        "a rank falls",
        hgx,
        broke(hgx, "frameworks.collective", "rank 3 of 8: DistBackendError: NCCL error: unhandled cuda error"),
    ),
    Mutant(
        "framework.compile",
        "no Triton",
        t4,
        broke(t4, "frameworks.compile", "Cannot find a working triton installation"),
    ),
    Mutant("framework.compile", "another result", t4, value(t4, "frameworks.compile", "max_error", new=0.5)),
    Mutant("framework.cudnn", "another result", t4, value(t4, "frameworks.cudnn", "max_error", new=0.5)),
    Mutant("framework.cudnn", "switched off", t4, value(t4, "frameworks.cudnn", "enabled", new=False)),
    Mutant("framework.dataloader", "not pinned", t4, value(t4, "frameworks.dataloader", "pinned", new=False)),
    Mutant(
        "framework.dataloader",
        "dies although there is room",
        t4,
        broke(t4, "frameworks.dataloader", "RuntimeError: DataLoader worker (pid 44) exited unexpectedly"),
    ),
    Mutant("framework.memory", "a part is gone", t4, value(t4, "frameworks.memory", "total_mib", new=7000)),
    Mutant("framework.memory", "words come back wrong", t4, value(t4, "frameworks.memory", "wrong", new=3)),
    Mutant("framework.memory", "nothing is counted", t4, value(t4, "frameworks.memory", "peak_mib", new=0)),
    Mutant("framework.tensorflow", "no GPU", hgx, [REAL, *value(hgx, "frameworks.tensorflow", "count", new=0)]),
    Mutant("framework.tensorflow", "one GPU fewer", hgx, value(hgx, "frameworks.tensorflow", "count", new=7)),
    Mutant("framework.tensorflow", "all memory", hgx, value(hgx, "frameworks.tensorflow", "memory_growth", new=False)),
    Mutant("framework.tensorflow", "float32", hgx, value(hgx, "frameworks.tensorflow", "compute_dtype", new="float32")),
    Mutant("framework.tensorflow", "wrong", hgx, value(hgx, "frameworks.tensorflow", "max_error", new=2.0)),
    *(
        Mutant("framework.tensorflow-training", title, hgx, value(hgx, "frameworks.tensorflow-training", name, new=new))
        for title, name, new in (
            ("wrong gradients", "wrong", 2),
            ("no libdevice", "xla_error", "InternalError: libdevice not found at ./libdevice.10.bc"),
            ("XLA is wrong", "xla_max_error", 3.0),
        )
    ),
    Mutant(
        "framework.tensorflow-training",
        "slow",
        hgx,
        value(hgx, "frameworks.tensorflow-training", "efficiency", new=0.2),
        becomes=WARN,
    ),
    *(
        Mutant(
            "framework.build-tools",
            title,
            hgx,
            value(hgx, "versions.system", "build", key, new=new),
            becomes=Status.FAIL if key == "nvcc" else WARN,
        )
        for title, key, new in (
            ("another CUDA", "nvcc", "11.8"),
            ("another nvcc in PATH", "nvcc_in_path", "12.1"),
            ("no compiler", "compiler", None),
            ("no ninja", "ninja", False),
        )
    ),
    Mutant("framework.dali", "an empty batch", hgx, value(hgx, "frameworks.dali", "samples", new=0)),
    Mutant("framework.dali", "breaks", hgx, broke(hgx, "frameworks.dali", "RuntimeError: nvJPEG error")),
]

RECORD = {
    "container.runs": "container",
    "container.gpus": "versions.nvml",
    "container.compute": "gpus.kernel",
    "container.library": "versions.system",
    "container.forward-compat": "versions.cuda",
    "container.cuda": "versions.system",
    "container.shm": "defaults.limits",
    "container.memlock": "defaults.limits",
    "container.stack": "defaults.limits",
    "framework.build-tools": "versions.system",
    "framework.wheel": "versions.torch",
    "framework.cudnn-version": "versions.torch",
    "framework.nccl-version": "versions.torch",
    **{
        f"framework.{part}": f"frameworks.{part}"
        for part in (
            *("tensor", "amp", "matmul", "fp8", "compile", "cudnn", "dataloader", "memory", "p2p", "collective"),
            *("tensorflow", "tensorflow-training", "dali"),
        )
    },
}
MISSING: Missing = {
    check: [
        # No workload was run; the part's own record is of no kind; it is not there; its values are rubbish.
        (hgx, [Edit(("results",), None, [])]),
        (hgx, [result(hgx(), RECORD[check], new={"record": RECORD[check]})]),
        (hgx, [Edit(("results",), None, [part for part in hgx()["results"] if part["record"] != RECORD[check]])]),
        (hgx, [result(hgx(), RECORD[check], "values", new={"gpus": "many"})]),
    ]
    for check in STANDARD
}
for check in ("container.shm", "container.memlock", "container.stack"):
    key = check.partition(".")[2] + "_bytes"
    MISSING[check].append((t4, value(t4, "defaults.limits", key, new=None)))
