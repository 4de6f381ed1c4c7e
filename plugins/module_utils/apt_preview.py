"""What apt would do on this node if some files of /etc/apt were different. Changes nothing on the node.

Standard library alone. The question::

    {"files": {path of a file below /etc/apt: content, empty: the file must not exist},
     "keys": {path of a key: its armoured text},
     "preferences": path of the file that binds the driver's packages, "pins": [{packages, pin, priority}],
     "bound": {name: pattern of versions, @RELEASE@ for the driver's release}, "required": [names of bound to install],
     "alternatives": {name of bound: [names used in its place, in this order, if no list has it]},
     "lift": [names that may come from any source if the preferred one is too old],
     "restore": [installed names that change to a version of a source, if no source has their own],
     "free": [names], "optional": [names to install if they exist],
     "constraint": the release, or a shell pattern of releases,
     "drop": [installed packages of the driver], "remove": [names to remove in any case], "repair": bool}

The answer: ``target`` (the release), ``install`` ([{name, version, source}]), ``remove`` ([names]), ``arguments`` (of
``apt-get install`` for exactly this result). The first simulation assumes a node without any driver; installed
packages of a driver that are not part of its result are removed in the same transaction.

If a package does not exist at the release: ``{"lacking": {name: [existing releases]}, "common": [releases that all
have]}``. If apt refuses or its lists cannot be fetched: ``{"error": one line}``.
"""

import fnmatch
import re
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils.apt_private import (
    ANSWER_LIMIT_S,
    APT,
    AptError,
    installed_versions,
    offered,
    output_of,
    private_apt,
    refresh,
    refuse_failed_sources,
    simulation,
)

UPDATE_LIMIT_S = 180
STATUS = Path("/var/lib/dpkg/status")


def upstream(version):
    """Return a version without epoch and distribution revision."""
    bare = version.partition(":")[2] or version
    return bare.rpartition("-")[0] or bare


def fitting(versions, pattern, release):
    """Return the first version of a release that matches the pattern; None without a match."""
    wanted = pattern.replace("@RELEASE@", release)
    return next((one for one in versions if upstream(one) == release and fnmatch.fnmatchcase(one, wanted)), None)


def settle(question, there):
    """Return (the release that all required packages have, None), or (None, the answer) without such a release."""
    bound, required = question["bound"], question["required"]
    common = [
        release
        for release in dict.fromkeys(upstream(version) for version in there[required[0]])
        if all(fitting(there[name], bound[name], release) for name in required)
    ]
    for release in common:
        if fnmatch.fnmatchcase(release, question["constraint"]):
            return release, None
    lacking = {
        name: list(dict.fromkeys(upstream(version) for version in there[name]))
        for name in required
        if not any(fnmatch.fnmatchcase(upstream(version), question["constraint"]) for version in there[name])
    }
    return None, {"lacking": lacking, "common": common, "constraint": question["constraint"]}


def without(packages, text):
    """Return dpkg's status without some packages, of any architecture."""
    gone = set(packages)
    stanzas = text.split("\n\n")
    return "\n\n".join(one for one in stanzas if not gone.intersection(re.findall(r"(?m)^Package: (\S+)", one)))


def simulate(options, arguments, more=()):
    """Return what ``apt-get install`` would install and remove; ``source`` is the name of the source package."""
    versions, remove = simulation([*options, *more], ["install", *arguments])
    built_from = {}
    if versions:
        exact = [f"{name}={version}" for name, version in versions.items()]
        shown = output_of(["apt-cache", *options, "show", *exact], ANSWER_LIMIT_S)
        for stanza in shown.split("\n\n"):
            fields = dict(re.findall(r"(?m)^(Package|Source): (\S+)", stanza))
            if "Package" in fields:
                built_from[fields["Package"]] = fields.get("Source", fields["Package"])
    return {
        "install": [
            {"name": name, "version": version, "source": built_from.get(name.partition(":")[0], name)}
            for name, version in sorted(versions.items())
        ],
        "remove": sorted(remove),
    }


def with_names_that_exist(question, known):
    """Return the question with each unknown package replaced by the first alternative that exists in a list."""
    existing = {
        name: next((other for other in others if other in known), name)
        for name, others in question["alternatives"].items()
        if name not in known
    }
    bound = {existing.get(name, name): pattern for name, pattern in question["bound"].items()}
    return {**question, "bound": bound, "required": [existing.get(name, name) for name in question["required"]]}


def restored(question, options):
    """Return NAME=VERSION for packages with a version that no source offers, as NVIDIA's dkms without its repository.

    Its epoch would keep it above every future version of the distribution.
    """
    there = installed_versions(question["restore"])
    known = offered(options, sorted(there))
    return [f"{name}={known[name][0]}" for name, has in sorted(there.items()) if known[name] and has not in known[name]]


def simulate_lifting(question, options, wanted, more):
    """Return (result of ``simulate``, its arguments); if apt refuses, try newer versions of the packages of ``lift``.

    The distribution's dkms is preferred to NVIDIA's, but is too old for NVIDIA's modules on some systems.
    """
    try:
        return simulate(options, wanted, more), wanted
    except AptError as error:
        have = installed_versions(question["lift"])
        for name, versions in offered(options, question["lift"]).items():
            # dh-dkms only builds packages. If it is installed, its version must change too, or it blocks dkms.
            if versions and (name in have or name == question["lift"][0]) and have.get(name) != versions[0]:
                wanted = [*wanted, f"{name}={versions[0]}"]
        try:
            return simulate(options, wanted, more), wanted
        except AptError:
            raise error from None


def transaction(question, folder, options):
    """Return the whole answer from fetched lists: a release, and one transaction that installs it."""
    known = set(output_of(["apt-cache", *options, "pkgnames"], ANSWER_LIMIT_S).split())
    question = with_names_that_exist(question, known)
    bound = {name: pattern for name, pattern in question["bound"].items() if name in known}
    optional = [name for name in question["optional"] if name in known]
    there = offered(options, sorted({*question["bound"], *optional}))
    gone = [name for name in question["required"] + question["free"] if name not in known]
    if gone:
        return {"lacking": {name: [] for name in gone}, "common": [], "constraint": question["constraint"]}
    release, refusal = settle(question, there)
    if refusal:
        return refusal
    stanzas = [
        f"Package: {' '.join(one['packages'])}\nPin: {one['pin']}\nPin-Priority: {one['priority']}\n"
        for one in question["pins"]
    ]
    own = folder / Path(question["preferences"]).relative_to(APT)
    own.write_text("\n".join(stanzas).replace("@RELEASE@", release), encoding="utf-8")
    exact = {name: fitting(there[name], pattern, release) for name, pattern in bound.items()}
    wanted = [f"{name}={version}" for name, version in sorted(exact.items()) if version]
    for name in optional:
        drivers_own = not name.startswith("linux-")
        version = fitting(there[name], "*", release) if drivers_own else None
        wanted += [f"{name}={version}"] if version else [] if drivers_own else [name]
    wanted += [*question["free"], *restored(question, options)]
    status = folder / "status"
    node_status = STATUS.read_text(encoding="utf-8", errors="replace")
    status.write_text(without({*question["drop"], *question["remove"]}, node_status), encoding="utf-8")
    clean, wanted = simulate_lifting(question, options, wanted, ["-o", f"Dir::State::status={status}"])
    coming = {row["name"]: row["version"] for row in clean["install"]}
    same = [f"{name}={version}" for name, version in coming.items() if upstream(version) == release]
    names = {entry.partition("=")[0] for entry in wanted}
    others = [f"{name}={coming[name]}" for name in names & coming.keys() if f"{name}={coming[name]}" not in same]
    leaving = sorted({*question["drop"], *question["remove"]} - coming.keys())
    arguments = [*sorted(same), *sorted(others), *(f"{name}-" for name in leaving)]
    more = ["--fix-broken"] if question["repair"] else []
    return {"target": release, "arguments": arguments, **simulate(options, arguments, more)}


def answer(question):
    """Return the answer to one question from lists that are fetched for it and deleted afterwards."""
    with private_apt({**question["files"], **question.get("keys", {})}) as (folder, options):
        failed = refresh(["apt-get", *options], UPDATE_LIMIT_S)
        try:
            found = transaction(question, folder, options)
        except AptError as error:
            raise AptError("; ".join([*failed, str(error)])) from None
        if failed and "lacking" in found:
            raise AptError("; ".join(failed))
        refuse_failed_sources(failed, options, {row["name"]: row["version"] for row in found.get("install", ())})
        return found


def answered(question):
    """Return the answer; ``error`` is the reason if apt cannot be run."""
    try:
        return answer(question)
    except (AptError, OSError) as error:
        return {"error": " ".join(str(error).split())}
