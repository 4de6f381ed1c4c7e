"""One apt transaction on this node: simulated, or carried out.

Standard library alone. The question::

    {"install": ["NAME" | "NAME=PATTERN"],  what is to be there; a pattern is a shell pattern of versions
     "purge": [patterns],                   what goes in the same transaction
     "purge_new": [patterns],               what goes too, unless the memory says that it was there before
     "state": "present" | "absent",         absent: what goes, and what came with it and nothing needs any more
     "never": [patterns],                   what must neither come, move nor go by it
     "restore": [names],                    absent: what stays and goes back from NVIDIA's version to the distribution's
     "hold": [patterns],                    what is held afterwards; with absent: what goes where it is held and new
     "memory": path | null,                 list of the packages that were there before, written once
     "simulate": bool,                      only tell
     "files": {path: text | {"b64": text}}, files as the caller will write them; empty text: not there. Simulated: all
                                            of apt's; else the preferences alone
     "planned": {"packages": {name: version}, "purge": [names]},  simulated: what others will have done before
     "unhold": [names],                     whose hold is released
     "lock_wait_s": seconds, "limit_s": seconds}

The answer: ``install`` ({name: version}), ``remove``, ``hold``, ``unhold`` (names), ``warnings`` (sources that failed
and that nothing needed), ``finished`` (packages that an interrupted run left half-done). Installed packages that
satisfy ``install``
are left alone, so that a node that has all is asked nothing of apt. An ``error`` is one line that says why nothing was
done; with ``"done": false`` the transaction itself broke off.
"""

import fcntl
import fnmatch
import glob
import os
import re
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils.apt_private import (
    APT,
    OPTIONS,
    PREFERENCES,
    SIGNALS,
    AptError,
    StillRunningError,
    carried_out,
    lay_over,
    leave_orderly,
    output_of,
    passing_over_damaged,
    private_folder,
    refresh,
    refuse_failed_sources,
)

UPDATE_LIMIT_S = 300
ANSWER_LIMIT_S = 120
POLICY = Path("/usr/sbin/policy-rc.d")
DPKG_LOCK = Path("/var/lib/dpkg/lock-frontend")
DPKG_UPDATES = Path("/var/lib/dpkg/updates")
JOURNAL = Path("/var/lib/gpunode/transaction")
"""Names of the packages of a transaction, from before it begins until it has ended well."""
MAKE_LOGS = "/var/lib/dkms/*/*/build/make.log"
NVIDIAS = re.compile(r"\|(NVIDIA CUDA|DOCA-HOST[^|]*)$")
"""How apt's list of repositories ends for NVIDIA's, by their labels."""
POLICY_TEXT = (
    "#!/bin/sh\n# Of gpunode, for as long as a transaction runs: no service is started or restarted by it.\nexit 101\n"
)


def patient(act, wait_s):
    """What ``act`` returns, done again while another apt holds a lock.

    ``DPkg::Lock::Timeout`` waits for dpkg's lock alone, not for that of the lists, which apt-daily takes; and between
    two of its transactions unattended-upgrades lets go of the lock and takes it again.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            return act()
        except AptError as error:
            if (
                not re.search(r"(Could not get|Unable to acquire).* lock|lock was locked", str(error))
                or time.monotonic() > end
            ):
                raise
        time.sleep(2)


def matches(name, patterns):
    """True where one of the shell patterns fits."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def rows_of_dpkg():
    """Return (name, version, status, selection) of each package that dpkg knows."""
    form = "${Package}\\t${Version}\\t${db:Status-Status}\\t${db:Status-Want}\\n"
    return [line.split("\t") for line in output_of(["dpkg-query", "-W", "-f", form], ANSWER_LIMIT_S).splitlines()]


def database():
    """Name to (version, whole, held) of all packages of which something is on the node."""
    found = {}
    for name, version, status, want in rows_of_dpkg():
        if status not in ("config-files", "not-installed"):
            whole = status in ("installed", "triggers-awaited", "triggers-pending")
            found[name] = (version, whole, want == "hold")
    return found


def lacking(wanted, present):
    """The entries of ``install`` that no installed package satisfies."""
    found = []
    for entry in wanted:
        name, _, pattern = entry.partition("=")
        version, whole, _held = present.get(name, ("", False, False))
        if not whole or not fnmatch.fnmatchcase(version, pattern or "*"):
            found.append(entry)
    return found


@contextmanager
def apt_as_it_will_be(question):
    """Have apt obey the preferences that the caller writes when all went well, and pass over damaged files of ours."""
    if question["simulate"] and question["state"] == "present":  # a whole folder of apt's is laid over for it
        yield
        return
    files = {} if question["simulate"] else question["files"]
    with passing_over_damaged({path: text for path, text in files.items() if Path(path).parent == APT / PREFERENCES}):
        yield


@contextmanager
def asking(question):
    """(options with which apt answers, what it said of sources that failed).

    Asked is apt of the node itself with fresh lists, or simulated, of a private folder. Where what is done with it
    fails, the sources that failed are told first.
    """
    with apt_of(question) as options:
        failed = patient(lambda: refresh(["apt-get", *options], UPDATE_LIMIT_S), question["lock_wait_s"])
        try:
            yield options, failed
        except AptError as error:
            raise AptError("; ".join([*failed, str(error)])) from None


@contextmanager
def apt_of(question):
    """Options with which apt is asked."""
    if not question["simulate"]:
        yield question["options"]
        return
    with private_folder() as folder:
        lay_over(folder, question["files"])
        yield ["-c", f"{folder}/apt.conf"]


def simulated(options, arguments):
    """What apt-get would install (name to version) and remove (names)."""
    said = output_of(["apt-get", *options, "--simulate", "--assume-yes", *OPTIONS, *arguments], ANSWER_LIMIT_S)
    install = {
        name.partition(":")[0]: version for name, version in re.findall(r"(?m)^Inst (\S+) (?:\[\S+\] )?\((\S+) ", said)
    }
    remove = {name.partition(":")[0] for name in re.findall(r"(?m)^(?:Remv|Purg) (\S+)", said)}
    return install, remove - install.keys()


def offered(options, entry):
    """The versions of a package that the node's sources have, newest first."""
    name = entry.partition("=")[0]
    lines = output_of(["apt-cache", *options, "madison", name], ANSWER_LIMIT_S).splitlines()
    return list(dict.fromkeys(line.split("|")[1].strip() for line in lines if line.count("|") >= 2))


def refuse_what_is_not_offered(options, wanted):
    """apt says that a version was not found; which there are, it does not say."""
    for entry in wanted:
        name, _, pattern = entry.partition("=")
        versions = offered(options, entry)
        if not any(fnmatch.fnmatchcase(version, pattern or "*") for version in versions):
            request = f"{name} {pattern}".strip()
            have = ", ".join(versions[:8]) or "no package of that name"
            raise AptError(f"the node's sources do not have {request}; they have {have}")


def refuse_what_is_not_ours(question, present, install, remove):
    """A transaction that would touch something else is not made."""
    never = sorted(name for name in {*install, *remove} if matches(name, question["never"]))
    if never:
        raise AptError(f"it would also touch {', '.join(never)}, which this role does not manage")
    gone = sorted(remove - question["going"])
    if gone:
        raise AptError(f"apt would have to remove {', '.join(gone)}")
    asked = {entry.partition("=")[0] for entry in question["install"]}
    held = sorted(
        name
        for name in install
        if present.get(name, ("", False, False))[2] and name not in asked and not matches(name, question["hold"])
    )
    if held:
        raise AptError(f"{', '.join(held)} is held at {present[held[0]][0]} and would be moved")


def coming(question, present):
    """(install, remove) of the packages to have, and the arguments of apt-get that do it."""
    wanted = lacking(question["install"], present)
    going = {name for name in present if matches(name, question["purge"])}
    if not wanted and not going:
        return {}, set(), []
    with asking(question) as (options, failed):
        planned = question["planned"]
        before = [f"{name}={version}" for name, version in planned.get("packages", {}).items()]
        before += [f"{name}-" for name in planned.get("purge", []) if name in present]
        already = simulated(options, ["install", *before]) if before else ({}, set())
        wanted = [entry for entry in wanted if entry.partition("=")[0] not in already[0]]
        refuse_what_is_not_offered(options, wanted)
        arguments = ["--purge", "install", *wanted, *(f"{name}-" for name in sorted(going))]
        install, remove = simulated(options, [*arguments, *before])
        refuse_failed_sources(failed, ["apt-cache", *options], install)
    question["warnings"] += failed
    install = {name: version for name, version in install.items() if already[0].get(name) != version}
    remove -= already[1]
    refuse_what_is_not_ours({**question, "going": going}, present, install, remove)
    return install, remove, arguments


def leaving(question, present):
    """(install, remove) where packages go, with those that came along; and the arguments that do it."""
    memory = Path(question["memory"]) if question["memory"] else None
    known = memory is not None and memory.exists()
    before = set(memory.read_text(encoding="utf-8").split()) if memory is not None and known else set()
    # A transaction that was cut off leaves configuration of what it had removed.
    left = {name for name, _, status, _ in rows_of_dpkg() if status == "config-files"}
    going = {name for name in present.keys() | left if matches(name, question["purge"])}
    if known:
        # What is held is no orphan for apt.
        going |= {name for name in present.keys() - before if matches(name, question["purge_new"])}
        going |= {name for name in present.keys() - before if present[name][2] and matches(name, question["hold"])}
    if not going:
        return {}, set(), []
    unneeded = ["-o", "APT::AutoRemove::SuggestsImportant=false"]
    if known:
        # They were named when they came, which is no orphan for apt either; where others need them now, they stay.
        came = {name for name in question["restore"] if name in present.keys() - before}
        if came and not removed(going | came) - removed(going) - came:
            going |= came
        loose = simulated(unneeded, ["autoremove"])[1]
        orphans = simulated(unneeded, ["autoremove", *sorted(going)])[1] - loose - before
        going |= {name for name in orphans if not matches(name, question["never"])}
    back = restored(question, {name: row for name, row in present.items() if name not in going})
    arguments = ["--purge", "install", *back, *(f"{name}-" for name in sorted(going))] if back else []
    arguments = arguments or ["--purge", "remove", *sorted(going)]
    install, remove = simulated([], arguments)
    refuse_what_is_not_ours({**question, "going": going}, present, install, remove)
    return install, remove, arguments


def removed(names):
    """Return what apt removes with these packages."""
    return simulated([], ["--purge", "remove", *sorted(names)])[1]


def restored(question, staying):
    """NAME=VERSION of what stays and came from a repository of NVIDIA's though the distribution has it too, as dkms
    from CUDA's and rdma-core from DOCA's.

    Its epoch or number would keep it above all that the distribution will ever have.
    """
    there = sorted(name for name in question["restore"] if name in staying)
    if not there:
        return []
    if not question["simulate"]:
        with suppress(AptError):  # what was fetched before has to do then
            patient(lambda: refresh(["apt-get", *question["options"]], UPDATE_LIMIT_S), question["lock_wait_s"])
    form = "$(REPO_URI)|$(LABEL)"
    targets = output_of(["apt-get", "indextargets", "--format", form, "Created-By: Packages"], ANSWER_LIMIT_S)
    nvidias = {line.partition("|")[0].rstrip("/") for line in targets.splitlines() if NVIDIAS.search(line)}
    found: dict[str, list[str]] = {}
    for line in output_of(["apt-cache", "madison", *there], ANSWER_LIMIT_S).splitlines():
        name, version, where = (part.strip() for part in line.split("|")[:3])
        if where.split()[0].rstrip("/") not in nvidias:
            found.setdefault(name, []).append(version)
    return [f"{name}={found[name][0]}" for name in there if name in found and staying[name][0] not in found[name]]


@contextmanager
def services_left_alone():
    """The packages' own scripts start and restart nothing: the role does so, where it may."""
    # One of ours was left by a run that was killed.
    if POLICY.exists() and not policy_is_ours():
        yield
        return
    POLICY.write_text(POLICY_TEXT, encoding="ascii")
    POLICY.chmod(0o755)
    try:
        yield
    except StillRunningError:
        raise  # dpkg is still at work: the next run removes it
    except BaseException:
        POLICY.unlink()
        raise
    POLICY.unlink()


def policy_is_ours():
    """A policy-rc.d of ours is there."""
    return POLICY.exists() and POLICY.read_text(encoding="utf-8", errors="replace") == POLICY_TEXT


def remove_left_policy():
    """Take away what a killed run left: services would never start again. Not while dpkg is at work."""
    if not policy_is_ours():
        return
    try:
        with DPKG_LOCK.open("a") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            POLICY.unlink()
    except OSError:
        return


def remember(path, present):
    """Write down what is there before the first change, once."""
    if path and not Path(path).exists():
        write_names(Path(path), present)


def write_names(path, names):
    """Write names into a file, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    with draft.open("w", encoding="utf-8") as file:
        file.write("\n".join(sorted(names)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def names_in(path):
    """Names in a file, one a line; none where there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


def finish_interrupted(question):
    """Finish what a run that was cut short left half-done; return the names of what there was.

    What others left is not ours to finish, unless apt does nothing at all before it. What cannot
    be finished, the transaction itself completes, or it fails with it.
    """
    cut = DPKG_UPDATES.is_dir() and any(path.name.isdigit() for path in DPKG_UPDATES.iterdir())
    ours = {*names_in(JOURNAL), *(entry.partition("=")[0] for entry in question["install"])}
    half = sorted(
        name
        for name, row in database().items()
        if not row[1] and (cut or name in ours or matches(name, question["hold"]))
    )
    if cut or half:
        argv = ["dpkg", "--configure", "--pending", "--force-confdef", "--force-confold"]
        with suppress(AptError), services_left_alone():
            patient(lambda: carried_out(argv, question["limit_s"]), question["lock_wait_s"])
    return half


def compiler_log(since):
    """Return the compiler's errors in the newest log that DKMS wrote since then; empty where there are none."""
    logs = [Path(path) for path in glob.glob(MAKE_LOGS)]  # noqa: PTH207
    new = sorted((path for path in logs if path.stat().st_mtime >= since), key=lambda path: path.stat().st_mtime)
    if not new:
        return []
    lines = new[-1].read_text(encoding="utf-8", errors="replace").splitlines()
    picked = [number for number, line in enumerate(lines) if re.search(r" error:|Error \d", line)]
    wanted = sorted({near for number in picked for near in range(number, min(number + 4, len(lines)))})
    return [lines[number][:200] for number in wanted][-20:]


def answer(question):
    """Tell what is to be done, and do it where it is asked for."""
    options = ["-o", f"DPkg::Lock::Timeout={question['lock_wait_s']}"]
    with apt_as_it_will_be(question):
        finished = [] if question["simulate"] else finish_interrupted(question)
        said = told_and_done({"unhold": [], **question, "options": options, "warnings": []})
    return {**said, "finished": finished}


def downloaded(question, argv, install, remove):
    """(the arguments, what they install) after all packages were fetched, which may be cut short where dpkg may not.

    Where packages go and one cannot be fetched that would go back to the distribution's version, it stays as it is.
    """
    try:
        patient(lambda: output_of([*argv, "--download-only"], question["limit_s"]), question["lock_wait_s"])
    except AptError:
        if question["state"] != "absent":
            raise
        options = argv[: argv.index("--purge")]
        return [*options, "--purge", "remove", *sorted(remove)], {}
    return argv, dict(sorted(install.items()))


def told_and_done(question):
    """The answer; ``options`` of the question are for apt on the node itself."""
    present = database()
    leave = question["state"] == "absent"
    install, remove, arguments = (leaving if leave else coming)(question, present)
    after = (present.keys() | install.keys()) - remove
    held = {name for name in present if present[name][2]}
    said = {
        "install": dict(sorted(install.items())),
        "remove": sorted(remove),
        "hold": sorted(name for name in after - held if matches(name, question["hold"])),
        "unhold": sorted(held & set(question["unhold"])),
        "warnings": question["warnings"],
        "done": False,
    }
    if question["simulate"]:
        return said
    try:
        if said["unhold"]:
            output_of(["apt-mark", "unhold", *said["unhold"]], ANSWER_LIMIT_S)
        if arguments:
            argv = ["apt-get", *question["options"], "--assume-yes", *OPTIONS]
            argv += [
                "-o",
                "Acquire::Retries=3",
                "-o",
                "Dpkg::Options::=--force-confdef",
                "-o",
                "Dpkg::Options::=--force-confold",
                *arguments,
            ]
            if install:
                argv, said["install"] = downloaded(question, argv, install, remove)
            # A job may have begun since the plan was made, while packages were fetched.
            users = question.get("gpu_users", list)()
            if users:
                return {**said, "error": f"busy: GPUs are in use by {', '.join(users)}, nothing was installed"}
            write_names(JOURNAL, {*install, *remove})
            if leave:
                patient(lambda: carried_out(argv, question["limit_s"]), question["lock_wait_s"])
            else:
                remember(question["memory"], present)
                with services_left_alone():
                    patient(lambda: carried_out(argv, question["limit_s"]), question["lock_wait_s"])
        JOURNAL.unlink(missing_ok=True)
        # A package that moved has lost its hold.
        loose = [name for name, row in database().items() if not row[2] and matches(name, question["hold"])]
        if loose and not leave:
            output_of(["apt-mark", "hold", *sorted(loose)], ANSWER_LIMIT_S)
    except AptError as error:
        return {**said, "error": f"interrupted: {error}"}
    return {**said, "done": True}


def answered(question):
    """Return the answer; where nothing was done, ``error`` says why."""
    if not question["simulate"]:
        remove_left_policy()
    for number in SIGNALS:
        # A transaction that began is not cut short because a connection broke.
        signal.signal(number, leave_orderly if question["simulate"] else signal.SIG_IGN)
    began = time.time()
    try:
        said = answer(question)
    except (AptError, OSError) as error:
        said = {"install": {}, "remove": [], "hold": [], "done": False, "error": " ".join(str(error).split())}
    if "error" in said and not question["simulate"]:
        said["log"] = compiler_log(began)
    return said
