"""Which key sshd accepts, and which line of its configuration counts."""

import pytest

from gpunode.provisioning.ssh_login import accepted, contradictions, setting_lines
from gpunode.provisioning.ssh_state import PublicKey

OWN = "/etc/ssh/sshd_config.d/10-own.conf"
MODERN = {"pubkeyacceptedalgorithms": ("ssh-ed25519,rsa-sha2-512",), "requiredrsasize": ("3072",)}


@pytest.mark.parametrize(
    ("kind", "bits", "expected"),
    [
        ("ssh-rsa", 3072, True),
        ("ssh-rsa", 3071, False),
        ("ssh-ed25519", 256, True),
        ("ecdsa-sha2-nistp256", 256, False),
    ],
)
def test_a_key_needs_an_accepted_algorithm_and_enough_bits(kind: str, bits: int, expected: bool) -> None:
    assert accepted(PublicKey(type=kind, bits=bits, blob="x"), MODERN) is expected


@pytest.mark.parametrize(
    ("line", "inside"),
    [
        ("Match Address 10.0.0.0/8", True),
        ("Match user eve", True),
        ("match all", False),
        ("Match ALL", False),
        ("# Match user eve", False),
        ("", False),
    ],
)
def test_a_match_block_begins_with_a_condition(line: str, inside: bool) -> None:
    assert list(setting_lines({"x": f"{line}\nPort=22\n"})) == [("x", 2, "port", "22", inside)]


def test_the_first_other_line_without_a_condition_is_named_and_what_it_sets() -> None:
    documents = {
        OWN: "AllowTcpForwarding no\n",
        "/a": "Match user eve\nAllowTcpForwarding all\n",
        "/b": "AllowTcpForwarding local\n",
    }
    rows = [("AllowTcpForwarding", "no")]
    assert list(contradictions(rows, "allowtcpforwarding local\nallowtcpforwarding all\n", documents, OWN)) == [
        "AllowTcpForwarding no has no effect: /b line 1 is read first and sets local"
    ]
    alone = {OWN: documents[OWN]}
    (line,) = contradictions(rows, "allowtcpforwarding local\n", alone, OWN)
    assert "another file is read first" in line
