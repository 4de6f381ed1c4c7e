"""The vendor repository of a lab: one container that serves, under the name ``vendor``, what NVIDIA's servers would."""

import io
import tarfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import docker
from docker.errors import NotFound
from docker.models.containers import Container

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab.engine import docker_errors, run_in
from gpunode.lab.image import Progress
from gpunode.lab.node import LAB_LABEL
from gpunode.lab.packages.lookalike import SYSTEMS as LOOKALIKE_SYSTEMS
from gpunode.lab.packages.rows import repositories
from gpunode.lab.recipe import Entry
from gpunode.lab.repositories.image import VendorImages, serving

NAME = "vendor"
VENDOR_LABEL = "gpunode.lab.vendor"
FAULTS: Mapping[str, str] = {
    "fabric-manager-lags": "each branch's newest point release exists for the driver but not for the fabric manager",
    "unsigned": "the indices carry no signature",
    "expired-key": "the indices are signed with a key that expired",
    "unreachable": "nobody listens",
    "mid-sync": "the indices are newer than the Release files that list them, as on a mirror in the middle of a sync",
    "html": "every request is answered with an HTML page, as by a proxy that requires a login",
    "no-dkms": "NVIDIA's apt repositories offer no dkms",
    "package-gone": "packages listed in the index are missing (libraries of the driver, unless others are given)",
}
_GONE = ("libcuda1_*", "libnvidia-compute*", "libnvidia-ml*", "nvidia-driver-cuda-libs*")
_START_LIMIT_S = 240
_RPM_LIMIT_S = 600


@dataclass(frozen=True)
class Vendor:
    """A running vendor repository. Nodes of its network reach it as ``http://vendor``."""

    container: Container = field(repr=False)
    url: str = f"http://{NAME}"

    @property
    def running(self) -> bool:
        """Return whether its container ran at the last look."""
        return bool(self.container.status == "running")

    @cached_property
    def keys(self) -> dict[str, str]:
        """Return the public keys, armoured, by repository key: ``nvidia``, ``container-toolkit`` …"""
        names = {repository.key for repository in repositories().values()}
        return {name: _read(self.container, f"/srv/keys/{name}.asc") for name in sorted(names)}

    def urls(self) -> dict[str, str]:
        """Return the URL of each repository, by its name: ``debian12``, ``container-toolkit`` …"""
        return {name: f"{self.url}/{repository.path}" for name, repository in repositories().items()}

    def entries(self, system: str) -> list[Entry]:
        """Return the files of a node of that system for these repositories before its first boot: an Ubuntu has its
        archive.
        """
        like = LOOKALIKE_SYSTEMS.get(system)
        if like is None:
            return []
        if not like.ubuntu:
            name = f"rocky{like.version.partition('.')[0]}"
            key = f"etc/pki/rpm-gpg/{repositories()[name].key_file}"
            settings = f"baseurl={self.urls()[name]}\nenabled=1\ngpgcheck=1\ngpgkey=file:///{key}\n"
            text = f"[{repositories()[name].repo}]\nname=Rocky Linux (simulated)\n{settings}"
            return [Entry(key, self.keys["rocky"], 0o644), Entry("etc/yum.repos.d/rocky.repo", text, 0o644)]
        keyring = "usr/share/keyrings/ubuntu-archive-keyring.asc"
        source = (
            f"Types: deb\nURIs: {self.urls()['ubuntu']}\nSuites: {like.codename} {like.codename}-updates\n"
            f"Components: main restricted universe multiverse\nSigned-By: /{keyring}\n"
        )
        return [
            Entry(keyring, self.keys["ubuntu"], 0o644),
            Entry("etc/apt/sources.list.d/ubuntu.sources", source, 0o644),
        ]

    def fault(self, name: str, *arguments: str) -> None:
        """Activate a fault at once. ``package-gone`` takes shell patterns of file names as arguments."""
        _known(name)
        if arguments and name != "package-gone":
            raise UsageError(f"{' '.join(arguments)}: the vendor repository's fault {name} takes no arguments")
        text = " ".join(arguments or (_GONE if name == "package-gone" else ()))
        script = 'printf %s "$1" > "/srv/on/.$0" && mv "/srv/on/.$0" "/srv/on/$0"'
        self._run(["sh", "-c", script, name, text])
        self._settle(name)

    def heal(self, name: str | None = None) -> list[str]:
        """Deactivate one fault, or all; return the names of those that were active."""
        if name is not None:
            _known(name)
        on = [fault for fault in self.faults() if name in (None, fault)]
        if on:
            self._run(["rm", "-f", *(f"/srv/on/{fault}" for fault in on)])
            self._settle(*on)
        return on

    def faults(self) -> list[str]:
        """Return the active faults."""
        return self._run(["ls", "/srv/on"]).split()

    def leave_run_file(self, node: Container, release: str, flavour: str, kernel: str) -> None:
        """Write to a node what a ``.run`` installer of that driver leaves for that kernel, with its uninstaller.

        ``nvidia-uninstall --silent`` removes it.
        """
        argv = ["python3", "/srv/gpunode/runfile.py", release, flavour, kernel]
        with docker_errors("creating the files of a .run installer"):
            code, out, err = run_in(self.container, ["timeout", "-k", "5", "60", *argv])
            if code != 0 or not out:
                raise UndeterminedError(f"files of a .run installer: {err.decode(errors='replace').strip()}")
            node.put_archive("/", out)
            node.exec_run(["sh", "-c", 'ldconfig; depmod "$0"', kernel])

    def log(self) -> str:
        """Return the requests to the repository, one line each."""
        with docker_errors("reading the vendor repository's log"):
            text = self.container.logs()
        return text.decode("utf-8", errors="replace")

    def _settle(self, *names: str) -> None:
        """Wait until the listener has followed; all other faults apply from one request to the next."""
        if "unreachable" not in names:
            return
        deadline = time.monotonic() + 5
        expected = "unreachable" in self.faults()
        while time.monotonic() < deadline:
            with docker_errors("asking the vendor repository"):
                probe = "import socket; socket.create_connection(('127.0.0.1', 80), 1)"
                refused = self.container.exec_run(["python3", "-I", "-c", probe]).exit_code != 0
            if refused == expected:
                return
            time.sleep(0.05)
        raise UndeterminedError(f"the vendor repository does not {'stop' if expected else 'begin'} to listen")

    def _run(self, argv: list[str]) -> str:
        if not self.running:
            raise UndeterminedError("the vendor repository does not run: gpunode lab up starts it")
        with docker_errors(f"vendor repository: {argv[0]}"):
            code, out, err = run_in(self.container, ["timeout", "-k", "5", "30", *argv])
        text = (out + err).decode("utf-8", errors="replace")
        if code != 0:
            raise UndeterminedError(f"vendor repository: {argv[0]}: {text.strip()}")
        return text


def start(images: VendorImages, lab: str, network: str, *, rpm: bool = False) -> Vendor:
    """Make sure that the lab has a running vendor repository in ``network``.

    The container carries the lab's label, so that it is removed with the lab, and ``gpunode.lab.vendor``. Its keys are
    created at its first start and stay. With ``rpm`` it has the packages for systems with dnf before the first request.
    Raises UndeterminedError if it cannot be created or does not answer, or when ``images.stop`` is set.
    """
    client = images.client
    container = _existing(client, lab)
    if container is None:
        image = images.ensure(rpm=rpm)
        with docker_errors("creating the vendor repository's container"):
            container = client.containers.create(
                image,
                name=f"{network}-{NAME}",
                hostname=NAME,
                labels={LAB_LABEL: lab, VENDOR_LABEL: lab},
                network=network,
                networking_config={network: client.api.create_endpoint_config(aliases=[NAME])},
                restart_policy={"Name": "on-failure", "MaximumRetryCount": 2},
                init=True,
            )
            container.put_archive("/", serving())
    with docker_errors("starting the vendor repository"):
        container.start()
        container.reload()
    _wait(container, images.stop)
    if rpm:
        _have_rpm(container, images.progress)
    return Vendor(container)


def _have_rpm(container: Container, progress: Progress) -> None:
    """Let a repository made for systems with apt build the packages for dnf: dnf itself waits for seconds only."""
    with docker_errors("building the packages for dnf"):
        if container.exec_run(["test", "-e", "/srv/built/rpm"]).exit_code == 0:
            return
        progress("vendor repository: building the packages for systems with dnf (about a minute)")
        url = f"http://127.0.0.1/{repositories()['rhel9'].path}/"
        probe = f"import urllib.request; urllib.request.urlopen({url!r}, timeout={_RPM_LIMIT_S})"
        code, out, err = run_in(container, ["timeout", "-k", "5", str(_RPM_LIMIT_S), "python3", "-I", "-c", probe])
    if code != 0:
        text = (out + err).decode("utf-8", errors="replace").strip()
        raise UndeterminedError(f"vendor repository: building the packages for dnf failed: {text[-300:]}")


def find(client: docker.DockerClient, lab: str) -> Vendor:
    """Return the lab's vendor repository; UsageError if it has none."""
    container = _existing(client, lab)
    if container is None:
        raise UsageError(f"lab {lab} has no vendor repository: gpunode lab up --hardware NAME")
    return Vendor(container)


def _existing(client: docker.DockerClient, lab: str) -> Container | None:
    with docker_errors("looking for the vendor repository"):
        containers = client.containers.list(all=True, filters={"label": f"{VENDOR_LABEL}={lab}"}, ignore_removed=True)
    return containers[0] if containers else None


def _wait(container: Container, stop: threading.Event) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline and not stop.is_set():
        with docker_errors("asking the vendor repository"):
            container.reload()
            if container.status == "running":
                if container.exec_run(["test", "-e", "/srv/ready"]).exit_code == 0:
                    return
            elif container.status not in ("created", "restarting"):
                break
        time.sleep(0.1)
    with docker_errors("reading the vendor repository's log"):
        output = " ".join(container.logs(tail=3).decode(errors="replace").split())
    raise UndeterminedError(f"the vendor repository did not start: {output[-300:]}")


def _read(container: Container, path: str) -> str:
    try:
        with docker_errors(f"reading {Path(path).name} from the vendor repository"):
            stream, _ = container.get_archive(path)
    except NotFound:
        raise UndeterminedError(f"the vendor repository has no {path}") from None
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
        file = archive.extractfile(archive.getmembers()[0])
        return file.read().decode("ascii") if file else ""


def _known(name: str) -> None:
    if name not in FAULTS:
        raise UsageError(f"{name}: unknown fault of the vendor repository; known: {', '.join(FAULTS)}")
