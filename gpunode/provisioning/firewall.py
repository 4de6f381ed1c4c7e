"""The role firewall: a table of nftables in a unit of its own, loaded as a whole, reverted unless a login works."""

from __future__ import annotations

import hashlib
import re

from gpunode.provisioning.context import Context
from gpunode.provisioning.firewall_policy import (
    CONF,
    TABLE,
    ZONE,
    ZONE_FILE,
    FirewallPolicy,
    FirewallSettings,
    default_zone,
    lets_in,
    nft_text,
    policy_of,
    with_default_zone,
    zone_rules,
)
from gpunode.provisioning.manifest import (
    ManagedFile,
    ManagedFolder,
    Manifest,
    NodeCommand,
    NodeQuery,
    RevertibleChange,
    UnitState,
)
from gpunode.provisioning.role import Role, Texts
from gpunode.provisioning.state import Look, NodeState

UNIT = "gpunode-firewall.service"
FOLDER = "/etc/gpunode"
RULES = f"{FOLDER}/firewall.nft"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
ENABLED = f"/etc/systemd/system/sysinit.target.wants/{UNIT}"
LOADED = "/run/gpunode/firewall.loaded"
"""Record of the unit: the digest of the file, and that of the table as nft listed it after loading."""
NFT = "/usr/sbin/nft"
ZONE_BEFORE = "/var/lib/gpunode/firewall/default-zone-before"
DROP_INS = "/etc/systemd/system/nftables.service.d"
FOLLOWED = f"{DROP_INS}/gpunode-firewall.conf"
UFW_CONF = "/etc/ufw/ufw.conf"
FIREWALLD, UFW = "firewalld.service", "ufw.service"
REMOVE = f"add table inet {TABLE}; delete table inet {TABLE}"
WATCH = f"{TABLE}_watch"
"""A table that only tracks. Connections that were open before tracking are recognised by the traffic of both ends:
without it, the answers of a server to this node would count as new, and be dropped.
"""
WATCHING = (
    f"add table inet {WATCH}; add chain inet {WATCH} input {{ type filter hook input priority 0; policy accept; }}; "
    f"add rule inet {WATCH} input ct state established counter"
)
WATCHED_S = 3
# firewall-cmd asks the daemon, which reads the files itself: the offline tool checks those that do not exist yet.
ZONE_RELOAD = (("firewall-cmd", "--reload"),)
ZONE_CHECKS = (("firewall-offline-cmd", "--check-config"),)


ROLE = Role(
    name="firewall",
    title="Allow only what the policy lists, containers included, without locking out the controller",
    about=(
        "One table of nftables in a unit of its own, loaded in one transaction. Rules of Docker, Podman and CNI "
        "plugins are left alone, and ports that they publish do not bypass the policy.",
        "The node restores the old rules unless a new login succeeds after the change.",
    ),
    settings=FirewallSettings,
    reads=("packet_filter",),
    files=(RULES, UNIT_FILE, FOLLOWED, ZONE_BEFORE, ZONE_FILE),
    folders=(FOLDER, DROP_INS),
    packages=("nftables",),
    more=Look(contents=(LOADED, CONF, ZONE_BEFORE, UFW_CONF)),
)


@ROLE.present
def present(state: NodeState, settings: FirewallSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    policy = policy_of(settings)
    refusals = [*policy.problems, *_obstacles(state, policy)]
    if not refusals:
        refusals += _controller(state, settings, policy, context)
    zoned = _runs(state, FIREWALLD)
    text = nft_text(policy, host=not zoned, site=context.templates) if not refusals else ""
    installed = "nftables" in context.planned.installed(state.installed)
    same = state.files.get(RULES) is not None and state.files[RULES].sha256 == _digest(text)
    if not refusals and installed and not same and "nftables" in state.installed:
        # Rules that nft rejects are refused before anything is changed.
        question = NodeQuery(kind="nft_check", body={"text": text})
        answer = context.answers.get("rules")
        if answer is None:
            return Manifest(role=ROLE.name, questions={"rules": question})
        if answer.get("error"):
            refusals.append(f"nft rejects the rules: {answer['error']} (settings of firewall_extra_rules end up there)")
    template = ROLE.texts(context)
    zone = _zone_files(state, policy, template) if zoned and not refusals else ()
    of_unit = {"nft": NFT, "rules": RULES, "table": TABLE, "loaded": LOADED, "remove": REMOVE}
    texts = {
        RULES: text,
        UNIT_FILE: template(f"{UNIT}.j2", **of_unit),
        FOLLOWED: template("nftables.conf.j2", unit=UNIT),
    }
    files = (*(ManagedFile(path=path, content=content) for path, content in texts.items()), *zone)
    fresh = _not_loaded(state, text)
    return Manifest(
        role=ROLE.name,
        files=tuple(file.model_copy(update={"phase": "guarded"}) for file in files),
        folders=(ManagedFolder(path=FOLDER), ManagedFolder(path=ROLE.folder)),
        packages=ROLE.transaction(state, settings, ("nftables",)),
        guarded=_guarded(state, settings, context, zoned=zoned),
        units=(UnitState(name=UNIT, enabled=True, state="started"),),
        refusals=tuple(refusals),
        notes=_notes(state, zoned=zoned),
        pending_reasons=(fresh,) if fresh and not refusals else (),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with the table unloaded, and the previous default zone of firewalld.

    That zone may not allow a port of SSH that the policy allows: the change is reverted unless a new login succeeds.
    """
    zone, conf = state.contents.get(ZONE_BEFORE), state.contents.get(CONF)
    zoned = zone is not None and conf is not None
    files = [*manifest.files]
    if zoned and default_zone(conf or "") == ZONE:
        text = with_default_zone(conf or "", (zone or "public").strip())
        files.insert(0, _firewalld_conf(state, text))
    runs = zoned and _runs(state, FIREWALLD)
    of_zone = {"phase": "guarded" if runs else "after"}
    files = [file.model_copy(update=of_zone) if file.path in {CONF, ZONE_FILE} else file for file in files]
    revert_s = ROLE.of(context).revert_s
    packet_filter = state.facts.packet_filter
    left = packet_filter is not None and packet_filter.own is not None
    commands = []
    if left and state.unit(UNIT) is None:
        commands.append(NodeCommand(argv=(NFT, REMOVE), phase="before"))
    return manifest.updated(
        files=tuple(files),
        units=ROLE.stopped(state, UNIT),
        commands=tuple(commands),
        guarded=RevertibleChange(checks=ZONE_CHECKS, activate=ZONE_RELOAD, limit_s=revert_s) if runs else None,
        pending_reasons=(*manifest.pending_reasons, *([f"the table {TABLE} is loaded"] if left else [])),
    )


def _runs(state: NodeState, name: str) -> bool:
    unit = state.unit(name)
    return unit is not None and unit.active in ("active", "activating")


def _obstacles(state: NodeState, policy: FirewallPolicy) -> list[str]:
    """Return why another owner of the node's rules prevents the change."""
    if state.unit(UFW) is not None and (conf := state.contents.get(UFW_CONF)) is not None and _ufw_enabled(conf):
        return [
            f"ufw is enabled ({UFW_CONF}) and owns this node's rules: a node has one owner of its policy. Disable it "
            "(ufw disable), or do not run the role firewall"
        ]
    if not _runs(state, FIREWALLD):
        return []
    obstacles = []
    if state.contents.get(CONF) is None:
        obstacles.append(f"{FIREWALLD} is active and {CONF} could not be read")
    if policy.extra:
        obstacles.append("firewall_extra_rules: firewalld owns the node's input and does not support nft rules")
    if policy.cluster_interfaces:
        obstacles.append("firewall_cluster_interfaces: a zone of firewalld matches networks or interfaces, not both")
    return obstacles


def _ufw_enabled(conf: str) -> bool:
    """Return whether ufw filters: its unit is active on every Ubuntu server, also where ufw is not enabled.

    The last assignment counts, as in the shell that reads the file (ufw-init-functions of ufw 0.36).
    """
    values: list[str] = re.findall(r"""(?m)^[ \t]*ENABLED=["']?(\w*)""", conf)
    return values[-1:] in (["yes"], ["YES"])


def _controller(state: NodeState, settings: FirewallSettings, policy: FirewallPolicy, context: Context) -> list[str]:
    """Refuse a policy under which this run could not log in."""
    if not settings.require_controller or context.local:
        return []
    connection = state.connection
    if connection is None:
        return [
            "the address from which this run reaches the node could not be determined (no SSH_CONNECTION): "
            "firewall_require_controller: false skips this check, and firewall_revert_s still reverts a lockout"
        ]
    try:
        if lets_in(policy, connection.client, connection.port):
            return []
    except ValueError:
        return [f"the address from which this run reaches the node is not valid: {connection.client[:60]}"]
    return [
        f"this run reaches the node from {connection.client} at port {connection.port}, and firewall_ssh_networks with "
        f"firewall_ssh_ports would not allow it again: add them"
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _not_loaded(state: NodeState, text: str) -> str | None:
    """Return why the kernel's rules differ from the file; None if they match."""
    lines = (state.contents.get(LOADED) or "").split()
    digests = [line for line in lines if line != "-"]
    packet_filter = state.facts.packet_filter
    if packet_filter is None:
        return f"the table {TABLE} could not be read" if "nftables" in state.installed else None
    if packet_filter.own is None:
        return f"the table {TABLE} is not loaded"
    if digests[:1] != [_digest(text)]:
        return f"{RULES} is not the file that was loaded"
    return None if digests[1:] == [packet_filter.own] else f"the table {TABLE} was changed since it was loaded"


def _guarded(state: NodeState, settings: FirewallSettings, context: Context, *, zoned: bool) -> RevertibleChange:
    """Return how the rules are loaded, and how the old ones are."""
    unit = state.unit(UNIT)
    runs = unit is not None and unit.active == "active"
    gone = (NFT, f"add table inet {WATCH}; delete table inet {WATCH}")
    reload = ("systemctl", "reload-or-restart", UNIT)
    load = (("systemctl", "daemon-reload"), ("systemctl", "enable", UNIT), reload)
    zone, judge = (ZONE_RELOAD, ZONE_CHECKS) if zoned else ((), ())
    # In check mode nft, or the folder for the file to check, may not exist yet.
    unable = context.check and ("nftables" not in state.installed or state.kind(FOLDER) != "folder")
    return RevertibleChange(
        keep=(ENABLED,),
        units=(UNIT,),
        checks=() if unable else ((NFT, "-c", "-f", RULES), *judge),
        activate=(*(load if runs else ((NFT, WATCHING), ("sleep", str(WATCHED_S)), *load, gone)), *zone),
        restore=(*((reload,) if runs else (gone, (NFT, REMOVE))), *zone),
        limit_s=settings.revert_s,
    )


def _zone_files(state: NodeState, policy: FirewallPolicy, template: Texts) -> tuple[ManagedFile, ...]:
    """Return the zone, and firewalld.conf with it as the default; the previous default is kept for ``absent``."""
    conf = state.contents.get(CONF) or ""
    before = state.contents.get(ZONE_BEFORE) or f"{default_zone(conf)}\n"
    return (
        ManagedFile(path=ZONE_FILE, content=template("zone.xml.j2", zone=ZONE, rules=zone_rules(policy))),
        ManagedFile(path=ZONE_BEFORE, content=before),
        _firewalld_conf(state, with_default_zone(conf, ZONE)),
    )


def _firewalld_conf(state: NodeState, text: str) -> ManagedFile:
    return ManagedFile(path=CONF, content=text, **state.attributes(CONF))


def _notes(state: NodeState, *, zoned: bool) -> tuple[str, ...]:
    if zoned:
        return (
            "firewalld owns this node's input: interfaces that are bound to another zone keep that zone's rules (see "
            "firewall-cmd --get-active-zones), and rates count all sources together",
        )
    if not _runs(state, "nftables.service"):
        return ()
    return (
        "nftables.service is active beside this role: rules of /etc/nftables.conf apply too, and a packet that either "
        "drops is dropped",
    )
