# ruff: noqa: PTH113, PTH118, PTH119, PTH123, PTH207, TRY301, UP031
"""gpunode-run: start a program with the settings of its job: threads, processors, allocator.

Runs on nodes as ``python3 -I`` with Python 3.6 or later and needs only the standard library.

  gpunode-run torchrun --nproc-per-node 8 train.py        threads for 8 ranks, then the program
  torchrun --no-python --nproc-per-node 8 gpunode-run ./train.py
                                                          the same for each rank, bound to the cores near its GPU
  gpunode-run --print docker                              arguments for docker run
"""

import argparse
import glob
import json
import os
import re
import subprocess
import sys
from typing import Any, Dict, List, NoReturn, Optional, Tuple

CONFIGURATION = "/etc/gpunode/job.json"
DRIVER = "/proc/driver/nvidia/gpus"
NEW_NAME = (2, 10)
"""The first PyTorch to read PYTORCH_ALLOC_CONF alone; later ones read the old name too, with a warning."""
MALLOCS = {"jemalloc": "libjemalloc.so.2", "tcmalloc": "libtcmalloc_minimal.so.4"}
XLA = "--xla_gpu_enable_latency_hiding_scheduler=true"
QUERY_S = 30
MOST_CPUS = 1 << 16


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return the number of threads for each of several processes: together at most one per core."""
    return max(1, cores // max(1, ranks))


def cpu_list(text: str) -> List[int]:
    """Parse ``0-3,8`` as the kernel writes it."""
    cpus: List[int] = []
    for part in text.strip().split(","):
        match = re.match(r"(\d{1,6})(?:-(\d{1,6}))?$", part.strip())
        if match:
            first, last = int(match.group(1)), int(match.group(2) or match.group(1))
            cpus += range(first, min(last, MOST_CPUS) + 1)
    return sorted(set(cpus))


def share(cpus: List[int], siblings: Dict[int, int], index: int, number: int) -> List[int]:
    """Return the processors of one of ``number`` ranks: whole cores, with both threads of each.

    ``siblings`` maps a processor to the first one of its core.
    """
    cores: Dict[int, List[int]] = {}
    for cpu in cpus:
        cores.setdefault(siblings.get(cpu, cpu), []).append(cpu)
    names = sorted(cores)
    each, more = divmod(len(names), number)
    if each == 0:
        return sorted(cpus)
    first = index * each + min(index, more)
    chosen = names[first : first + each + (1 if index < more else 0)]
    return sorted(cpu for name in chosen for cpu in cores[name])


def read(path: str) -> str:
    """Return a small file's text; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def gpus(root: str = "/sys") -> List[str]:
    """Return the PCI slots of NVIDIA's GPUs, in the order of PCI_BUS_ID."""
    slots = []
    for folder in sorted(glob.glob(os.path.join(root, "bus/pci/devices/*"))):
        if read(folder + "/vendor").strip() == "0x10de" and read(folder + "/class").startswith("0x03"):
            slots.append(os.path.basename(folder))
    return slots


def siblings(cpus: List[int], root: str = "/sys") -> Dict[int, int]:
    """Return each processor's core, named by its first processor."""
    cores = {}
    for cpu in cpus:
        near = cpu_list(read(os.path.join(root, "devices/system/cpu/cpu%d/topology/thread_siblings_list" % cpu)))
        cores[cpu] = near[0] if near else cpu
    return cores


def visible(slots: List[str], variable: Optional[str], folder: str = DRIVER) -> List[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, indices or UUIDs; all if it names anything else."""
    if variable is None:
        return slots
    words = [word.strip() for word in variable.split(",")]
    names = {str(index): slot for index, slot in enumerate(slots)}
    if any(word.startswith("GPU-") for word in words):
        for slot in slots:
            match = re.search(r"^GPU UUID:\s*(\S+)", read(os.path.join(folder, slot, "information")), re.MULTILINE)
            names.update((word, slot) for word in words if match and len(word) > 4 and match.group(1).startswith(word))
    return [names[word] for word in words] if all(word in names for word in words) else slots


def binding(rank: int, ranks: int, allowed: List[int], root: str = "/sys", chosen: Optional[str] = None) -> List[int]:
    """Return the processors for one rank of this node: its part of those near its GPU, among the allowed ones."""
    cores = siblings(allowed, root)
    slots = visible(gpus(root), chosen)
    if len(slots) != ranks:
        return share(allowed, cores, rank, ranks)
    near = [cpu_list(read(os.path.join(root, "bus/pci/devices", slot, "local_cpulist"))) for slot in slots]
    cpus = sorted(set(near[rank]) & set(allowed))
    if not cpus:
        return share(allowed, cores, rank, ranks)
    fellows = [index for index in range(ranks) if set(near[index]) == set(near[rank])]
    return share(cpus, cores, fellows.index(rank), len(fellows))


def allocator(version: Optional[str]) -> Tuple[str, str]:
    """Return name and value of PyTorch's setting for expandable segments, by the installed version."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    new = match is not None and (int(match.group(1)), int(match.group(2))) >= NEW_NAME
    return ("PYTORCH_ALLOC_CONF" if new else "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"


def torch_version(program: List[str]) -> Optional[str]:
    """Return the version of the PyTorch that a program would import; None if it cannot be determined."""
    path = which(program[0]) if program else None
    if path is None:
        return None
    interpreter = path
    if not os.path.basename(path).startswith("python"):
        # A program that can be started but not read has no shebang: no lines, no words.
        first = (read(path).splitlines() or [""])[0][:400].strip()
        words = first[2:].split() if first.startswith("#!") else []
        if not words or "python" not in words[-1]:
            return None
        interpreter = (which(words[-1]) or "") if words[0].endswith("/env") else words[0]
    question = "import importlib.metadata as m; print(m.version('torch'))"
    try:
        done = subprocess.run(
            [interpreter, "-c", question],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=QUERY_S,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()[:40] or None if done.returncode == 0 else None


def which(name: str) -> Optional[str]:
    """Return the path of a program."""
    if "/" in name:
        return name if os.access(name, os.X_OK) else None
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def malloc_library(name: str) -> Optional[str]:
    """Return the path of an allocator's library; None if it is not installed."""
    suffix = MALLOCS[name]
    for pattern in ("/usr/lib/*-linux-gnu/", "/usr/lib64/", "/usr/lib/", "/usr/local/lib/"):
        for path in sorted(glob.glob(pattern + suffix)):
            return path
    return None


def configuration(path: str) -> Dict[str, Any]:
    """Return the node's settings for jobs; raise ValueError with one line for a malformed file."""
    text = read(path)
    if not text:
        if path == CONFIGURATION:
            return {}
        raise ValueError("--config %s: is empty or unreadable" % path)
    try:
        document = json.loads(text)
    except ValueError as err:
        raise ValueError("%s is not valid JSON: %s" % (path, err)) from None
    kinds = {"environment": dict, "docker": list}
    if not isinstance(document, dict) or any(
        not isinstance(document.get(key, kind()), kind) for key, kind in kinds.items()
    ):
        raise ValueError("%s: expected an object with the keys environment (an object) and docker (a list)" % path)
    return document


def environment(
    options: argparse.Namespace, settings: Dict[str, Any], inherited: Dict[str, str], allowed: List[int]
) -> Dict[str, str]:
    """Return the variables for the job; variables of the caller stay unchanged."""
    variables = {str(name): str(value) for name, value in settings.get("environment", {}).items()}
    ranks = ranks_of(options, inherited)
    cores = len(set(siblings(allowed).values()))
    threads = str(options.threads or threads_per_rank(cores, ranks))
    variables.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
    if options.expandable_segments:
        name, value = allocator(options.torch_version or torch_version(options.program))
        variables[name] = value
    if options.xla:
        variables["XLA_FLAGS"] = " ".join(filter(None, [inherited.get("XLA_FLAGS"), XLA]))
    if options.malloc:
        library = malloc_library(options.malloc)
        if library is None:
            raise ValueError(
                "--malloc %s: %s is not installed: set ml_environment_malloc for the role ml_environment, or install it"
                % (options.malloc, MALLOCS[options.malloc])
            )
        variables["LD_PRELOAD"] = ":".join(filter(None, [library, inherited.get("LD_PRELOAD")]))
    joined = {"XLA_FLAGS", "LD_PRELOAD"}
    return {name: value for name, value in variables.items() if name in joined or name not in inherited}


def ranks_of(options: argparse.Namespace, inherited: Dict[str, str]) -> int:
    """Return the number of processes of the job on this node."""
    if options.ranks:
        return int(options.ranks)
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        if inherited.get(name, "").isdigit():
            return max(1, int(inherited[name]))
    return max(1, len(visible(gpus(), inherited.get("CUDA_VISIBLE_DEVICES"))))


def local_rank(inherited: Dict[str, str]) -> Optional[int]:
    """Return this process's number on the node; None without a launcher."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        if inherited.get(name, "").isdigit():
            return int(inherited[name])
    return None


def parsed(argv: List[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="gpunode-run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=count, help="processes of the job on this node (default: one per GPU)")
    parser.add_argument("--threads", type=count, help="threads of each process (default: cores / ranks)")
    parser.add_argument("--no-bind", action="store_true", help="do not bind ranks to processors")
    parser.add_argument("--expandable-segments", action="store_true", help="PyTorch: disables CUDA IPC")
    parser.add_argument("--torch-version", help="do not query the program's Python")
    parser.add_argument("--malloc", choices=sorted(MALLOCS), help="preload this allocator")
    parser.add_argument("--xla", action="store_true", help="JAX: overlap communication and computation")
    parser.add_argument("--config", default=CONFIGURATION, help="settings of the node for jobs (%(default)s)")
    parser.add_argument(
        "--print", dest="show", choices=["env", "docker"], help="print the settings without starting the program"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the program and its arguments")
    options = parser.parse_args(argv)
    if options.program[:1] == ["--"]:
        options.program = options.program[1:]
    if not options.program and not options.show:
        parser.error("a program is required, or --print")
    return options


def count(text: str) -> int:
    """Parse a number of processes or threads."""
    if not text.isdigit() or not 1 <= int(text) <= MOST_CPUS:
        raise argparse.ArgumentTypeError("%s is not a number from 1 to %d" % (text, MOST_CPUS))
    return int(text)


def main(argv: List[str]) -> int:
    """Start the program in place of this one; return 2 for wrong usage, 127 if the program does not exist."""
    options = parsed(argv)
    allowed = sorted(os.sched_getaffinity(0))
    inherited = dict(os.environ)
    # torchrun sets 1 if the variable is not set; --threads 1 requests 1 explicitly.
    if "TORCHELASTIC_RUN_ID" in inherited and inherited.get("OMP_NUM_THREADS") == "1":
        del inherited["OMP_NUM_THREADS"]
    try:
        settings = configuration(options.config)
        rank, ranks = local_rank(inherited), ranks_of(options, inherited)
        if rank is not None and rank >= ranks:
            raise ValueError("this is rank %d of the node, but --ranks is %d" % (rank, ranks))
        if rank is not None and not options.no_bind and not options.show:
            # Slurm and mpirun bind their ranks themselves: a share of their share would leave cores idle.
            if len(allowed) == os.cpu_count():
                os.sched_setaffinity(0, binding(rank, ranks, allowed, chosen=inherited.get("CUDA_VISIBLE_DEVICES")))
            options.threads = options.threads or threads_per_rank(
                len(set(siblings(sorted(os.sched_getaffinity(0))).values())), 1
            )
        variables = environment(options, settings, inherited, allowed)
    except ValueError as err:
        sys.stderr.write("gpunode-run: %s\n" % err)
        return 2
    if options.show == "docker":
        words = [str(word) for word in settings.get("docker", [])]
        words += [
            word
            for name, value in sorted(variables.items())
            if name != "LD_PRELOAD"
            for word in ("--env", name + "=" + value)
        ]
        sys.stdout.write(" ".join(words) + "\n")
        return 0
    if options.show == "env":
        sys.stdout.write("".join("%s=%s\n" % item for item in sorted(variables.items())))
        return 0
    return start(options.program, dict(inherited, **variables))


def start(program: List[str], variables: Dict[str, str]) -> NoReturn:
    """Replace this process with the program."""
    try:
        os.execvpe(program[0], program, variables)  # noqa: S606 - the user's own program
    except OSError as err:
        sys.stderr.write("gpunode-run: %s: %s\n" % (program[0], err.strerror))
        sys.exit(127)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
