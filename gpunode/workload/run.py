"""The workload on a node: the catalog's image for it, the transport to its engine, its records in the bundle."""

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from packaging.version import Version

from gpunode.catalog import GpuMatch, load
from gpunode.checks import identify
from gpunode.checks.gpus import model_of
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.fleet import MissingProgram, Node, NodeFailure
from gpunode.fleet.session import PYTHONS
from gpunode.probe import Answer
from gpunode.text import listed
from gpunode.tuning import payload_settings
from gpunode.workload.container import hides_image
from gpunode.workload.image import ImageFile, read_image_file
from gpunode.workload.launch import WorkloadRequest, failed, launch
from gpunode.workload.options import BURN_S, END_S, FRAMEWORKS, WORKLOAD_TIMEOUT_S, WorkloadOptions
from gpunode.workload.transport import LaunchFailure, ProgramStream

DOCKER = ("docker", "/usr/bin/docker", "/usr/local/bin/docker")
_CONNECT_S = 10.0
PYTORCH = FRAMEWORKS[0]
Progress = Callable[[str, str], None]
"""Called with a node's name and what it does."""


def image_of(named: str | None, file: ImageFile | None, framework: str, node: NodeFacts) -> str:
    """Return the image that is named, else that of the file, else the catalog's for the node."""
    if named is not None:
        return named
    return (file.name or file.id) if file is not None else catalog_image(node, framework)


def catalog_image(node: NodeFacts, framework: str = PYTORCH) -> str:
    """Return the framework's newest image of the catalog that the node's driver and GPUs support.

    Raises LaunchFailure if there is none.

    An image with the driver's CUDA or an older one takes precedence over one that relies on compatibility within CUDA's
    major version.
    """
    cuda_version = identify(node).stack.cuda
    if cuda_version is None:
        raise LaunchFailure("image", "the CUDA version of the driver is unknown: set an image with --image IMAGE")
    models = [model_of(device) for device in node.gpus_on_bus or ()]
    known = [str(match.common["compute_capability"]) for match in models if match and _capability(match)]
    architectures = {str(node.architecture)}
    image = image_for(Version(cuda_version), architectures, known, framework)
    if image is None:
        raise LaunchFailure(
            "image", f"{no_image(cuda_version, architectures, known, framework)}: name one with --image"
        )
    return image


def image_for(
    cuda: Version, architectures: Collection[str], capabilities: Iterable[str], framework: str = PYTORCH
) -> str | None:
    """Return the newest image of the catalog for a driver with that CUDA, on all of these machines and GPUs."""
    known = list(map(Version, capabilities))
    fitting = [
        row
        for row in load().workload_images.values()
        if row.framework == framework
        and row.digest != "unpublished"
        and set(architectures) <= set(row.arch)
        and all(Version(row.min_compute_capability) <= capability for capability in known)
    ]
    supported = [row for row in fitting if Version(row.cuda).release[:2] <= cuda.release[:2]]
    near = [row for row in fitting if Version(row.cuda).major == cuda.major]
    return next((row.reference for row in (*supported, *near)), None)


def no_image(cuda: str, architectures: Collection[str], capabilities: Iterable[str], framework: str = PYTORCH) -> str:
    """Return that ``image_for`` has no answer, for a message."""
    known = list(map(Version, capabilities))
    lowest = f" and compute capability {min(known)}" if known else ""
    return f"no image of the catalog with {framework} is for CUDA {cuda}{lowest} on {listed(sorted(architectures))}"


def _capability(match: GpuMatch) -> bool:
    return match.common.get("compute_capability") is not None


@dataclass(frozen=True)
class Workload:
    """Work of ``fleet.collect`` on each node after its probe."""

    request: WorkloadRequest
    limit_s: float
    end_s: float
    """Between the launcher's limit and the node's, for the launcher to report what was not done in time."""
    facts: Callable[[Answer], NodeFacts]
    progress: Progress = lambda *_: None

    def __call__(self, node: Node, answer: Answer, deadline: float) -> list[dict[str, Any]]:
        """Run the workload and return its records."""
        name = node.target.name
        ends = deadline - self.end_s
        transport = NodeTransport(node, ends, self.request.python)
        return launch(transport, self.facts(answer), self.request, ends, lambda text: self.progress(name, text))

    def failed(self, reason: str) -> list[dict[str, Any]]:
        """Return the reason as the only record."""
        return failed(f"the workload: {reason}", self.request.level)


def read_request(options: WorkloadOptions) -> WorkloadRequest:
    """Return the request; UsageError for options that contradict each other, and for a file that is not an image."""
    if options.image is not None and not options.image.strip():
        raise UsageError("--image: the name is empty")
    if options.framework is not None and (options.image or options.image_file or options.no_container):
        raise UsageError(
            "--workload chooses the catalog's image: --image, --image-file and --no-container name another"
        )
    if options.no_container and options.image_timeout_s is not None:
        raise UsageError("--no-container uses no image: --image-timeout cannot be combined with it")
    if options.no_container and (options.image or options.image_file):
        raise UsageError("--no-container uses no image: --image and --image-file cannot be combined with it")
    if options.python is not None and not options.no_container:
        raise UsageError("--python names a Python of the nodes: it applies to --no-container")
    if options.python is not None and not PurePosixPath(options.python).is_absolute():
        raise UsageError(f'--python: "{options.python}" is not an absolute path (example: /opt/venv/bin/python3)')
    for name, directory in (("--storage", options.storage), ("--data", options.data)):
        if directory is not None and not PurePosixPath(directory).is_absolute():
            raise UsageError(f'{name}: "{directory}" is not an absolute path (example: /data)')
        if directory is not None and not options.no_container and hides_image(directory):
            raise UsageError(
                f"{name} {directory}: containers have their own directory there: choose another one, or use "
                "--no-container"
            )
    if options.model_rate is not None and options.data is None:
        raise UsageError("--model-rate applies to --data DIR: name the directory")
    if options.burn_s is not None and options.burn_s >= options.run_limit_s:
        raise UsageError(
            f"--burn {options.burn_s:g} does not fit into --workload-timeout {options.run_limit_s:g}: remove "
            f"--workload-timeout, or set at least {options.burn_s + WORKLOAD_TIMEOUT_S['deep'] - BURN_S:g}"
        )
    file = read_image_file(options.image_file) if options.image_file else None
    return WorkloadRequest(
        image=functools.partial(image_of, options.image, file, options.framework or FRAMEWORKS[0]),
        named=bool(options.image or file),
        file=file,
        in_container=not options.no_container,
        python=options.python,
        force=options.force,
        image_limit_s=options.image_limit_s,
        run_limit_s=options.run_limit_s,
        settings=payload_settings(),
        level=options.level,
        storage=options.storage,
        burn_s=options.burn_s,
        data=options.data,
        model_rate=options.model_rate,
    )


def following(options: WorkloadOptions, facts: Callable[[Answer], NodeFacts]) -> Callable[[Progress], Workload]:
    """Return what is run on each node after its probe, once its progress is known. Raises UsageError.

    ``facts`` reads a node's answer.
    """
    request = read_request(options)
    return lambda progress: Workload(request, options.limit_s, END_S, facts, progress)


class NodeTransport:
    """Transport over the connection of the probe, see ``workload.Transport``."""

    def __init__(self, node: Node, deadline: float, python: str | None = None) -> None:
        self._node = node
        self._deadline = deadline
        self._python = python

    @property
    def as_root(self) -> tuple[bool, ...]:
        """See Transport: with sudo if the probe had it; else as the login user, and with a sudo that does not ask."""
        if self._node.is_root:
            return (False,)
        if self._node.becomes_root:
            return (True, False)
        return (False, True) if self._node.target.become is None else (False,)

    @property
    def user(self) -> str:
        """See Transport."""
        return self._node.user

    def engine(self, *, root: bool) -> ProgramStream:
        """See Transport."""
        if self._node.target.ssh is None and not root:
            return _LocalEngine()
        missing = "no Docker engine on the node (docker is not installed): the role docker installs it"
        return self._stream(
            DOCKER, ("system", "dial-stdio"), root=root, missing=LaunchFailure("no-engine", missing), label="docker"
        )

    def python(self, program: str, arguments: tuple[str, ...]) -> ProgramStream:
        """See Transport."""
        named = self._python or self._node.target.python
        set_by = "--python" if self._python else "ansible_python_interpreter"
        missing = f"{named or 'python3'} is not installed on the node: install it, or set {set_by}"
        return self._stream(
            (named,) if named else PYTHONS,
            ("-I", "-c", program, *arguments),
            root=False,
            missing=LaunchFailure("no-python", missing),
            label="the workload",
        )

    def _stream(
        self, names: tuple[str, ...], arguments: tuple[str, ...], *, root: bool, missing: LaunchFailure, label: str
    ) -> ProgramStream:
        limit_s = max(1.0, self._deadline - time.monotonic())
        try:
            return self._node.stream(names, arguments, sudo=root, limit_s=limit_s, missing=str(missing), label=label)
        except MissingProgram:
            raise missing from None
        except NodeFailure as err:
            kind = "permission" if root and str(err).startswith("sudo") else "broke-off"
            raise LaunchFailure(kind, str(err)) from None


class _LocalEngine:
    """A connection to the engine of this machine."""

    def __init__(self) -> None:
        host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        if not host.startswith("unix://"):
            raise LaunchFailure(
                "no-engine", f"DOCKER_HOST={host}: the workload runs on this machine: unset DOCKER_HOST"
            )
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_CONNECT_S)
        try:
            self.sock.connect(host.removeprefix("unix://"))
        except PermissionError:
            raise LaunchFailure("permission", "no permission on its socket") from None
        except FileNotFoundError:
            raise LaunchFailure("no-engine", "no Docker engine on this machine: the role docker installs it") from None
        except OSError as err:
            raise LaunchFailure(
                "no-engine",
                f"the Docker engine does not run ({err.strerror}): see systemctl status docker, or run the role docker",
            ) from None

    def complaint(self) -> str:
        """See workload.ProgramStream."""
        return ""

    def close(self) -> None:
        """See workload.ProgramStream: shut the socket down, because a reader does not notice that it is closed."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
