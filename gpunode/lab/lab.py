"""A lab: a few nodes with one key pair, one network and one inventory, created and removed together."""

import itertools
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import docker
from docker.errors import NotFound
from docker.models.containers import Container

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab.engine import cgroup_mount, connect, docker_errors, few_watchers, locked, mtu, refuse_real_driver
from gpunode.lab.hardware import LAB_ARCHITECTURE, describe
from gpunode.lab.hardware.describe import BOOT_REPORT
from gpunode.lab.image import ensure_image
from gpunode.lab.node import LAB_LABEL, NODE_LABEL, PORT_LABEL, LabNode, Maker, NewNode, Ports
from gpunode.lab.packages.rows import repositories, repository_of
from gpunode.lab.recipe import Recipe, architecture, find_mirror, system_named
from gpunode.lab.repositories import VENDOR_LABEL, Vendor, VendorImages
from gpunode.lab.repositories import find as find_vendor
from gpunode.lab.repositories import start as start_vendor
from gpunode.lab.state import LabState

MOST_NODES = 64
LOCK_LIMIT_S = 900
_WORKERS = 8


class Lab:
    """A lab by name, whether it exists yet or not.

    ``progress`` gets one line for each step that takes time. Raises UsageError for an invalid name.
    """

    def __init__(self, name: str = "default", *, progress: Callable[[str], None] = lambda _: None) -> None:
        self.name = name
        self.state = LabState.of(name)
        self._progress = progress
        self._client: docker.DockerClient | None = None

    @property
    def inventory_path(self) -> Path:
        """Return the path of the inventory that ``up`` writes."""
        return self.state.inventory

    @property
    def client(self) -> docker.DockerClient:
        """Return a client of the engine; raise UndeterminedError if there is none."""
        if self._client is None:
            self._client = connect()
        return self._client

    def nodes(self) -> list[LabNode]:
        """Return the lab's nodes, running or not, ordered by name."""
        labelled = [container for container in self._containers() if NODE_LABEL in container.labels]
        nodes = [LabNode.of(container, self.state) for container in labelled]
        return sorted(nodes, key=lambda node: (node.os, len(node.name), node.name))

    def node(self, name: str) -> LabNode:
        """Return the node of that name; UsageError lists the existing nodes."""
        nodes = self.nodes()
        for node in nodes:
            if node.name == name:
                return node
        have = f"it has {', '.join(node.name for node in nodes)}" if nodes else "it has none: gpunode lab up"
        raise UsageError(f"lab {self.name} has no node {name}: {have}")

    def vendor(self) -> Vendor:
        """Return the lab's vendor repository; UsageError if it has none."""
        return find_vendor(self.client, self.name)

    def has_vendor(self) -> bool:
        """Return whether the lab has a vendor repository, running or not."""
        return any(VENDOR_LABEL in container.labels for container in self._containers())

    def up(
        self,
        count: int = 1,
        os: str = "debian-12",
        hardware: str | Sequence[str] | None = None,
        *,
        mirror: str | None = None,
        force: bool = False,
    ) -> list[LabNode]:
        """Make sure that the lab has at least ``count`` nodes of system ``os`` and that all its nodes run.

        With ``hardware`` (a name, or several) there are that many nodes of each hardware, and the lab has its vendor
        repository. Existing nodes are kept, also those of another system. Returns all nodes of the lab once each
        answers. ``force``: also on a machine that has the NVIDIA driver. When it fails or is interrupted, everything
        that this call created is removed again.
        """
        refuse_real_driver(force=force)
        system = system_named(os)
        kinds = [hardware] if isinstance(hardware, str) else list(dict.fromkeys(hardware or ()))
        if not 1 <= count * max(1, len(kinds)) <= MOST_NODES:
            raise UsageError(f"-n {count}: a lab has 1 to {MOST_NODES} nodes")
        for kind in kinds:
            of = describe(kind, "")["cpu"]["architecture"]
            if of != LAB_ARCHITECTURE:
                raise UsageError(f"--hardware {kind}: a machine of {of}, a lab shows {LAB_ARCHITECTURE} alone")
        if kinds and architecture() != "amd64":
            raise UsageError("simulated hardware is of x86_64 servers: --hardware needs such a machine")
        recipe = Recipe(system, architecture(), find_mirror(mirror))
        with locked(self.name, LOCK_LIMIT_S, self._progress), self._undone_unless_done() as stop:
            self._make_missing(recipe, count, kinds, stop, mirror)
        return self.nodes()

    def down(self) -> list[str]:
        """Remove everything of this lab, complete or not; return the names of what was removed."""
        with locked(self.name, LOCK_LIMIT_S, self._progress):
            removed = self._remove_containers(self._containers())
            removed += self._remove_networks()
            if self.state.remove():
                removed.append(str(self.state.folder))
        return removed

    def _containers(self) -> list[Container]:
        with docker_errors("asking Docker for the lab's nodes"):
            containers: list[Container] = self.client.containers.list(
                all=True, filters={"label": f"{LAB_LABEL}={self.name}"}, ignore_removed=True
            )
        return containers

    @property
    def _network(self) -> str:
        return f"gpunode-lab-{self.name}"

    def _make_missing(
        self, recipe: Recipe, count: int, kinds: Sequence[str], stop: threading.Event, mirror: str | None
    ) -> None:
        started = time.monotonic()
        existing = self.nodes()
        if existing and not self.state.has_key:
            again = f"gpunode lab down --name {self.name}, then up"
            raise UndeterminedError(f"lab {self.name} has nodes, but {self.state.key} that opens them is gone: {again}")
        self.state.prepare()
        taken = [node.name for node in existing]
        names: dict[str, str | None] = {}
        selected: Sequence[str | None] = kinds or [None]
        for kind in selected:
            alike = sum(node.os == recipe.system.id and node.hardware == kind for node in existing)
            names |= dict.fromkeys(_new_names(kind or recipe.system.short, count - alike, taken), kind)
        image = ""
        if names:
            cgroup_mount(recipe.system.id)  # fails here, before an image is built for a minute
            with locked(f"image {recipe.system.id}", LOCK_LIMIT_S, self._progress):
                image = ensure_image(self.client, recipe, self._progress)
            self._ensure_network()
        vendor: Callable[[], Vendor] | None = None
        if kinds or recipe.system.lookalike or any(map(_needs_vendor, existing)):
            images = VendorImages(self.client, self._progress, mirror, stop)
            images.ensure_base()
            rpm = any(map(_has_rpm, [recipe.system.id, *(node.os for node in existing)]))
            vendor = partial(start_vendor, images, self.name, self._network, rpm=rpm)
        self._progress(f"lab {self.name}: kept {len(existing)}, new {', '.join(names) or 'none'}")
        if names and (
            line := few_watchers(len(self.client.containers.list(filters={"label": NODE_LABEL})) + len(names))
        ):
            self._progress(line)
        ports = Ports(self._ports_in_use())
        plan = [NewNode(name, ports.take(), kind) for name, kind in names.items()]
        # A look-alike boots with the repository's keys; the packages for other nodes are built while these boot.
        first = vendor() if vendor and recipe.system.lookalike else None
        maker = Maker(
            self.client,
            self.name,
            self._network,
            self.state,
            recipe.system,
            image,
            recipe.init[-1],
            ports,
            tuple(first.entries(recipe.system.id) if first else ()),
            stop,
        )
        with ThreadPoolExecutor(_WORKERS) as pool:
            try:
                begun = pool.submit(vendor) if vendor and not first else None
                nodes = [*existing, *pool.map(maker.make, plan)]
                if repository := begun.result() if begun else first:
                    self.state.write_vendor_keys(repository.keys)
                self.state.write(nodes)
                for node, systemd in zip(nodes, pool.map(lambda node: self._boot(node, stop), nodes), strict=True):
                    self._progress(f"{node.name}: {systemd} after {time.monotonic() - started:.1f} s")
            except BaseException:
                stop.set()  # set before the pool waits for its threads
                raise

    def _boot(self, node: LabNode, stop: threading.Event) -> str:
        if not node.running:
            with docker_errors(f"{node.name}: starting"):
                node.container.start()
                node.container.reload()
        systemd = node.wait(stop=stop.is_set)
        if node.hardware and (trouble := node.run(["cat", BOOT_REPORT]).stdout.strip()):
            raise UndeterminedError(f"{node.name}: its simulated hardware did not start: {trouble.splitlines()[-1]}")
        return systemd

    def _ensure_network(self) -> None:
        with docker_errors(f"making the network {self._network}"):
            if not self.client.networks.list(names=[f"^{self._network}$"]):
                limit = mtu()
                options = {"com.docker.network.driver.mtu": str(limit)} if limit else {}
                self.client.networks.create(
                    self._network, driver="bridge", options=options, labels={LAB_LABEL: self.name}
                )

    def _ports_in_use(self) -> set[int]:
        with docker_errors("asking Docker for all labs' nodes"):
            others = self.client.containers.list(all=True, filters={"label": PORT_LABEL}, ignore_removed=True)
        return {int(container.labels[PORT_LABEL]) for container in others}

    @contextmanager
    def _undone_unless_done(self) -> Iterator[threading.Event]:
        """Yield the event that stops the workers; on any exception remove what was created in the context."""
        before = {container.id for container in self._containers()}
        had_state = self.state.folder.is_dir()
        stop = threading.Event()
        try:
            yield stop
        except BaseException:
            with _uninterrupted():
                self._progress(f"lab {self.name}: removing what was begun")
                self._remove_containers([new for new in self._containers() if new.id not in before])
                if not before:
                    self._remove_networks()
                if not had_state:
                    self.state.remove()
                elif self.state.has_key:
                    self.state.write(self.nodes())
            raise

    def _remove_containers(self, containers: Sequence[Container]) -> list[str]:
        def remove(container: Container) -> str:
            with docker_errors(f"removing {container.name}"):
                try:
                    container.remove(force=True, v=True)
                except NotFound:
                    return ""
            return str(container.name)

        with ThreadPoolExecutor(_WORKERS) as pool:
            return [name for name in pool.map(remove, containers) if name]

    def _remove_networks(self) -> list[str]:
        with docker_errors(f"removing the network {self._network}"):
            networks = self.client.networks.list(filters={"label": f"{LAB_LABEL}={self.name}"})
            for network in networks:
                network.remove()
            for volume in self.client.volumes.list(filters={"label": f"{LAB_LABEL}={self.name}"}):
                volume.remove()  # of nodes that were removed without it; the volumes of a container have its name
        return [str(network.name) for network in networks]


def _needs_vendor(node: LabNode) -> bool:
    return node.hardware is not None or system_named(node.os).lookalike


def _has_rpm(system: str) -> bool:
    """Return whether nodes of that system have dnf."""
    return repositories()[repository_of(system)].kind == "rpm"


def _new_names(stem: str, missing: int, taken: Collection[str]) -> list[str]:
    """Return as many new names as nodes are missing; gaps in the numbering are filled first."""
    free = (name for number in itertools.count(1) if (name := f"{stem}-{number}") not in taken)
    return list(itertools.islice(free, max(0, missing)))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore a second Ctrl-C during the clean-up, which is short and has a limit for every step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
