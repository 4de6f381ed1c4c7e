"""The role firewall: what its settings let through, what is refused, and when something is pending."""

import hashlib
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from node_samples import after, by_path, contents, context, file, node, planned, settings_of

from gpunode.provisioning.firewall import FOLDER, FOLLOWED, LOADED, REMOVE, RULES, UNIT
from gpunode.provisioning.firewall_policy import (
    CONF,
    ZONE_FILE,
    FirewallPolicy,
    FirewallSettings,
    lets_in,
    nft_text,
    policy_of,
    with_default_zone,
)
from gpunode.provisioning.manifest import Manifest, RevertibleChange
from gpunode.provisioning.state import NodeState

INSTALLED = {"nftables": "1.0.6-2"}
HERE = {"client": "10.1.2.3", "port": 22}
SETTINGS: dict[str, Any] = {"state": "present", "ssh_networks": ["10.0.0.0/8"]}
ANSWER = {"rules": {"error": None}}
OWN = "a" * 64


def policy(**changes: Any) -> FirewallPolicy:
    return policy_of(FirewallSettings.model_validate(settings_of("firewall", **{**SETTINGS, **changes})))


def service(**changes: Any) -> dict[str, Any]:
    return {"name": "web", "protocol": "tcp", "ports": ["80"], "networks": ["any"], **changes}


def packet_filter(table: str | None = None) -> dict[str, Any]:
    tables = ["inet gpunode"] if table else []
    return {
        "tables": tables,
        "refusing": tables,
        "ipv4_refused": bool(table),
        "ipv6_refused": bool(table),
        "own": table,
    }


def bare(installed: dict[str, str] | None = None, **facts: Any) -> NodeState:
    state = node(INSTALLED if installed is None else installed, facts={"packet_filter": packet_filter(), **facts})
    return state.model_copy(
        update={"connection": NodeState.model_validate({**state.model_dump(), "connection": HERE}).connection}
    )


def requested(state: NodeState, answers: dict[str, Any] | None = None, **changes: Any) -> Manifest:
    run = context(answers=ANSWER if answers is None else answers)
    return planned("firewall", state, run, **{**SETTINGS, **changes})


def guarded(manifest: Manifest) -> RevertibleChange:
    assert manifest.guarded is not None
    return manifest.guarded


def settled(state: NodeState, manifest: Manifest, table: str | None = OWN, listed: str = OWN) -> NodeState:
    """The node with the manifest's files, its unit, and a table that is listed as OWN."""
    digest = hashlib.sha256((by_path(manifest, RULES).content or "").encode()).hexdigest()
    machine = after(manifest, state)
    document = machine.model_dump()
    document["contents"][LOADED] = f"{digest}  -\n{listed}  -\n"
    document["facts"]["packet_filter"] = packet_filter(table)
    document["facts"]["units"] = [*(document["facts"]["units"] or ()), unit(UNIT)]
    return NodeState.model_validate(document)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ssh_networks": []}, "firewall_ssh_networks is empty"),
        ({"ssh_ports": []}, "firewall_ssh_ports is empty"),
        ({"ssh_ports": ["ssh"]}, "firewall_ssh_ports: ssh is not a port"),
        ({"ssh_networks": ["10.0.0.7/8"]}, "write 10.0.0.0/8 for the network"),
        ({"cluster_networks": ["ib0"]}, "firewall_cluster_networks: ib0 is not a network"),
        ({"cluster_interfaces": ["eth0; flush"]}, "eth0; flush is not the name of an interface"),
        ({"container_interfaces": ['"']}, "is not the name of an interface"),
        ({"services": [service(name="Web Site")]}, "entry 1 (Web Site): name must be"),
        ({"services": [service(), service()]}, "entry 2 (web): the name is used twice"),
        ({"services": [service(name="ssh")]}, "the name is used twice"),
        ({"services": [service(networks=[])]}, "ports and networks are required"),
        ({"services": [service(ports=["90-80"])]}, "90-80 is not a port"),
        ({"services": [service(ports=["0"])]}, "0 is not a port"),
        ({"services": [service(ports=["65536"])]}, "65536 is not a port"),
        ({"extra_rules": ["} chain other {"]}, "write one rule of the input chain on one line"),
        ({"extra_rules": ["accept\naccept"]}, "write one rule of the input chain on one line"),
    ],
)
def test_what_is_wrong_is_named_and_refused(changes: dict[str, Any], problem: str) -> None:
    assert any(problem in line for line in policy(**changes).problems), policy(**changes).problems
    manifest = requested(bare(), **changes)
    assert any(problem in line for line in manifest.refusals)
    assert manifest.questions == {}


def test_everything_is_in_its_chain() -> None:
    text = nft_text(
        policy(
            cluster_networks=["192.168.7.0/24", "fd01::/64"],
            services=[
                service(rate=5),
                service(name="node-exporter", ports=["9100", "9400-9410", "9405-9500"], networks=["10.5.0.1"]),
                service(name="statsd", protocol="udp", ports=["8125"], networks=["fd02::/64"]),
            ],
            extra_rules=["tcp dport 7 accept"],
        )
    )
    chains = dict(re.findall(r"(?s)\tchain (\w+) \{\n(.*?)\n\t\}", text))
    assert list(chains) == ["input", "forward", "services", "published", "routed"]
    assert "policy drop" in chains["input"]
    assert all('iifname "docker0" accept' in chains[chain] for chain in ("input", "forward"))
    assert chains["input"].index("jump services") < chains["input"].index("tcp dport 7 accept")
    assert "ip saddr { 192.168.7.0/24 } accept" in chains["services"]
    assert "ip6 saddr { fd01::/64 } accept" in chains["routed"]
    assert "tcp dport { 9100, 9400-9500 } ip saddr { 10.5.0.1 } accept" in chains["services"]
    assert "udp dport { 8125 } ip6 saddr { fd02::/64 } accept" in chains["services"]
    assert "ct original proto-dst 9400-9500 ip saddr { 10.5.0.1 } accept" in chains["published"]
    for chain in ("services", "published"):
        limited, open_to_all = (chains[chain].index(word) for word in ("limit rate over 5/minute", "{ ::/0 } accept"))
        assert limited < open_to_all
    for chain in ("published", "routed"):
        assert chains[chain].endswith("counter drop")
    assert text.startswith("# ")
    assert text.index("delete table inet gpunode") < text.index("table inet gpunode {")


def test_networks_within_others_are_left_out() -> None:
    text = nft_text(policy(ssh_networks=["10.0.0.0/8", "10.1.0.0/16", "10.1.2.3", "192.0.2.0/24"]))
    assert "{ 10.0.0.0/8, 192.0.2.0/24 }" in text


def test_the_cluster_is_believed_on_its_interfaces_alone() -> None:
    text = nft_text(policy(cluster_networks=["192.168.7.0/24"], cluster_interfaces=["ib*"]))
    assert 'iifname "ib*" ip saddr { 192.168.7.0/24 } accept' in text
    assert "\t\tip saddr { 192.168.7.0/24 } accept" not in text


@pytest.mark.parametrize(
    ("address", "port", "changes", "allowed"),
    [
        ("10.1.2.3", 22, {}, True),
        ("::ffff:10.1.2.3", 22, {}, True),
        ("10.1.2.3", 2222, {}, False),
        ("11.1.2.3", 22, {}, False),
        ("fe80::1%eth0", 22, {"ssh_networks": ["fe80::/10"]}, True),
        ("192.168.7.2", 2222, {"cluster_networks": ["192.168.7.0/24"]}, True),
        ("192.168.7.2", 2222, {"cluster_networks": ["192.168.7.0/24"], "cluster_interfaces": ["ib0"]}, False),
    ],
)
def test_who_may_log_in(address: str, port: int, changes: dict[str, Any], allowed: bool) -> None:
    assert lets_in(policy(**changes), address, port) is allowed


def test_the_controllers_own_address_must_be_allowed() -> None:
    assert "10.1.2.3 at port 22" in requested(bare(), ssh_networks=["192.0.2.0/24"]).refusals[0]
    assert requested(bare(), ssh_networks=["192.0.2.0/24"], require_controller=False).refusals == ()
    unknown = bare().model_copy(update={"connection": None})
    assert "could not be determined" in requested(unknown).refusals[0]
    assert requested(unknown, require_controller=False).refusals == ()
    local = planned("firewall", unknown, context(answers=ANSWER, local=True), **SETTINGS)
    assert local.refusals == ()


def test_nft_judges_new_rules_before_anything_changes() -> None:
    unanswered = requested(bare(), answers={})
    assert unanswered.questions["rules"].kind == "nft_check"
    assert "chain input" in unanswered.questions["rules"].body["text"]
    rejected = requested(bare(), answers={"rules": {"error": "syntax error, unexpected string"}})
    assert "syntax error" in rejected.refusals[0]
    # Without nft on the node there is nobody to ask yet: the file is validated when it is written.
    first = requested(bare(installed={}), answers={})
    assert first.questions == {}
    assert guarded(first).checks == (("/usr/sbin/nft", "-c", "-f", RULES),)
    check = planned("firewall", bare(installed={}), context(check=True), **SETTINGS)
    assert guarded(check).checks == ()
    # In check mode the folder is not made, so that nft could not be shown the file in it.
    assert FOLDER in {folder.path for folder in first.folders}
    preview = planned("firewall", bare(), context(check=True, answers=ANSWER), **SETTINGS)
    assert guarded(preview).checks == ()
    made = node(INSTALLED, files={FOLDER: {"kind": "folder", "mode": "0755"}}, facts={"packet_filter": packet_filter()})
    run = context(check=True, answers=ANSWER)
    shown = planned("firewall", made, run, **SETTINGS, require_controller=False)
    assert guarded(shown).checks == guarded(first).checks


def unit(name: str, active: str = "active") -> dict[str, Any]:
    return {"name": name, "load": "loaded", "active": active, "sub": "running", "enabled": "enabled"}


STOCK_UFW = """\
# /etc/ufw/ufw.conf
#

# Set to yes to start on boot. If setting this remotely, be sure to add a rule
# to allow your remote connection before starting ufw. Eg: 'ufw allow 22/tcp'
ENABLED=no

# Please use the 'ufw' command to set the loglevel. Eg: 'ufw logging medium'.
# See 'man ufw' for details.
LOGLEVEL=low
"""


@pytest.mark.parametrize(
    ("conf", "refused"),
    [
        # On every Ubuntu server the unit is active; `ufw disable` leaves it so, and writes ENABLED=no.
        (STOCK_UFW, False),
        (STOCK_UFW.replace("=no", "=yes"), True),
        (STOCK_UFW.replace("=no", "=YES"), True),
        (STOCK_UFW.replace("=no", '="yes"'), True),
        (f"ENABLED=yes\n{STOCK_UFW}", False),
        ("#ENABLED=yes\n", False),
        (None, False),
    ],
)
def test_an_enabled_ufw_is_another_owner_of_the_policy(conf: str | None, refused: bool) -> None:
    state = bare(units=[unit("ufw.service")])
    document = state.model_dump()
    document["contents"]["/etc/ufw/ufw.conf"] = conf
    refusals = requested(NodeState.model_validate(document)).refusals
    assert ["ufw disable" in line for line in refusals] == [True] * refused


@pytest.mark.parametrize("name", ["vxlan.calico", "vxlan-v6.calico", "wireguard.cali", "wg-v6.cali", "virbr0"])
def test_traffic_from_overlays_and_guests_is_left_to_its_owner(name: str) -> None:
    """Names: projectcalico/calico felix dataplanedefs and docs.rke2.io (NetworkManager); libvirt.org formatnetwork."""
    interfaces = settings_of("firewall")["container_interfaces"]
    text = contents(requested(bare(), container_interfaces=interfaces))[RULES] or ""
    fitting = [pattern for pattern in interfaces if fnmatchcase(name, pattern)]
    assert fitting
    assert f'iifname "{fitting[0]}" accept' in text.partition("chain forward")[2]


CONF_TEXT = "# firewalld config file\n\n# default zone\nDefaultZone=public\n\nCleanupOnExit=yes\n"


def zoned(conf: str | None = CONF_TEXT) -> NodeState:
    state = bare(units=[unit("firewalld.service")])
    document = state.model_dump()
    document["contents"][CONF] = conf
    document["files"][CONF] = file(conf or "", mode="0640")
    return NodeState.model_validate(document)


def test_with_firewalld_the_policy_is_a_zone_and_the_table_has_no_input() -> None:
    services = [service(name="web", ports=["80", "81-90"], rate=5)]
    manifest = requested(zoned(), services=services, cluster_networks=["192.168.7.0/24"])
    zone = by_path(manifest, ZONE_FILE).content or ""
    rules = [line.strip() for line in zone.splitlines() if "<rule" in line]
    assert rules == [
        '<rule family="ipv4"><source address="192.168.7.0/24"/><accept/></rule>',
        '<rule family="ipv4"><source address="10.0.0.0/8"/><port port="22" protocol="tcp"/><accept/></rule>',
        '<rule family="ipv4"><port port="80-90" protocol="tcp"/><accept><limit value="5/m"/></accept></rule>',
        '<rule family="ipv6"><port port="80-90" protocol="tcp"/><accept><limit value="5/m"/></accept></rule>',
    ]
    table = by_path(manifest, RULES).content or ""
    assert "hook input" not in table
    assert "goto published" in table
    conf = by_path(manifest, CONF)
    assert conf.content == CONF_TEXT.replace("public", "gpunode")
    assert conf.mode == "0640"
    change = guarded(manifest)
    assert change.activate[-1] == (change.restore or ())[-1] == ("firewall-cmd", "--reload")
    assert ("firewall-offline-cmd", "--check-config") in change.checks


def test_a_site_replaces_the_rules_and_the_zone(tmp_path: Path) -> None:
    (tmp_path / "firewall").mkdir()
    for path, text in (("firewall.nft.j2", "{{ table }} {{ services[0] }}\n"), ("zone.xml.j2", "<zone/>{{ zone }}\n")):
        (tmp_path / "firewall" / path).write_text(text, encoding="utf-8")
    run = context(answers=ANSWER, templates=str(tmp_path))
    texts = contents(planned("firewall", zoned(), run, **SETTINGS))
    assert texts[RULES] == "gpunode tcp dport { 22 } ip saddr { 10.0.0.0/8 } accept\n"
    assert texts[ZONE_FILE] == "<zone/>gpunode\n"


def test_firewalld_gets_its_default_zone_back() -> None:
    manifest = requested(zoned())
    state = settled(zoned(), manifest)
    assert requested(state, answers={}).pending_reasons == ()
    gone = planned("firewall", state, context(), state="absent")
    assert by_path(gone, CONF).content == CONF_TEXT
    assert by_path(gone, ZONE_FILE).content is None
    # The old zone may lack a port of SSH: a login must work with it.
    assert {by_path(gone, path).phase for path in (CONF, ZONE_FILE)} == {"guarded"}
    assert guarded(gone).activate == (("firewall-cmd", "--reload"),)
    assert gone.commands == ()
    assert with_default_zone("A=b\n", "x") == "A=b\nDefaultZone=x\n"


@pytest.mark.parametrize(
    ("state", "changes", "problem"),
    [
        (zoned(None), {}, "could not be read"),
        (zoned(), {"extra_rules": ["accept"]}, "firewall_extra_rules"),
        (zoned(), {"cluster_interfaces": ["ib0"]}, "firewall_cluster_interfaces"),
    ],
)
def test_what_firewalld_cannot_do_is_refused(state: NodeState, changes: dict[str, Any], problem: str) -> None:
    assert problem in requested(state, **changes).refusals[0]


def test_a_settled_node_is_not_asked_and_nothing_is_pending() -> None:
    manifest = requested(bare())
    state = settled(bare(), manifest)
    again = requested(state, answers={})
    assert again.questions == {}
    assert again.pending_reasons == ()


@pytest.mark.parametrize(
    ("table", "listed", "reason"),
    [
        (None, OWN, "the table gpunode is not loaded"),
        ("b" * 64, OWN, "the table gpunode was changed since it was loaded"),
    ],
)
def test_rules_that_the_kernel_lost_are_pending(table: str | None, listed: str, reason: str) -> None:
    manifest = requested(bare())
    assert requested(settled(bare(), manifest, table, listed), answers={}).pending_reasons == (reason,)


def test_the_first_load_watches_and_reverts_to_nothing_and_later_ones_to_the_old_file() -> None:
    manifest = requested(bare())
    first = guarded(manifest)
    assert "gpunode_watch" in first.activate[0][1]
    assert (first.restore or ())[-1][-1] == "add table inet gpunode; delete table inet gpunode"
    later = guarded(requested(settled(bare(), manifest), ssh_ports=["22", "2222"]))
    assert later.activate[-1] == ("systemctl", "reload-or-restart", UNIT)
    assert later.restore == (("systemctl", "reload-or-restart", UNIT),)


def test_the_table_comes_back_when_the_distributions_unit_starts_and_flushes_it() -> None:
    manifest = requested(bare())
    drop_in = by_path(manifest, FOLLOWED).content or ""
    assert f"--no-block try-reload-or-restart {UNIT}" in drop_in
    assert {file.phase for file in manifest.files} == {"guarded"}


def test_packages_of_both_managers() -> None:
    assert (change := requested(bare()).packages) is not None
    assert change.manager == "apt"
    dnf = node({"nftables": "1"}, dnf=True, facts={"packet_filter": packet_filter()})
    change = planned("firewall", dnf, context(answers=ANSWER), **SETTINGS, require_controller=False).packages
    assert change is not None
    assert change.manager == "dnf"
    assert change.install == ("nftables",)


def test_absent_removes_all_of_it() -> None:
    state = settled(bare(), requested(bare()))
    gone = planned("firewall", state, context(), state="absent")
    assert {file.path for file in gone.files if file.content is None} >= {RULES, FOLLOWED}
    assert "the table gpunode is loaded" in gone.pending_reasons
    assert [(unit.name, unit.state, unit.phase) for unit in gone.units] == [(UNIT, "stopped", "before")]
    facts = state.facts.model_copy(update={"units": ()})
    orphan = planned("firewall", state.model_copy(update={"facts": facts}), context(), state="absent")
    # nft goes with its package.
    assert [(command.argv[-1], command.phase) for command in orphan.commands] == [(REMOVE, "before")]
    assert planned("firewall", bare(), context(), state="absent").pending_reasons == ()


def test_a_node_is_left_as_it_is_unless_a_state_is_set() -> None:
    assert planned("firewall", bare(), context()) == Manifest(role="firewall")
