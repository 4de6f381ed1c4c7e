"""Archives that are in a node's sources already, or must leave them."""

from gpunode.provisioning.repository import archive_file, old_toolkit_files
from gpunode.provisioning.state import AptSource


def source(file: str, *uris: str, types: str = "deb") -> AptSource:
    return AptSource(file=file, uris=uris, types=tuple(types.split()), suites=("/",), components=())


def test_an_archive_is_found_however_it_is_written() -> None:
    own_file, users = "/etc/apt/sources.list.d/own.sources", "/etc/apt/sources.list.d/nvidia-container-toolkit.list"
    uri = "https://nvidia.github.io/libnvidia-container/stable/deb"
    for written in (uri, uri + "/", uri + "/$(ARCH)", uri + "/amd64/"):
        assert archive_file([source(own_file, uri), source(users, written)], uri + "/amd64", own_file) == users
    assert archive_file([source(own_file, uri)], uri, own_file) is None
    assert archive_file([source(users, uri, types="deb-src")], uri, own_file) is None
    assert archive_file([source(users, uri + "-other")], uri, own_file) is None


def test_the_sources_of_nvidia_docker_are_old_and_the_toolkits_are_not() -> None:
    host = "https://nvidia.github.io"
    sources = [
        source("/etc/a.list", f"{host}/libnvidia-container/stable/debian11/amd64"),
        source("/etc/a.list", f"{host}/nvidia-docker/debian11/amd64"),
        source("/etc/b.list", f"{host}/nvidia-container-runtime/ubuntu20.04/amd64"),
        source("/etc/c.list", f"{host}/libnvidia-container/stable/deb/$(ARCH)"),
        source("/etc/d.list", f"{host}/nvidia-docker/debian11/amd64"),
        source("/etc/d.list", "http://mirror.test/debian"),
    ]
    assert old_toolkit_files(sources) == ["/etc/a.list", "/etc/b.list"]
