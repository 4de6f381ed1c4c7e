"""``dkms status`` in the formats of versions 2 and 3."""

import pytest
from facts_samples import answer, facts_with

from gpunode.facts import modules
from gpunode.facts.errors import ParseError
from gpunode.facts.modules import DkmsModule


@pytest.mark.parametrize(
    ("line", "module"),
    [
        (
            "nvidia, 535.261.03, 6.1.0-42-amd64, x86_64: installed",
            DkmsModule(
                name="nvidia", version="535.261.03", kernel="6.1.0-42-amd64", architecture="x86_64", state="installed"
            ),
        ),
        (
            "nvidia-current/535.261.03, 6.1.0-42-amd64, x86_64: installed "
            "(WARNING! Diff between built and installed module!)",
            DkmsModule(
                name="nvidia-current",
                version="535.261.03",
                kernel="6.1.0-42-amd64",
                architecture="x86_64",
                state="installed",
                note="WARNING! Diff between built and installed module!",
            ),
        ),
        (
            "nvidia/570.86.15, 6.8.0-60-generic, aarch64: installed (original_module exists) (WARNING! Diff!)",
            DkmsModule(
                name="nvidia",
                version="570.86.15",
                kernel="6.8.0-60-generic",
                architecture="aarch64",
                state="installed",
                note="original_module exists; WARNING! Diff!",
            ),
        ),
        (
            "nvidia/570.86.15, 5.14.0-503.el9.x86_64, x86_64: installed-weak from 5.14.0-427.el9.x86_64",
            DkmsModule(
                name="nvidia",
                version="570.86.15",
                kernel="5.14.0-503.el9.x86_64",
                architecture="x86_64",
                state="installed-weak",
                note="from 5.14.0-427.el9.x86_64",
            ),
        ),
        (
            "nvidia, 535.261.03: added",
            DkmsModule(name="nvidia", version="535.261.03", kernel=None, architecture=None, state="added"),
        ),
        (
            "nvidia/535.261.03: added",
            DkmsModule(name="nvidia", version="535.261.03", kernel=None, architecture=None, state="added"),
        ),
        (
            "nvidia-current/535.261.03, 6.1.0-42-amd64, x86_64: built",
            DkmsModule(
                name="nvidia-current",
                version="535.261.03",
                kernel="6.1.0-42-amd64",
                architecture="x86_64",
                state="built",
            ),
        ),
    ],
)
def test_lines(line: str, module: DkmsModule) -> None:
    assert modules.parse_dkms(line + "\n") == (module,)


def test_remarks_are_no_modules() -> None:
    text = (
        "Deprecated feature: REMAKE_INITRD (/var/lib/dkms/zfs/source/dkms.conf)\n"
        "Error! Could not locate dkms.conf file.\nFile: /var/lib/dkms/x/1/source/dkms.conf does not exist.\n"
        "zfs/2.1.11, 6.1.0-42-amd64, x86_64: installed\n"
    )
    assert [module.name for module in modules.parse_dkms(text)] == ["zfs"]


@pytest.mark.parametrize("text", ["something else\n", "nvidia: installed\n", "nvidia/1, 6.1, x86_64: unheard-of\n"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ParseError, match="expected a line of dkms status"):
        modules.parse_dkms(text)


def test_no_dkms_is_no_module_and_a_failing_one_is_a_gap() -> None:
    assert facts_with({"dkms-status": answer("", 127)}).dkms == ()
    failed = facts_with({"dkms-status": answer("nvidia/535: broken\n", 4, "Error! nvidia/535: missing source", "dkms")})
    assert failed.gaps["dkms"] == "dkms failed with exit status 4: Error! nvidia/535: missing source"
