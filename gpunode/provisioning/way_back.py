"""The way back from a change of the driver: the repositories must still offer the installed release.

A plan of playbooks/prepare.yml: it refuses a node that could not get its release again, before anything changes.
"""

import re
from collections.abc import Mapping

from gpunode.catalog.origins import upstream_version
from gpunode.frozen import Frozen
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import Manifest, NodeQuery
from gpunode.provisioning.running_driver import installed_driver
from gpunode.provisioning.state import Look, NodeState
from gpunode.text import listed

ROLE = "way_back"
LOOK = Look()
# libcuda1 and libcudadebugger1, libnvcuvid1 and libnvoptix1, libxnvctrl0: parts of the driver without its name.
_OF_DRIVER = re.compile(r"nvidia|^lib(cuda|nv|xnvctrl)|^cuda-drivers")


class WayBackResult(Frozen):
    """What the playbook keeps on the node."""

    release: str
    packages: tuple[str, ...]


def plan(state: NodeState, _: Mapping[str, object], context: Context) -> Manifest:
    """Return a manifest that refuses if a package of the installed release is not offered any more."""
    release = installed_driver(state.facts)
    names = sorted(
        package.name
        for package in state.facts.packages or ()
        if package.installed and _OF_DRIVER.search(package.name) and upstream_version(package.version) == release
    )
    if not release or not names:
        return Manifest(role=ROLE, refusals=("way-back: no driver of one release is installed: there is no way back",))
    answer = context.answers.get("offers")
    if answer is None:
        return Manifest(role=ROLE, questions={"offers": NodeQuery(kind="package_offers", body={"names": names})})
    if answer.get("error"):
        return Manifest(role=ROLE, refusals=(f"way-back: what the repositories offer is unknown: {answer['error']}",))
    offered = answer.get("offered") or {}
    gone = [name for name in names if release not in map(upstream_version, offered.get(name, ()))]
    if not gone:
        return Manifest(role=ROLE, result=WayBackResult(release=release, packages=tuple(names)))
    return Manifest(
        role=ROLE,
        refusals=(
            f"way-back: the repositories no longer offer {release} of {listed(gone, 3)}, so the node could not get its "
            "release again (gpunode upgrade --no-rollback continues without a way back)",
        ),
    )
