"""An image as a file: what it is, and what is not an image."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpunode.errors import UsageError
from gpunode.workload.image import read_image_file

DIGEST = "85200f211b2efc4fbb41b449768d8ef43684" + "0" * 28


def archive(path: Path, manifest: object, others: Mapping[str, object] | None = None) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in {"manifest.json": manifest, **(others or {})}.items():
            data = json.dumps(content).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("config", [f"{DIGEST}.json", f"blobs/sha256/{DIGEST}"])
def test_both_forms_of_docker_save(tmp_path: Path, config: str) -> None:
    file = read_image_file(archive(tmp_path / "x.tar", [{"Config": config, "RepoTags": ["a/b:1"]}]))
    assert (file.id, file.name) == (f"sha256:{DIGEST}", "a/b:1")


def test_the_layers_are_those_of_the_images_configuration(tmp_path: Path) -> None:
    name, layers = f"blobs/sha256/{DIGEST}", ["sha256:" + "1" * 64]
    path = archive(
        tmp_path / "x.tar", [{"Config": name, "RepoTags": ["a/b:1"]}], {name: {"rootfs": {"diff_ids": layers}}}
    )
    assert read_image_file(path).layers == tuple(layers)
    assert read_image_file(archive(tmp_path / "y.tar", [{"Config": name, "RepoTags": None}], {name: {}})).layers == ()
    malformed: tuple[object, ...] = ("text", [], {"rootfs": "text"})
    for bad in malformed:
        with pytest.raises(UsageError, match="not an archive of one image"):
            read_image_file(archive(tmp_path / "z.tar", [{"Config": name, "RepoTags": None}], {name: bad}))


def test_an_image_without_a_name(tmp_path: Path) -> None:
    file = read_image_file(archive(tmp_path / "x.tar", [{"Config": f"{DIGEST}.json", "RepoTags": None}]))
    assert file.name is None


@pytest.mark.parametrize(
    "manifest",
    [[], {}, [{"Config": "x"}], [{"Config": "a", "RepoTags": []}] * 2, [{"Config": "a", "RepoTags": 5}], "text"],
)
def test_no_archive_of_one_image(tmp_path: Path, manifest: object) -> None:
    path = archive(tmp_path / "x.tar", manifest)
    with pytest.raises(UsageError, match=r"x.tar: not an archive of one image"):
        read_image_file(path)


def test_no_archive_at_all(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "cut.tar").write_bytes(archive(tmp_path / "x.tar", []).read_bytes()[:600])
    for name in ("text", "cut.tar"):
        with pytest.raises(UsageError, match="not an archive of one image"):
            read_image_file(tmp_path / name)
    with pytest.raises(UsageError, match="No such file"):
        read_image_file(tmp_path / "missing.tar")
