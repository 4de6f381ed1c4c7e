"""The filters of the role nvidia_fabric: driver release, PCI ids for conditions, addresses of an NVLink domain."""

from typing import Any

import pytest
from driver_samples import BUNDLE, facts_of

from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.provisioning import running_driver


def function(device: str, kind: str) -> dict[str, Any]:
    """A PCI function of NVIDIA."""
    slot = f"0000:{int(device, 16) % 200:02x}:00.0"
    ids = {"vendor_id": "10de", "device_id": device, "subsystem_id": None, "class_id": kind}
    return {"slot": slot, "driver": None, **ids}


node = NodeFacts.model_validate


@pytest.fixture
def facts() -> dict[str, Any]:
    """A Debian 12 node with Debian's driver 535."""
    return facts_of(BUNDLE)


def test_the_installed_driver_is_its_release(facts: dict[str, Any]) -> None:
    version = running_driver.installed_driver(node(facts))
    assert version.startswith("535.")
    assert "-" not in version


def test_no_driver_has_no_release(facts: dict[str, Any]) -> None:
    assert running_driver.installed_driver(node({**facts, "packages": []})) == ""


def test_switches_and_gpus_are_distinguished(facts: dict[str, Any]) -> None:
    bus = [
        function("2330", "030200"),
        function("2330", "030200"),
        function("22a3", "068000"),
        function("10f0", "040300"),
    ]
    ids = running_driver.pci_ids(node({**facts, "pci": bus}))
    assert ids["switches"] == ["0x10de:0x22a3"]
    assert ids["gpus"] == ["0x10de:0x2330"]
    assert set(ids["known_switches"]) >= {"0x10de:0x1af1", "0x10de:0x22a3"}


def test_a_board_with_invisible_switches_has_none(facts: dict[str, Any]) -> None:
    ids = running_driver.pci_ids(node({**facts, "pci": [function("2901", "030200")]}))
    assert (ids["switches"], ids["gpus"]) == ([], ["0x10de:0x2901"])


def test_addresses_of_a_domain_keep_the_hosts_order() -> None:
    hosts = {
        "b": {"ansible_host": "10.0.0.2"},
        "a": {"ansible_host": "login.example", "nvidia_fabric_imex_address": "10.0.0.1"},
        "c": {"ansible_host": "2001:db8::0:3"},
        "10.0.0.4": {},
    }
    assert running_driver.imex_addresses(["b", "a", "c", "10.0.0.4", "b"], hosts) == [
        "10.0.0.2",
        "10.0.0.1",
        "2001:db8::3",
        "10.0.0.4",
    ]


def test_a_name_in_place_of_an_address_is_refused_with_its_host() -> None:
    with pytest.raises(UsageError, match=r"gpu7: gpu7\.example is not an IP address.*nvidia_fabric_imex_address"):
        running_driver.imex_addresses(["gpu7"], {"gpu7": {"ansible_host": "gpu7.example"}})
