"""Find the release that all packages of a closure have, and one apt transaction that installs it exactly.

The first simulation assumes a node without the closure; installed packages of it that are not part of the result are
removed in the same transaction. ``package_engine.py`` describes question and answer.
"""

import fnmatch
import re
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils.apt_private import (
    ANSWER_LIMIT_S,
    PREFERENCES,
    AptError,
    offered,
    output_of,
    restored,
    simulation,
)
from ansible_collections.gpunode.node.plugins.module_utils.package_record import matches

STATUS = Path("/var/lib/dpkg/status")
RELEASE = "@RELEASE@"


def patterns(entries):
    """Return name to pattern of entries ``NAME`` or ``NAME=PATTERN``."""
    return {name: pattern or "*" for name, _, pattern in (entry.partition("=") for entry in entries)}


def lacking(wanted, present):
    """Return the entries of ``install`` that no installed package satisfies."""
    missing = []
    for entry in wanted:
        name, _, pattern = entry.partition("=")
        version, whole, _held = present.get(name, ("", False, False))
        if not whole or not fnmatch.fnmatchcase(version, pattern or "*"):
            missing.append(entry)
    return missing


def exactly(options, wanted):
    """Return the entries with the newest offered version in place of each pattern; AptError if no source offers one.

    apt reads patterns by its own rules: it drops a star at the end, and an earlier one then stands for itself.
    """
    by_name = offered(options, [entry.partition("=")[0] for entry in wanted])
    entries = []
    for entry in wanted:
        name, _, pattern = entry.partition("=")
        versions = by_name[name]
        fits = [version for version in versions if fnmatch.fnmatchcase(version, pattern or "*")]
        if not fits:
            request = f"{name} {pattern}".strip()
            have = ", ".join(versions[:8]) or "no package of that name"
            raise AptError(f"the node's sources do not have {request}; they have {have}")
        entries.append(f"{name}={fits[0]}" if pattern else entry)
    return entries


def upstream(version):
    """Return a version without epoch and distribution revision."""
    bare = version.partition(":")[2] or version
    return bare.rpartition("-")[0] or bare


def fitting(versions, pattern, release):
    """Return the first version of a release that matches the pattern; None without a match."""
    wanted = pattern.replace(RELEASE, release)
    return next(
        (version for version in versions if upstream(version) == release and fnmatch.fnmatchcase(version, wanted)), None
    )


def settle(bound, constraint, by_name):
    """Return (the release that all bound packages have, None), or (None, the answer) without such a release."""
    common = [
        release
        for release in dict.fromkeys(upstream(version) for version in by_name[next(iter(bound))])
        if all(fitting(by_name[name], pattern, release) for name, pattern in bound.items())
    ]
    for release in common:
        if fnmatch.fnmatchcase(release, constraint):
            return release, None
    others = {
        name: list(dict.fromkeys(upstream(version) for version in by_name[name]))
        for name in bound
        if not any(fnmatch.fnmatchcase(upstream(version), constraint) for version in by_name[name])
    }
    return None, {"lacking": others, "common": common, "constraint": constraint}


def without(packages, text):
    """Return dpkg's status without some packages, of any architecture."""
    gone = set(packages)
    stanzas = text.split("\n\n")
    return "\n\n".join(block for block in stanzas if not gone.intersection(re.findall(r"(?m)^Package: (\S+)", block)))


def sources_of(options, versions):
    """Return the name of the source package of each package, given name to version."""
    exact = [f"{name}={version}" for name, version in versions.items()]
    shown = output_of(["apt-cache", *options, "show", *exact], ANSWER_LIMIT_S) if exact else ""
    fields = [dict(re.findall(r"(?m)^(Package|Source): (\S+)", stanza)) for stanza in shown.split("\n\n")]
    built_from = {row["Package"]: row.get("Source", row["Package"]) for row in fields if "Package" in row}
    return {name: built_from.get(name.partition(":")[0], name) for name in versions}


def with_names_that_exist(question, known):
    """Return name to pattern of the bound packages, each unknown one replaced by the first alternative in a list."""
    bound = {}
    for name, pattern in patterns(question["bound"]).items():
        choice = (name, *question["alternatives"].get(name, ()))
        bound[next((candidate for candidate in choice if candidate in known), name)] = pattern
    return bound


def simulate_lifting(question, options, wanted, more, have):
    """Return (name to version that apt would install, its arguments); if apt refuses, try newer versions of ``lift``.

    The distribution's dkms is preferred to NVIDIA's, but is too old for NVIDIA's modules on some systems.
    """
    try:
        return simulation([*options, *more], ["install", *wanted])[0], wanted
    except AptError as error:
        for name, versions in offered(options, question["lift"]).items():
            # dh-dkms only builds packages. If it is installed, its version must change too, or it blocks dkms.
            if versions and (name in have or name == question["lift"][0]) and have.get(name) != versions[0]:
                wanted = [*wanted, f"{name}={versions[0]}"]
        try:
            return simulation([*options, *more], ["install", *wanted])[0], wanted
        except AptError:
            raise error from None


def resolved(question, folder, options, present):
    """Return the answer from fetched lists, in a private folder of apt; ``present`` is dpkg's database."""
    known = set(output_of(["apt-cache", *options, "pkgnames"], ANSWER_LIMIT_S).split())
    bound = with_names_that_exist(question, known)
    leaving = {name for name in present if matches(name, question["remove"])}
    going = leaving.union(question["closure"]) & present.keys()
    needed = lacking(question["install"], {name: row for name, row in present.items() if name not in going})
    gone = [name for name in (*bound, *patterns(needed)) if name not in known]
    if gone:
        return {"lacking": {name: [] for name in gone}, "common": [], "constraint": question["constraint"]}
    stay = () if question["fresh"] else (going - leaving) & known
    have = {name: version for name, (version, whole, _held) in present.items() if whole}
    # What is installed moves along if it exists at the release.
    moving = {name: f"{RELEASE}-*" for name in stay if name in have}
    optional = {name: pattern for name, pattern in patterns(question["optional"]).items() if name in known}
    by_name = offered(options, sorted({*moving, *bound, *optional}))
    release, refusal = settle(bound, question["constraint"], by_name)
    if refusal:
        return refusal
    for path in (folder / PREFERENCES).iterdir():
        if not path.is_symlink():
            path.write_text(path.read_text(encoding="utf-8").replace(RELEASE, release), encoding="utf-8")
    at_release = {**moving, **{name: pattern for name, pattern in optional.items() if RELEASE in pattern}, **bound}
    exact = {name: fitting(by_name[name], pattern, release) for name, pattern in sorted(at_release.items())}
    wanted = [f"{name}={version}" for name, version in exact.items() if version]
    wanted += [*(name for name in optional if name not in at_release), *exactly(options, needed)]
    wanted += restored(options, question["restore"], have)
    status = folder / "status"
    status.write_text(without(going, STATUS.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
    clean, wanted = simulate_lifting(question, options, wanted, ["-o", f"Dir::State::status={status}"], have)
    named = {entry.partition("=")[0] for entry in wanted}
    same = [f"{name}={version}" for name, version in sorted(clean.items()) if upstream(version) == release]
    others = [f"{name}={clean[name]}" for name in sorted(named & clean.keys()) if upstream(clean[name]) != release]
    repair = ["--fix-broken"] if have.keys() != present.keys() else []
    arguments = [*same, *others, *(f"{name}-" for name in sorted(going - clean.keys()))]
    install, remove = simulation([*options, *repair], ["install", *arguments])
    return {
        "target": release,
        "exact": [*same, *others],
        "install": dict(sorted(install.items())),
        "sources": sources_of(options, install),
        "remove": sorted(remove),
    }
