"""Helm values for Kubernetes nodes with gpunode's driver: NVIDIA's GPU Operator, or its device plugin alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from gpunode.catalog import Catalog, Kubernetes
from gpunode.stack.model import Stack
from gpunode.stack.plan import Plan
from gpunode.text import listed

OPERATOR, PLUGIN = "gpu-operator", "device-plugin"
REPOSITORY = "https://helm.ngc.nvidia.com/nvidia"
PLUGIN_REPOSITORY = "https://nvidia.github.io/k8s-device-plugin"
HOOK = "/usr/bin/nvidia-cdi-hook"
"""Program of the container toolkit to which a CDI specification refers on the host."""


@dataclass
class HelmValues:
    """A values file, and why it must not be used."""

    values: dict[str, Any]
    comments: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """One line for each stack that the component does not support."""


def operator_values(document: Plan, catalog: Catalog) -> HelmValues:
    """Return the values of the GPU Operator on nodes that have driver and container toolkit already.

    The Operator supports the driver branches of its component matrix; a stack of another branch is a problem.
    """
    row = catalog.kubernetes[OPERATOR]
    helm = HelmValues(
        {
            "driver": {"enabled": False},
            "toolkit": {"enabled": False},
            "cdi": {"enabled": True},
        }
    )
    helm.comments += [
        f"GPU Operator {row.version} on nodes provisioned by gpunode: driver and container toolkit are on the host.",
        f"helm install gpu-operator gpu-operator --repo {REPOSITORY} --version v{row.version} \\",
        "  --namespace gpu-operator --create-namespace --values FILE",
        f"Kubernetes {row.kubernetes} (component matrix of this release).",
    ]
    for hosts, stack in _stacks(document):
        helm.comments.append(f"{hosts}driver {_driver(stack)}, {_toolkit(stack)}")
        listed = {_branch(str(driver)): str(driver) for driver in row.drivers}
        branch = str(stack.driver.branch)
        if branch not in listed:
            helm.problems.append(
                f"{hosts}GPU Operator {row.version} does not support driver branch {branch} (supported: "
                f"{', '.join(map(str, row.drivers))}): request one of these with --driver, or use --format {PLUGIN}"
            )
        elif stack.driver.version not in (None, listed[branch]):
            helm.comments.append(f"  the component matrix lists {listed[branch]} of this branch")
        if stack.container_toolkit is None:
            helm.problems.append(f"{hosts}the stack has no container toolkit, and the Operator's is disabled here")
    return helm


def plugin_values(document: Plan, catalog: Catalog) -> HelmValues:
    """Return the values of the device plugin alone, with CDI in the container runtime."""
    row = catalog.kubernetes[PLUGIN]
    helm = HelmValues(
        {
            "deviceListStrategy": "cdi-cri",
            "runtimeClassName": "nvidia",
            "cdi": {"nvidiaHookPath": HOOK},
            "gfd": {"enabled": True},
        }
    )
    helm.comments += [
        f"NVIDIA device plugin {row.version} on nodes provisioned by gpunode: driver and toolkit are on the host.",
        f"helm install nvidia-device-plugin nvidia-device-plugin --repo {PLUGIN_REPOSITORY} --version {row.version} \\",
        "  --namespace nvidia-device-plugin --create-namespace --values FILE",
        f"Kubernetes {row.kubernetes}. The runtime class nvidia must exist; k3s and RKE2 create it.",
    ]
    for hosts, stack in _stacks(document):
        helm.comments.append(f"{hosts}driver {_driver(stack)}, {_toolkit(stack)}")
        helm.problems += [f"{hosts}{text}" for text in _too_old(row, stack)]
        if stack.container_toolkit is None:
            helm.problems.append(f"{hosts}the stack has no container toolkit, which injects the devices")
    return helm


def _stacks(document: Plan) -> Iterator[tuple[str, Stack]]:
    """Yield each stack with its hosts as the beginning of a line."""
    for group in document.groups:
        if group.stack is not None:
            names = listed(group.hosts, 3)
            yield f"{names}: " if names else "", group.stack


def _driver(stack: Stack) -> str:
    return f"{stack.driver.version or stack.driver.branch} ({stack.source}, {stack.module.flavour})"


def _toolkit(stack: Stack) -> str:
    toolkit = stack.container_toolkit
    return f"container toolkit {toolkit.version}" if toolkit is not None else "no container toolkit"


def _branch(version: str) -> str:
    return version.partition(".")[0]


def _too_old(row: Kubernetes, stack: Stack) -> Iterator[str]:
    have = Version(stack.driver.version or str(stack.driver.branch))
    if row.min_driver is not None and have < Version(str(row.min_driver)):
        yield f"device plugin {row.version} needs driver {row.min_driver} or later, the stack has {have}"
