"""The workload of ``validate``: its options, the way to a node's engine, and its records in the bundle."""

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import click
from packaging.version import Version

from gpunode.catalog import GpuMatch, load
from gpunode.checks import identify
from gpunode.checks.gpus import model_of
from gpunode.cli.seconds import Seconds
from gpunode.cli.selection import Say
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.fleet import MissingProgram, Node, NodeFailure
from gpunode.fleet.session import PYTHONS
from gpunode.probe.bundle import Bundle
from gpunode.tuning import payload_settings
from gpunode.workload import ImageFile, LaunchFailure, Stream, Wish, failed, launch, read_image_file

DOCKER = ("docker", "/usr/bin/docker", "/usr/local/bin/docker")
_CONNECT_S = 10.0
_END_S = 3.0
"""What the launcher leaves of the node's time, to say itself what was not done in time."""
_BETWEEN_S = 60.0
"""For all that is asked of an engine beside the image and the run."""


@dataclass(frozen=True)
class Options:
    """The workload as it was asked for on the command line."""

    image: str | None
    image_file: Path | None
    no_container: bool
    force: bool
    workload_timeout_s: float | None
    image_timeout_s: float | None
    storage: str | None = None
    burn_s: float | None = None
    level: Literal["standard", "deep"] = "standard"

    @property
    def run_limit_s(self) -> float:
        """How long a node's workload may run."""
        return self.workload_timeout_s or WORKLOAD_TIMEOUT_S[self.level]

    @property
    def image_limit_s(self) -> float:
        """How long bringing its image may take."""
        return self.image_timeout_s or IMAGE_TIMEOUT_S

    @property
    def limit_s(self) -> float:
        """How long both may take on a node; one without a container has no image."""
        return self.run_limit_s + _END_S + (0.0 if self.no_container else self.image_limit_s + _BETWEEN_S)

    @property
    def given(self) -> list[str]:
        """The options that somebody wrote."""
        values = (
            *(self.image, self.image_file, self.no_container, self.force, self.workload_timeout_s),
            *(self.image_timeout_s, self.storage, self.burn_s),
        )
        return [name for name, value in zip(NAMES, values, strict=True) if value not in (None, False)]


NAMES = (
    *("--image", "--image-file", "--no-container", "--force", "--workload-timeout", "--image-timeout"),
    *("--storage", "--burn"),
)
DEEP_ONLY = ("--storage", "--burn")
WORKLOAD_TIMEOUT_S = {"standard": 900.0, "deep": 2100.0}
IMAGE_TIMEOUT_S = 1800.0


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options, and hand them to the command as ``workload``."""

    @functools.wraps(command)
    def with_options(*context: Any, **values: Any) -> Any:
        chosen = Options(**{name: values.pop(name) for name in Options.__dataclass_fields__ if name != "level"})
        return command(*context, workload=chosen, **values)

    decorated: Callable[..., Any] = with_options
    for decorate in reversed(
        (
            click.option("--image", metavar="IMAGE", help="Container image for the workload; default: the catalog's."),
            click.option(
                "--image-file",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="Its archive (docker save): loaded where a node has not got it.",
            ),
            click.option("--no-container", is_flag=True, help="Run the workload with the node's own Python."),
            click.option("--force", is_flag=True, help="Use GPUs that others compute on too."),
            click.option(
                "--workload-timeout",
                "workload_timeout_s",
                type=Seconds(20),
                metavar="SECONDS",
                help="Hard limit for a node's workload, image aside.  [default: "
                + ", ".join(f"{limit_s:g} at level {level}" for level, limit_s in WORKLOAD_TIMEOUT_S.items())
                + "]",
            ),
            click.option(
                "--image-timeout",
                "image_timeout_s",
                type=Seconds(20),
                metavar="SECONDS",
                help=f"Hard limit for pulling or loading its image.  [default: {IMAGE_TIMEOUT_S:g}]",
            ),
            click.option(
                "--storage",
                metavar="DIR",
                help="Level deep: measure the storage of this directory of the node (fio, DataLoader).",
            ),
            click.option(
                "--burn",
                "burn_s",
                type=Seconds(1),
                metavar="SECONDS",
                help="Level deep: length of the sustained load.  [default: 120]",
            ),
        )
    ):
        decorated = decorate(decorated)
    return decorated


def read_wish(options: Options) -> Wish:
    """What is to be run; UsageError for options that contradict each other, and for a file that is no image."""
    if options.image is not None and not options.image.strip():
        raise UsageError("--image: an image needs a name")
    if options.no_container and options.image_timeout_s is not None:
        raise UsageError("--no-container uses no image: --image-timeout cannot be combined with it")
    if options.no_container and (options.image or options.image_file):
        raise UsageError("--no-container uses no image: --image and --image-file cannot be combined with it")
    if options.storage is not None and not PurePosixPath(options.storage).is_absolute():
        raise UsageError(f"--storage: expected the path of a directory of the nodes from / on, found {options.storage}")
    file = read_image_file(options.image_file) if options.image_file else None
    return Wish(
        image=functools.partial(_image, options.image, file),
        named=bool(options.image or file),
        file=file,
        in_container=not options.no_container,
        force=options.force,
        image_limit_s=options.image_limit_s,
        run_limit_s=options.run_limit_s,
        settings=payload_settings(),
        level=options.level,
        storage=options.storage,
        burn_s=options.burn_s,
    )


def _image(named: str | None, file: ImageFile | None, node: NodeFacts) -> str:
    if named is not None:
        return named
    return (file.name or file.id) if file is not None else catalog_image(node)


def catalog_image(node: NodeFacts) -> str:
    """The newest image of the catalog that the node's driver and GPUs run; LaunchFailure where there is none.

    One whose CUDA the driver has comes before one that relies on compatibility within CUDA's major version.
    """
    told = identify(node).stack.cuda
    if told is None:
        raise LaunchFailure("image", "the CUDA of the driver was not seen, so no image can be chosen: --image IMAGE")
    cuda = Version(told)
    models = [model_of(device) for device in node.gpus_on_bus or ()]
    known = [Version(str(match.common["compute_capability"])) for match in models if match and _capability(match)]
    fitting = [
        row
        for row in load().workload_images.values()
        if node.architecture in row.arch and all(Version(row.min_compute_capability) <= one for one in known)
    ]
    own = [row for row in fitting if Version(row.cuda).release[:2] <= cuda.release[:2]]
    near = [row for row in fitting if Version(row.cuda).major == cuda.major]
    for row in (*own, *near):
        return row.image
    lowest = f" and compute capability {min(known)}" if known else ""
    raise LaunchFailure(
        "image", f"no image of the catalog is for CUDA {told}{lowest} on {node.architecture}: name one with --image"
    )


def _capability(match: GpuMatch) -> bool:
    return match.common.get("compute_capability") is not None


@dataclass(frozen=True)
class Workload:
    """What ``fleet.collect`` does with each node after its probe."""

    wish: Wish
    limit_s: float
    facts: Callable[[Bundle], NodeFacts]
    say: Say = lambda name, text: None  # noqa: ARG005

    def __call__(self, node: Node, bundle: Bundle, deadline: float) -> Bundle:
        """Run the workload and put its records into the bundle."""
        name = node.target.name
        ends = deadline - _END_S
        records = launch(NodeWay(node, ends), self.facts(bundle), self.wish, ends, lambda text: self.say(name, text))
        return _with(bundle, records)

    def failed(self, bundle: Bundle, reason: str) -> Bundle:
        """The bundle with the reason as its one record."""
        bare = NodeFacts(host=bundle.host, collected_at=bundle.collected_at, simulated=bundle.simulated)
        return _with(bundle, failed(bare, f"the workload: {reason}"))


def _with(bundle: Bundle, records: list[dict[str, Any]]) -> Bundle:
    return bundle.model_copy(update={"results": [*bundle.results, *records]})


class NodeWay:
    """See ``workload.Way``: streams over the connection that the probe came by."""

    def __init__(self, node: Node, deadline: float) -> None:
        self._node = node
        self._deadline = deadline

    @property
    def as_root(self) -> tuple[bool, ...]:
        """See Way: with sudo where the probe had it; else as who logged in, and with a sudo that does not ask."""
        if self._node.is_root:
            return (False,)
        if self._node.becomes_root:
            return (True, False)
        return (False, True) if self._node.target.become is None else (False,)

    @property
    def user(self) -> str:
        """See Way."""
        return self._node.user

    def engine(self, *, root: bool) -> Stream:
        """See Way."""
        if self._node.target.ssh is None and not root:
            return _LocalEngine()
        missing = "there is no Docker engine on the node (no program docker): role docker installs it"
        return self._stream(
            DOCKER, ("system", "dial-stdio"), root=root, missing=LaunchFailure("no-engine", missing), what="docker"
        )

    def python(self, program: str, arguments: tuple[str, ...]) -> Stream:
        """See Way."""
        named = self._node.target.python
        missing = f"{named or 'python3'} is not on the node: install it, or set ansible_python_interpreter"
        return self._stream(
            (named,) if named else PYTHONS,
            ("-I", "-c", program, *arguments),
            root=False,
            missing=LaunchFailure("no-python", missing),
            what="the workload",
        )

    def _stream(
        self, names: tuple[str, ...], arguments: tuple[str, ...], *, root: bool, missing: LaunchFailure, what: str
    ) -> Stream:
        limit_s = max(1.0, self._deadline - time.monotonic())
        try:
            return self._node.stream(names, arguments, sudo=root, limit_s=limit_s, missing=str(missing), what=what)
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
            raise LaunchFailure(
                "no-engine", "there is no Docker engine on this machine: role docker installs it"
            ) from None
        except OSError as err:
            raise LaunchFailure(
                "no-engine", f"the Docker engine does not run ({err.strerror}): systemctl status docker, or role docker"
            ) from None

    def complaint(self) -> str:
        """See workload.Stream."""
        return ""

    def close(self) -> None:
        """See workload.Stream: whoever reads from it is told, which closing alone would not do."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
