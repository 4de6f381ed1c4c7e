"""The image that the catalog gives to a node where none is named."""

from typing import Any

import pytest

from gpunode.catalog import load
from gpunode.facts import NodeFacts
from gpunode.facts.models.smi import Smi, SmiLog
from gpunode.facts.pci import PciDevice
from gpunode.workload.run import catalog_image
from gpunode.workload.transport import LaunchFailure

IMAGES = {name: row.image for name, row in load().workload_images.items()}
H100, V100, P100, GH200 = "2330", "1db1", "15f7", "2342"


def test_every_image_has_a_compiler() -> None:
    """torch.compile needs one: PyTorch's -runtime images have none, NVIDIA's and the -devel ones do."""
    assert {image for image in IMAGES.values() if "-runtime" in image} == set()
    begins = ("nvcr.io/nvidia/", "gpunode-validator:")
    assert all(image.startswith(begins) or image.endswith("-devel") for image in IMAGES.values())


def node(cuda: str | None, *device_ids: str, arch: str = "x86_64") -> NodeFacts:
    def device(device_id: str) -> PciDevice:
        values: dict[str, Any] = dict.fromkeys(PciDevice.model_fields)
        values |= {"slot": "0000:01:00.0", "vendor_id": "10de", "device_id": device_id, "class_id": "030200"}
        return PciDevice.model_construct(**values)

    return NodeFacts(
        host="gpu-1",
        collected_at="2026-11-20T00:00:00Z",
        simulated=False,
        gaps={},
        architecture=arch,
        pci=tuple(device(device_id) for device_id in device_ids),
        smi=Smi[SmiLog](document={"cuda_version": cuda, "gpus": []}),
    )


@pytest.mark.parametrize(
    ("facts", "image"),
    [
        (node("13.2", H100), "pytorch-26.05"),
        (node("13.0", H100), "pytorch-25.10"),
        (node("12.8", H100), "pytorch-2.7-cu128"),
        (node("12.4", H100), "pytorch-2.6-cu124"),
        (node("12.2", H100), "pytorch-2.7-cu128"),  # nothing as old: one of the same major version
        (node("12.8", GH200, arch="aarch64"), "pytorch-25.03"),
        (node("12.4", GH200, arch="aarch64"), "pytorch-24.04"),
        (node("12.6", GH200, arch="aarch64"), "pytorch-24.04"),
        (node("12.4", V100), "pytorch-2.6-cu124"),
        (node("12.8", V100), "pytorch-2.7-cu126"),
        (node("13.2", V100), "pytorch-2.7-cu126"),  # CUDA 13 has left Volta behind
        (node("12.8", H100, P100), "pytorch-2.7-cu126"),
        (node("13.2", H100, arch="aarch64"), "pytorch-26.05"),
        (node("13.2", "ffff"), "pytorch-26.05"),  # a GPU that the catalog has not: by the driver alone
    ],
)
def test_the_newest_that_driver_and_gpus_run(facts: NodeFacts, image: str) -> None:
    assert catalog_image(facts) == IMAGES[image]


def test_the_framework_chooses_the_image() -> None:
    assert catalog_image(node("13.2", H100)) == IMAGES["pytorch-26.05"]
    for cuda in ("12.8", "12.4"):
        assert catalog_image(node(cuda, H100), "tensorflow") == IMAGES["tensorflow-25.02"]
    # CUDA 13's driver runs an older image; the row's CUDA comes before it.
    assert catalog_image(node("13.0", V100), "tensorflow") == IMAGES["tensorflow-25.02"]
    with pytest.raises(LaunchFailure, match=r"with tensorflow is for CUDA 12\.8 .* on aarch64"):
        catalog_image(node("12.8", GH200, arch="aarch64"), "tensorflow")


def test_ours_is_the_default_by_its_digest_once_a_release_has_published_it(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, digest = load(), f"sha256:{'0a' * 32}"
    rows = {
        name: row.model_copy(update={"digest": digest}) if row.digest == "unpublished" else row
        for name, row in catalog.workload_images.items()
    }
    assert [name for name in rows if name.startswith("validator-")] == list(rows)[:2]
    monkeypatch.setattr(type(catalog), "workload_images", property(lambda _: rows))
    image = f"gpunode-validator:cuda@{digest}"
    assert {catalog_image(node(cuda, H100)) for cuda in ("13.0", "13.2", "14.0")} == {image}
    assert catalog_image(node("13.0", H100), "tensorflow") == f"gpunode-validator:tensorflow-cuda@{digest}"
    # Another driver, GPU or machine than it is built for.
    assert catalog_image(node("12.8", H100)) == IMAGES["pytorch-2.7-cu128"]
    assert catalog_image(node("13.0", V100)) == IMAGES["pytorch-2.7-cu126"]
    assert catalog_image(node("13.2", H100, arch="aarch64")) == IMAGES["pytorch-26.05"]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            node("11.4", H100),
            "no image of the catalog with pytorch is for CUDA 11.4 and compute capability 9.0 on x86_64",
        ),
        (node("12.8", V100, arch="aarch64"), "on aarch64"),
        (node(None, H100), "the CUDA version of the driver is unknown"),
    ],
)
def test_none_fits(facts: NodeFacts, words: str) -> None:
    with pytest.raises(LaunchFailure, match=words) as caught:
        catalog_image(facts)
    assert "--image" in str(caught.value)
