"""What apt would do on this node if some files of /etc/apt were different. Changes nothing on the node.

Standard library alone. The question::

    {"files": {path of a file below /etc/apt: content, empty for a file that is not to be},
     "keys": {path of a key: its armoured text},
     "preferences": path of the file that binds the driver's packages, "pins": [{packages, pin, priority}],
     "bound": {name: pattern of versions, @RELEASE@ for the driver's release}, "required": [of these, to be had],
     "alternatives": {name of bound: [names taken in its place, in this order, where no list has it]},
     "lift": [names that may come from any source where the preferred one is too old],
     "restore": [installed names that go back to a version that a source has, where none has theirs],
     "free": [names], "optional": [names, taken where they are there],
     "constraint": the release, or a shell pattern of releases,
     "drop": [installed packages of the driver], "remove": [names that go in any case], "repair": bool}

The answer: ``target`` (the release), ``install`` ([{name, version, source}]), ``remove`` ([names]), ``arguments`` (of
``apt-get install``, which then does exactly this). First apt is asked what a node without any driver would get; what
is installed of a driver and is not among it goes in the same transaction.

Where some package is not to be had at the release: ``{"lacking": {name: [releases that there are]}, "common":
[releases that all have]}``. Where apt refuses or its lists cannot be fetched: ``{"error": one line}``.
"""

import fnmatch
import re
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils.apt_private import (
    APT,
    OPTIONS,
    AptError,
    lay_over,
    output_of,
    private_folder,
    refresh,
    refuse_failed_sources,
)

UPDATE_LIMIT_S = 180
ANSWER_LIMIT_S = 60
STATUS = Path("/var/lib/dpkg/status")


def upstream(version):
    """A version without epoch and distribution revision."""
    bare = version.partition(":")[2] or version
    return bare.rpartition("-")[0] or bare


def offers(apt_cache, names):
    """Versions by package, newest first; empty for a package that is in no list."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for line in output_of([*apt_cache, "madison", *names], ANSWER_LIMIT_S).splitlines() if names else []:
        name, version = (part.strip() for part in line.split("|")[:2])
        if name in found and version not in found[name]:
            found[name].append(version)
    return found


def fitting(versions, pattern, release):
    """The first of some versions that is this release and fits the pattern; None where none does."""
    wanted = pattern.replace("@RELEASE@", release)
    return next((one for one in versions if upstream(one) == release and fnmatch.fnmatchcase(one, wanted)), None)


def settle(question, there):
    """(the release that all required packages have, the answer where there is none)."""
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
    """dpkg's status without some packages, whatever their architecture."""
    gone = set(packages)
    stanzas = text.split("\n\n")
    return "\n\n".join(one for one in stanzas if not gone.intersection(re.findall(r"(?m)^Package: (\S+)", one)))


def simulate(apt_get, apt_cache, arguments, more=()):
    """What ``apt-get install`` would install and remove; ``source`` is what a package is built from."""
    said = output_of([*apt_get, *more, "--simulate", "--assume-yes", *OPTIONS, "install", *arguments], ANSWER_LIMIT_S)
    versions = dict(re.findall(r"(?m)^Inst (\S+) (?:\[\S+\] )?\((\S+) ", said))
    built_from = {}
    if versions:
        exact = [f"{name}={version}" for name, version in versions.items()]
        shown = output_of([*apt_cache, "show", *exact], ANSWER_LIMIT_S)
        for stanza in shown.split("\n\n"):
            fields = dict(re.findall(r"(?m)^(Package|Source): (\S+)", stanza))
            if "Package" in fields:
                built_from[fields["Package"]] = fields.get("Source", fields["Package"])
    return {
        "install": [
            {"name": name, "version": version, "source": built_from.get(name.partition(":")[0], name)}
            for name, version in sorted(versions.items())
        ],
        "remove": sorted(re.findall(r"(?m)^(?:Remv|Purg) (\S+)", said)),
    }


def with_names_that_exist(question, known):
    """The question with each package that no list has replaced by the first of its alternatives that one has."""
    taken = {
        name: next((other for other in others if other in known), name)
        for name, others in question["alternatives"].items()
        if name not in known
    }
    bound = {taken.get(name, name): pattern for name, pattern in question["bound"].items()}
    return {**question, "bound": bound, "required": [taken.get(name, name) for name in question["required"]]}


def installed_versions(names):
    """Name to version of those that are installed."""
    if not names:
        return {}
    form = "${db:Status-Status}\\t${Package}\\t${Version}\\n"
    rows = [line.split("\t") for line in output_of(["dpkg-query", "-W", "-f", form], ANSWER_LIMIT_S).splitlines()]
    return {name: version for status, name, version in rows if status == "installed" and name in names}


def restored(question, apt_cache):
    """NAME=VERSION of what has a version that no source has any more, as NVIDIA's dkms without NVIDIA's repository.

    Its epoch would keep it above all that the distribution will ever have.
    """
    there = installed_versions(question["restore"])
    known = offers(apt_cache, sorted(there))
    return [f"{name}={known[name][0]}" for name, has in sorted(there.items()) if known[name] and has not in known[name]]


def simulate_lifting(question, apt_get, apt_cache, wanted, more):
    """``simulate``, and with what was asked for; where apt refuses, again with newer versions of what may be lifted.

    The distribution's dkms is preferred to NVIDIA's, and too old for NVIDIA's modules on some systems.
    """
    try:
        return simulate(apt_get, apt_cache, wanted, more), wanted
    except AptError as error:
        have = installed_versions(question["lift"])
        for name, versions in offers(apt_cache, question["lift"]).items():
            # What builds packages alone (dh-dkms) is lifted where it is there, so that it does not stand in the way.
            if versions and (name in have or name == question["lift"][0]) and have.get(name) != versions[0]:
                wanted = [*wanted, f"{name}={versions[0]}"]
        try:
            return simulate(apt_get, apt_cache, wanted, more), wanted
        except AptError:
            raise error from None


def transaction(question, folder, apt_get, apt_cache):
    """The whole answer from lists that are there: a release, and one transaction that brings the node to it."""
    known = set(output_of([*apt_cache, "pkgnames"], ANSWER_LIMIT_S).split())
    question = with_names_that_exist(question, known)
    bound = {name: pattern for name, pattern in question["bound"].items() if name in known}
    optional = [name for name in question["optional"] if name in known]
    there = offers(apt_cache, sorted({*question["bound"], *optional}))
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
    wanted += [*question["free"], *restored(question, apt_cache)]
    status = folder / "status"
    node_status = STATUS.read_text(encoding="utf-8", errors="replace")
    status.write_text(without({*question["drop"], *question["remove"]}, node_status), encoding="utf-8")
    clean, wanted = simulate_lifting(question, apt_get, apt_cache, wanted, ["-o", f"Dir::State::status={status}"])
    coming = {row["name"]: row["version"] for row in clean["install"]}
    same = [f"{name}={version}" for name, version in coming.items() if upstream(version) == release]
    names = {entry.partition("=")[0] for entry in wanted}
    others = [f"{name}={coming[name]}" for name in names & coming.keys() if f"{name}={coming[name]}" not in same]
    leaving = sorted({*question["drop"], *question["remove"]} - coming.keys())
    arguments = [*sorted(same), *sorted(others), *(f"{name}-" for name in leaving)]
    more = ["--fix-broken"] if question["repair"] else []
    return {"target": release, "arguments": arguments, **simulate(apt_get, apt_cache, arguments, more)}


def answer(question):
    """The answer to one question, from lists that are fetched for it and thrown away."""
    with private_folder() as folder:
        lay_over(folder, {**question["files"], **question.get("keys", {})})
        apt_get, apt_cache = ([tool, "-c", f"{folder}/apt.conf"] for tool in ("apt-get", "apt-cache"))
        failed = refresh(apt_get, UPDATE_LIMIT_S)
        try:
            said = transaction(question, folder, apt_get, apt_cache)
        except AptError as error:
            raise AptError("; ".join([*failed, str(error)])) from None
        if failed and "lacking" in said:
            raise AptError("; ".join(failed))
        refuse_failed_sources(failed, apt_cache, {row["name"]: row["version"] for row in said.get("install", ())})
        return said


def answered(question):
    """Return the answer; where apt cannot be asked, ``error`` says why."""
    try:
        return answer(question)
    except (AptError, OSError) as error:
        return {"error": " ".join(str(error).split())}
