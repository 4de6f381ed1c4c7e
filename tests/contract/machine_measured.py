"""What a node that is well measures: figures invented for these tests, near what the catalog expects, seen nowhere."""

import json
from typing import Any

from machine_records import record
from machine_shapes import Document, Machine

GIB = 2**30
FAST: dict[str, dict[str, float]] = {
    "NVIDIA H100 80GB HBM3": {
        "copy": 55.0,
        "on_device": 2900.0,
        "memory": 3050.0,
        "peer": 390.0,
        "clock": 1755.0,
        "bf16": 702.0,
        "fp16": 690.0,
        "tf32": 351.0,
        "fp32": 52.0,
        "fp64": 55.0,
        "fp8": 1250.0,
        "int8": 1300.0,
        "busbw": 345.0,
        "all-reduce": 471.0,
    },
    "NVIDIA L40S": {
        "copy": 26.5,
        "on_device": 730.0,
        "memory": 780.0,
        "peer": 24.0,
        "clock": 2100.0,
        "bf16": 240.0,
        "fp16": 240.0,
        "tf32": 120.0,
        "fp32": 60.0,
        "fp64": 1.2,
        "fp8": 420.0,
        "int8": 450.0,
        "busbw": 19.0,
        "all-reduce": 19.5,
    },
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-recv")
REPEATED: dict[str, Any] = {"repetitions": 20, "spread": 0.01}


def measured(machine: Machine) -> list[Document]:
    """Return every record of measurements of level deep, real as far as they are marked so."""
    fast = FAST[machine.gpus[0]["name"]]
    uuids = list(machine.uuids)
    documents = [document for index, uuid in enumerate(uuids) for document in of_one(index, uuid, fast)]
    documents += [*together(machine, uuids, fast), *storage(), *tools(machine, fast)]
    # By way of text, so that no two records share a part: an edit of one is an edit of one.
    text: list[Document] = json.loads(json.dumps(documents))
    return [{**document, "simulated": False} for document in text]


def of_one(index: int, uuid: str, fast: dict[str, float]) -> list[Document]:
    """Return what every GPU measures alone."""
    common = {"index": index, "uuid": uuid, "gpu_uuid": uuid, "timer": "events"}
    load = {
        "samples": 40,
        "sm_clock_mhz": fast["clock"],
        "sm_clock_min_mhz": fast["clock"] - 30,
        "power_w": 340.0,
        "temperature_c": 61,
        "throttle_reasons": {"sw_power_cap": 0.9},
    }
    copies = [
        {
            "direction": direction,
            "pinned": pinned,
            "numa_node": 0,
            "near": near,
            "size_bytes": 256 * 2**20,
            "bandwidth_gb_per_s": share * fast["copy"],
            "wrong": 0,
            **REPEATED,
        }
        for direction in ("host_to_device", "device_to_host")
        for pinned, near, share in ((True, True, 1), (True, False, 0.7), (False, True, 0.2))
    ]
    kernels = [
        {"kernel": kernel, "bandwidth_gb_per_s": fast["memory"], "wrong": 0, **REPEATED}
        for kernel in ("read", "write", "triad")
    ]
    product = {"size": 8192, "compared": 200, "wrong": 0, "corrupted": [], "load": load, **REPEATED}
    points = [{"second": 10.0 * number, "tflops": fast["bf16"], "sm_clock_mhz": fast["clock"]} for number in (1, 2, 3)]
    parts: dict[str, dict[str, Any]] = {
        "copy.host": {"copies": copies},
        "copy.device": {"size_bytes": GIB, "bandwidth_gb_per_s": fast["on_device"], "wrong": 0, **REPEATED},
        "memory.stream": {"size_bytes": GIB, "kernels": kernels, "load": load},
        **{
            f"gemm.{dtype}": {**product, "dtype": dtype, "tflops": fast[dtype]}
            for dtype in ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "int8")
        },
        "steps.device": {
            "launch_us": 5.1,
            "round_trip_us": 13.0,
            "dtype": "bfloat16",
            "fp32_step_seconds": 0.028,
            "mixed_step_seconds": 0.009,
            **REPEATED,
        },
        "burn.gemm": {
            "dtype": "bfloat16",
            "size": 8192,
            "requested_seconds": 120,
            "burn_seconds": 120.2,
            "points": points,
            "tflops": fast["bf16"],
            "tflops_slope_percent_per_minute": -0.4,
            "sm_clock_slope_mhz_per_minute": -6.0,
            "compared": 12,
            "wrong": 0,
            "load": load,
        },
    }
    return [record(name, {**common, **values}, component=f"cuda:{index}") for name, values in parts.items()]


def together(machine: Machine, uuids: list[str], fast: dict[str, float]) -> list[Document]:
    """Return what all GPUs measure together."""
    number = len(uuids)
    pairs = [
        {
            "source": source,
            "target": target,
            "direct": True,
            "bandwidth_gb_per_s": fast["peer"],
            "both_gb_per_s": 1.9 * fast["peer"] if source < target else None,
            "wrong": 0,
            **REPEATED,
        }
        for source in range(number)
        for target in range(number)
        if source != target
    ]
    linked = bool(machine.gpus[0]["nvlinks"])
    ways = {"transports": {"P2P/CUMEM" if linked else "SHM/direct": 448}, "kinds": ["P2P" if linked else "SHM"]}
    if machine.hardware["nvswitches"]:
        ways["kinds"] = ["NVLS", "P2P"]
    common: dict[str, Any] = {"backend": "nccl", "ranks": number, "nodes": 1, "missing": []}
    documents = [record("copy.peer", {"uuids": uuids, "size_bytes": 256 * 2**20, "pairs": pairs})]
    for name in COLLECTIVES:
        rate = fast.get(name, fast["busbw"])
        rows = [
            {
                "size_bytes": size,
                "time_us": 20.0,
                "algbw_gb_per_s": part,
                "busbw_gb_per_s": part,
                "wrong": 0,
                **REPEATED,
            }
            for size, part in ((8, 0.0), (2**20, rate / 4), (8 * GIB, rate))
        ]
        documents.append(record(f"nccl.{name}", {**common, **ways, "dtype": "float32", "rows": rows}))
    links = number * (number - 1) // 2
    exchanges = {"uuids": uuids, "rounds": 3, "size_bytes": 2**28, "links": links, "cleared": links}
    documents.append(
        record("nccl.pairs", {**common, **exchanges, "median_gb_per_s": fast["peer"], "slow_factor": 3.0, "bad": []})
    )
    training = {
        "steps": 10,
        "parameters": 50_000_000,
        "gradient_bytes": 200_000_000,
        "wrong": 0,
        "step_seconds": 0.021,
        "compute_seconds": 0.02,
        "communication_seconds": 0.0011,
        "expected_seconds": 0.00095,
        "busbw_gb_per_s": fast["busbw"],
        "ratio": 0.86,
        "overlap": 0.4,
    }
    return [*documents, record("ddp.replicated", {**common, **training}), record("ddp.sharded", {**common, **training})]


def storage() -> list[Document]:
    """Return what a directory's storage does."""
    job = {"block_bytes": 2**20, "jobs": 4, "depth": 16, "iops": 5800.0, "latency_us": 900.0}
    jobs = [{**job, "pattern": pattern, "bandwidth_gb_per_s": 6.1} for pattern in ("read", "write")]
    values = {
        "directory": "/data",
        "filesystem": "xfs",
        "fio_version": "3.36",
        "direct": True,
        "size_bytes": GIB,
        "jobs": jobs,
    }
    rows = [
        {"workers": workers, "samples_per_second": rate, "gb_per_s": rate / 1600, **REPEATED}
        for workers, rate in ((0, 900.0), (4, 3300.0), (8, 3400.0))
    ]
    loader = {"directory": "/data", "cpus": 16, "sample_bytes": 602112, "rows": rows, "advised_workers": 4}
    return [
        record("storage.fio", values, device="cpu"),
        record("storage.dataloader", loader, device="cpu"),
        record("input.pipeline", data(), device="cpu"),
    ]


def data() -> dict[str, Any]:
    """Return what a directory of images on a fast disk delivers, enough for eight GPUs of the reference."""
    step = {"state": "hot", "read_s": 0.0001, "decode_s": 0.0002, "other_s": 0.0001}
    loader = {"loaders": 1, "pinned": None, "gb_per_s": 2.6}
    rows = ((0, 2500.0), (16, 24000.0))
    states = ("cold", "hot")
    return {
        "directory": "/data/train",
        "filesystem": "xfs",
        "remote": False,
        "files": 1281167,
        "bytes": 140_000_000_000,
        "walk_complete": True,
        "kinds": {"images": 1281167},
        "kind": "images",
        "read_files": 2048,
        "read_bytes": 225_000_000,
        "sample_bytes": 110000.0,
        "cpus": 112,
        "gpus": 8,
        "proof": "mincore",
        "cold_resident": 0.0,
        "hot_resident": 1.0,
        "decoders": [{"decoder": "Pillow 11.3.0", "device": "cpu", "samples_per_second": 500.0}],
        "reads": [{"state": state, "threads": 16, "gb_per_s": 6.0, "files_per_s": 54000.0} for state in states],
        "loaders": [
            {"state": state, "workers": workers, "samples_per_second": rate, **loader}
            for state in states
            for workers, rate in rows
        ],
        "steps": [step, {**step, "state": "cold", "read_s": 0.00015}],
        "advised_workers": 16,
        "synthetic_samples_per_second": 60000.0,
    }


def tools(machine: Machine, fast: dict[str, float]) -> list[Document]:
    """Return what external programs print, in the layouts of the recorded outputs."""
    printed = {
        "nvbandwidth": ("/usr/bin/nvbandwidth", nvbandwidth(len(machine.gpus), fast)),
        "nccl-tests": ("/usr/local/bin/all_reduce_perf", nccl_tests(machine, fast["all-reduce"])),
        "dcgm-diag": ("/usr/bin/dcgmi", dcgm_diag(len(machine.gpus))),
    }
    return [
        record(f"tools.{name}", {"program": program, "arguments": [], "exit_code": 0, "stdout": text})
        for name, (program, text) in printed.items()
    ]


def nvbandwidth(number: int, fast: dict[str, float]) -> str:
    """Return the JSON of nvbandwidth 0.5 and later."""

    def case(name: str, matrix: list[list[str]]) -> dict[str, Any]:
        return {
            "name": name,
            "bandwidth_description": "memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)",
            "bandwidth_matrix": matrix,
            "status": "Passed",
        }

    peers = [["N/A" if row == column else f"{fast['peer']:.2f}" for column in range(number)] for row in range(number)]
    host = [[f"{fast['copy']:.2f}"] * number]
    cases = [
        case("host_to_device_memcpy_ce", host),
        case("device_to_host_memcpy_ce", host),
        case("device_to_device_memcpy_read_ce", peers),
    ]
    head = {"CUDA Runtime Version": 12080, "Driver Version": "580.95.05", "version": "v0.8"}
    return json.dumps({"nvbandwidth": {**head, "testcases": cases}})


def nccl_tests(machine: Machine, rate: float) -> str:
    """Return a log of all_reduce_perf with its closing lines."""
    ranks = "".join(
        f"#  Rank {rank:2} Group  0 Pid   4242 on {machine.name} device {rank:2} [0x{slot[5:7]}] "
        f"{machine.gpus[0]['name']}\n"
        for rank, slot in enumerate(machine.slots)
    )
    rows = "".join(
        f"{size:12} {size // 4:12}     float     sum      -1   1234.5  {part:.2f}  {part:.2f}      0   1234.5  "
        f"{part:.2f}  {part:.2f}      0\n"
        for size, part in ((2**20, rate / 4), (16 * GIB, rate))
    )
    return (
        f"# nThread 1 nGpus {len(machine.gpus)} minBytes 1048576 maxBytes 17179869184 step: 2(factor) warmup iters: 5 "
        "iters: 20 agg iters: 1 validation: 1 graph: 0\n#\n# Using devices\n"
        f"{ranks}#\n"
        "#                                                              out-of-place                       in-place\n"
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw "
        "#wrong\n"
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  "
        "(GB/s)\n"
        f"{rows}# Out of bounds values : 0 OK\n# Avg bus bandwidth    : {rate:.4f}\n#\n"
    )


def dcgm_diag(number: int) -> str:
    """Return the JSON of dcgmi diag of DCGM 4."""
    results = [
        {"entity_group": "GPU", "entity_group_id": 1, "entity_id": gpu, "status": "Pass"} for gpu in range(number)
    ]

    def test(name: str) -> dict[str, Any]:
        return {"name": name, "results": results, "test_summary": {"status": "Pass"}}

    categories = [
        {"category": "Deployment", "tests": [test("software")]},
        {"category": "Hardware", "tests": [test("memory"), test("diagnostic")]},
    ]
    metadata = {"DCGM Version": "4.4.1", "Driver Version Detected": "580.95.05"}
    return json.dumps({"DCGM Diagnostic": {"test_categories": categories}, "metadata": metadata})
