"""Mutants of the checks on what can be reached from outside."""

from bundles import Edit, guest, hgx, not_run, stdout, t4, text, timed_out
from machine_exposure import PENDING, RECORDED
from mutant import Missing, Mutant, cut, garbled

from gpunode.checks import Status

WARN = Status.WARN
ADDRESS = next(
    line.split("inet ")[1].split("/")[0]
    for line in RECORDED["addresses"]["stdout"].splitlines()
    if "eth0" in line and "inet " in line
)
LISTENING = 'tcp   LISTEN 0      4096   {address} 0.0.0.0:* users:(("{process}",pid=99,fd=9))\n'
NO_ANSWER = [
    Edit(("commands", "nft-own", "rc"), None, 1),
    Edit(("commands", "nft-own", "stdout"), None, ""),
]


def listening(address: str, process: str) -> Edit:
    """One more socket."""
    return stdout("sockets", None, RECORDED["sockets"]["stdout"] + LISTENING.format(address=address, process=process))


MUTANTS = [
    Mutant("host.firewall", "its table was flushed", t4, NO_ANSWER),
    Mutant(
        "host.firewall", "input is accepted", hgx, [stdout("nft-ruleset", '"policy": "drop"', '"policy": "accept"')]
    ),
    Mutant(
        "host.firewall",
        "IPv6 comes in",
        t4,
        [
            stdout(
                "nft-ruleset",
                '{"chain": {"family": "inet", "table": "gpunode", "name": "input"',
                '{"chain": {"family": "ip", "table": "gpunode", "name": "input"',
            )
        ],
    ),
    Mutant(
        "host.exposed-services",
        "the exporter is public",
        guest,
        [stdout("addresses", ADDRESS, "8.8.4.9"), listening("*:9400", "dcgm-exporter")],
        becomes=WARN,
    ),
    Mutant(
        "host.exposed-services",
        "a host engine on the public address",
        guest,
        [stdout("addresses", ADDRESS, "8.8.4.9"), listening("8.8.4.9:5555", "nv-hostengine")],
        becomes=WARN,
    ),
    Mutant("container.docker-api", "without TLS", t4, [listening("*:2375", "dockerd")]),
    Mutant("container.docker-api", "at a port of its own", t4, [listening("0.0.0.0:4000", "dockerd")]),
    Mutant("container.docker-api", "with TLS", t4, [listening("[::]:2376", "dockerd")], becomes=WARN),
    Mutant("container.docker-api", "on loopback", t4, [listening("127.0.0.1:2375", "dockerd")], becomes=WARN),
    Mutant(
        "container.docker-group",
        "a user is root without a password",
        t4,
        [text("/etc/group", None, "sudo:x:27:admin\ndocker:x:999:admin,ada\n")],
        becomes=WARN,
    ),
    Mutant(
        "node.security-updates",
        "one waits for months",
        hgx,
        [
            text(
                PENDING,
                None,
                '{"pending": [{"package": "docker.io", "installed": "1", "version": "2", '
                '"since": "2026-01-02T03:04:05+00:00"}]}\n',
            )
        ],
        becomes=WARN,
    ),
]

MISSING: Missing = {
    "host.firewall": [
        (t4, timed_out("nft-ruleset")),
        (t4, garbled("nft-ruleset")),
        (hgx, [not_run("nft-own")]),
        (hgx, cut("nft-ruleset")),
    ],
    "host.exposed-services": [(t4, timed_out("sockets")), (guest, garbled("addresses")), (guest, [not_run("sockets")])],
    "container.docker-api": [(t4, garbled("sockets")), (t4, timed_out("sockets"))],
    "container.docker-group": [(t4, [text("/etc/group", None, "garbage\n")]), (t4, [text("/etc/group", None, None)])],
    "node.security-updates": [
        (t4, [text(PENDING, None, "{")]),
        (t4, [text(PENDING, None, '{"pending": [{"package": "a"}]}')]),
        (
            t4,
            [
                text(
                    PENDING,
                    None,
                    '{"pending": [{"package": "a", "installed": "1", "version": "2", "since": "once"}]}',
                )
            ],
        ),
    ],
}
