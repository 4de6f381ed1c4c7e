"""One apt transaction on this node, simulated or carried out: the backend of ``package_engine.py`` for apt.

Standard library only. Installed packages that satisfy ``install`` are left alone; apt is not run if all are installed.
"""

import fcntl
import glob
import hashlib
import os
import re
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils import file_access
from ansible_collections.gpunode.node.plugins.module_utils.apt_private import (
    ANSWER_LIMIT_S,
    APT,
    JOURNAL,
    OPTIONS,
    PREFERENCES,
    SIGNALS,
    UPDATE_LIMIT_S,
    AptError,
    StillRunningError,
    carried_out,
    leave_orderly,
    names_left,
    output_of,
    passing_over_damaged,
    private_apt,
    refresh,
    refuse_failed_sources,
    restored,
    rows_of_dpkg,
    simulation,
)
from ansible_collections.gpunode.node.plugins.module_utils.apt_release import RELEASE, exactly, lacking, resolved
from ansible_collections.gpunode.node.plugins.module_utils.package_record import matches, note, owned, settle

POLICY = Path("/usr/sbin/policy-rc.d")
DPKG_LOCK = Path("/var/lib/dpkg/lock-frontend")
UNATTENDED = (
    *("-o", "Acquire::Retries=3"),
    *("-o", "Dpkg::Options::=--force-confdef"),
    *("-o", "Dpkg::Options::=--force-confold"),
)
LARGEST_FILE = 8 << 20
DPKG_INFO = Path("/var/lib/dpkg/info")
DPKG_UPDATES = Path("/var/lib/dpkg/updates")
MAKE_LOGS = "/var/lib/dkms/*/*/build/make.log"
POLICY_TEXT = (
    "#!/bin/sh\n# Of gpunode, for as long as a transaction runs: no service is started or restarted by it.\nexit 101\n"
)


def patient(act, wait_s):
    """Return the result of ``act``, repeated while another apt holds a lock.

    ``DPkg::Lock::Timeout`` waits only for dpkg's lock, not for the lock of the lists, which apt-daily takes. Between
    two of its transactions, unattended-upgrades releases the lock and takes it again.
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


def database():
    """Return name to (version, whole, held) of all packages that are at least partly installed."""
    packages = {}
    for name, version, status, want in rows_of_dpkg():
        if status not in ("config-files", "not-installed"):
            whole = status in ("installed", "triggers-awaited", "triggers-pending")
            packages[name] = (version, whole, want == "hold")
    return packages


@contextmanager
def apt_as_it_will_be(question):
    """Run apt with the planned preferences and without damaged files of the roles."""
    if question["simulate"] and question["state"] == "present":  # runs with a whole private folder instead
        yield
        return
    files = {} if question["simulate"] else question["files"]
    with passing_over_damaged({path: text for path, text in files.items() if Path(path).parent == APT / PREFERENCES}):
        yield


@contextmanager
def asking(question):
    """Yield (private folder, options of apt, its messages about failed sources), with fresh lists.

    A simulation uses apt in a private folder, a real run the node's own apt. If the caller's block raises AptError,
    the messages about failed sources are put first.
    """
    with apt_of(question) as (folder, options):
        failed = patient(lambda: refresh(["apt-get", *options], UPDATE_LIMIT_S), question["lock_wait_s"])
        try:
            yield folder, options, failed
        except AptError as error:
            raise AptError("; ".join([*failed, str(error)])) from None


@contextmanager
def apt_of(question):
    """Yield (private folder or None, options of apt)."""
    if not question["simulate"]:
        yield None, question["options"]
        return
    with private_apt(question["files"]) as (folder, options):
        yield folder, options


def simulated(options, arguments):
    """Return (name to version, names) that apt-get would install and remove."""
    install, remove = simulation(options, arguments)
    install = {name.partition(":")[0]: version for name, version in install.items()}
    return install, {name.partition(":")[0] for name in remove} - install.keys()


def refuse_what_is_not_ours(question, present, install, remove):
    """Raise AptError if the transaction would touch packages outside the question."""
    never = touched(question, {*install, *remove})
    if never:
        raise AptError(f"it would also touch {', '.join(never)}, which this role does not manage")
    gone = sorted(name for name in remove - question["going"] if not matches(name, question["expendable"]))
    if gone:
        raise AptError(f"apt would have to remove {', '.join(gone)}")
    requested = {entry.partition("=")[0] for entry in question["install"]}
    # What may be removed may be changed too.
    free = (*question["hold"], *question["expendable"])
    held = sorted(
        name
        for name in install
        if present.get(name, ("", False, False))[2] and name not in requested and not matches(name, free)
    )
    if held:
        raise AptError(f"{', '.join(held)} is held at {present[held[0]][0]} and would be moved")


def coming(question, present):
    """Return (install, remove, arguments of apt-get) for ``state: present``."""
    wanted = lacking(question["install"], present)
    going = {name for name in present if matches(name, question["remove"])}
    if not wanted and not going:
        return {}, set(), []
    with asking(question) as (_folder, options, failed):
        planned = question["planned"]
        before = [f"{name}={version}" for name, version in planned.get("packages", {}).items()]
        before += [f"{name}-" for name in planned.get("purge", []) if name in present]
        already = simulated(options, ["install", *before]) if before else ({}, set())
        wanted = [entry for entry in wanted if entry.partition("=")[0] not in already[0]]
        wanted = exactly(options, wanted)
        arguments = ["--purge", "install", *wanted, *(f"{name}-" for name in sorted(going))]
        install, remove = simulated(options, [*arguments, *before])
        refuse_failed_sources(failed, options, install)
    question["warnings"] += failed
    install = {name: version for name, version in install.items() if already[0].get(name) != version}
    remove -= already[1]
    refuse_what_is_not_ours({**question, "going": going}, present, install, remove)
    return install, remove, arguments


def leaving(question, present):
    """Return (install, remove, arguments of apt-get) for ``state: absent``, with dependencies that came along."""
    added = owned(question["memory"], present, changed_at)
    # An interrupted transaction leaves configuration of packages that it had removed.
    left = {name for name, _, status, _ in rows_of_dpkg() if status == "config-files"}
    sure = {name for name in present.keys() | left if matches(name, question["remove"])}
    new = {name for name in added if matches(name, question["remove_new"])}
    # apt does not treat held packages as orphans.
    new |= {name for name in added if present[name][2] and matches(name, question["hold"])}
    if new and removed(sure | new) - sure - added:
        # What others have installed since then needs some of them.
        new = {name for name in new if not removed({name}) - sure - added}
    going = sure | new
    if not going:
        return {}, set(), []
    unneeded = ["-o", "APT::AutoRemove::SuggestsImportant=false"]
    # apt does not treat explicitly installed packages as orphans either; they stay if other packages need them.
    explicit = added.intersection(question["restore"])
    if explicit and not removed(going | explicit) - removed(going) - explicit:
        going |= explicit
    loose = simulated(unneeded, ["autoremove"])[1]
    orphans = (simulated(unneeded, ["autoremove", *sorted(going)])[1] - loose) & added
    orphans = {name for name in orphans if not matches(name, question["never"])}
    if question["never"] and touched(question, removed(going | orphans)):
        # What stays needs some of them.
        orphans = {name for name in orphans if not touched(question, removed({name}))}
    going |= orphans
    staying = {name: row[0] for name, row in present.items() if name not in going}
    if not question["simulate"] and staying.keys() & set(question["restore"]):
        with suppress(AptError):  # the lists fetched before are used then
            patient(lambda: refresh(["apt-get", *question["options"]], UPDATE_LIMIT_S), question["lock_wait_s"])
    back = restored([], question["restore"], staying)
    arguments = ["--purge", "install", *back, *(f"{name}-" for name in sorted(going))] if back else []
    arguments = arguments or ["--purge", "remove", *sorted(going)]
    install, remove = simulated([], arguments)
    # Configuration that was changed stays, as that of a package that is removed and not purged.
    if edited(remove):
        arguments = arguments[1:]
    refuse_what_is_not_ours({**question, "going": going}, present, install, remove)
    return install, remove, arguments


def changed_at(name):
    """Return when dpkg installed or changed a package last; None if that is unknown."""
    paths = [DPKG_INFO / f"{name}.list", *DPKG_INFO.glob(f"{glob.escape(name)}:*.list")]
    times = [path.stat().st_mtime for path in paths if path.is_file()]
    return max(times) if times else None


def edited(names):
    """Return the packages among ``names`` with configuration files that were changed."""
    packages = set()
    form = "${Package}\\n${Conffiles}\\n"
    rows = output_of(["dpkg-query", "-W", "-f", form, *sorted(names)], ANSWER_LIMIT_S) if names else ""
    package = ""
    for line in rows.splitlines():
        if not line.startswith(" "):
            package = line or package
            continue
        path, digest = line.split()[:2]
        try:
            # dpkg records this kind of digest.
            if hashlib.md5(file_access.read(path, LARGEST_FILE)).hexdigest() != digest:  # noqa: S324
                packages.add(package)
        except FileNotFoundError:
            continue
        except OSError:
            packages.add(package)
    return packages


def touched(question, names):
    """Return the names of packages that the transaction must not change."""
    return sorted(name for name in names if matches(name, question["never"]))


def removed(names):
    """Return the packages that apt removes together with these."""
    return simulated([], ["--purge", "remove", *sorted(names)])[1]


@contextmanager
def services_left_alone():
    """Keep package scripts from starting and restarting services; the role does that where allowed."""
    # A policy-rc.d of gpunode may be left by a killed run.
    if POLICY.exists() and not policy_is_ours():
        yield
        return
    # By one rename: a part of it would count as a policy of the administrator, and services would be started.
    file_access.write(str(POLICY), POLICY_TEXT.encode(), 0o755, file_access.own_ids())
    try:
        yield
    except StillRunningError:
        raise  # dpkg is still running: the next run removes the file
    except BaseException:
        POLICY.unlink()
        raise
    POLICY.unlink()


@contextmanager
def settled(memory):
    """Leave in the record what is installed at the end, also of a transaction that failed."""
    try:
        yield
    except StillRunningError:
        raise  # dpkg is still installing
    except BaseException:
        settle(memory, database())
        raise
    settle(memory, database())


def policy_is_ours():
    """Return whether the policy-rc.d was written by gpunode."""
    return POLICY.exists() and POLICY.read_text(encoding="utf-8", errors="replace") == POLICY_TEXT


def remove_left_policy():
    """Remove the policy-rc.d of a killed run, with which services never start. Not while dpkg is running."""
    if not policy_is_ours():
        return
    try:
        with DPKG_LOCK.open("a") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            POLICY.unlink()
    except OSError:
        return


def write_names(path, names):
    """Write names to a file, one per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    with draft.open("w", encoding="utf-8") as file:
        file.write("\n".join(sorted(names)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def finish_interrupted(question):
    """Configure packages that an interrupted run left half-configured; return their names.

    Half-configured packages of other tools are left alone, unless apt refuses to work because of them. A package that
    cannot be configured here is completed by the transaction itself, or makes it fail.
    """
    cut = DPKG_UPDATES.is_dir() and any(path.name.isdigit() for path in DPKG_UPDATES.iterdir())
    own_names = {*names_left(), *(entry.partition("=")[0] for entry in question["install"])}
    half = sorted(
        name
        for name, row in database().items()
        if not row[1] and (cut or name in own_names or matches(name, question["hold"]))
    )
    if cut or half:
        argv = ["dpkg", "--configure", "--pending", "--force-confdef", "--force-confold"]
        with suppress(AptError), services_left_alone():
            patient(lambda: carried_out(argv, question["limit_s"]), question["lock_wait_s"])
    return half


def compiler_log(since):
    """Return the compiler's errors in the newest log that DKMS wrote since a time; empty without errors."""
    logs = [Path(path) for path in glob.glob(MAKE_LOGS)]  # noqa: PTH207
    new = sorted((path for path in logs if path.stat().st_mtime >= since), key=lambda path: path.stat().st_mtime)
    if not new:
        return []
    return errors_of_compiler(new[-1])


def errors_of_compiler(path):
    """Return the compiler's errors in a log of DKMS."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    picked = [number for number, line in enumerate(lines) if re.search(r" error:|Error \d", line)]
    wanted = sorted({near for number in picked for near in range(number, min(number + 4, len(lines)))})
    return [lines[number][:200] for number in wanted][-20:]


def at_one_release(question):
    """Return what brings the bound packages to one release, or why there is none, from a private folder of apt."""
    with asking({**question, "simulate": True}) as (folder, options, failed):
        present = database()
        solution = resolved(question, folder, options, present)
        if failed and "lacking" in solution:
            raise AptError("lists of these packages could not be fetched")
        refuse_failed_sources(failed, options, solution.get("install", {}))
    if "lacking" in solution:
        return {"warnings": failed, **solution}
    # apt prints the architecture of foreign packages behind the name.
    install = {name.partition(":")[0]: version for name, version in solution["install"].items()}
    remove = {name.partition(":")[0] for name in solution["remove"]} - install.keys()
    others = [name for names in question["alternatives"].values() for name in names]
    requested = [*question["install"], *question["bound"], *question["optional"], *question["closure"], *others]
    going = {name for name in present if name in question["closure"] or matches(name, question["remove"])}
    refuse_what_is_not_ours({**question, "install": requested, "going": going}, present, install, remove)
    return {"warnings": failed, **holds(question, present, install, remove), **solution}


def holds(question, present, install, remove):
    """Return the packages that are held and unheld after these changes and were not before."""
    after = (present.keys() | install.keys()) - remove
    held = {name for name in present if present[name][2]}
    return {
        "hold": sorted(name for name in after - held if matches(name, question["hold"])),
        "unhold": sorted(held & set(question["unhold"])),
    }


def answer(question):
    """Return the answer of a transaction, after it was executed unless it is simulated."""
    if question["bound"]:
        solution = at_one_release(question)
        if question["simulate"] or "lacking" in solution:
            return solution
        files = {
            path: text.replace(RELEASE, solution["target"]) if isinstance(text, str) else text
            for path, text in question["files"].items()
        }
        question = {**question, "bound": [], "install": solution["exact"], "remove": solution["remove"], "files": files}
    options = ["-o", f"DPkg::Lock::Timeout={question['lock_wait_s']}"]
    with apt_as_it_will_be(question):
        only_looks = question["simulate"] or question["download_only"]
        finished = [] if only_looks else finish_interrupted(question)
        done = transacted({"unhold": [], **question, "options": options, "warnings": []})
    return {**done, "finished": finished}


def downloaded(question, argv, install, remove):
    """Download all packages; return (the arguments of apt-get, what they install).

    A download may be interrupted, dpkg may not. With ``state: absent``, a package of ``restore`` that cannot be
    downloaded keeps its version.
    """
    try:
        patient(lambda: output_of([*argv, "--download-only"], question["limit_s"]), question["lock_wait_s"])
    except AptError:
        if question["state"] != "absent":
            raise
        options = argv[: next(number for number, word in enumerate(argv) if word in {"--purge", "install"})]
        return [*options, "--purge", "remove", *sorted(remove)], {}
    return argv, dict(sorted(install.items()))


def fetched(question, argv, install, result):
    """Return the answer after the download of all packages, in which nothing else changed."""
    if install:
        downloaded(question, argv, install, ())
    return {**result, "remove": [], "hold": [], "unhold": []}


def transacted(question):
    """Return the answer after the transaction; ``options`` of the question are for the node's own apt."""
    present = database()
    if not question["simulate"] and not question["download_only"]:
        settle(question["memory"], present)
    leave = question["state"] == "absent"
    install, remove, arguments = (leaving if leave else coming)(question, present)
    result = {
        "install": dict(sorted(install.items())),
        "remove": sorted(remove),
        **holds(question, present, install, remove),
        "warnings": question["warnings"],
        "done": False,
    }
    if question["simulate"]:
        return result
    apt = ["apt-get", *question["options"], "--assume-yes"]
    argv = [*apt, *OPTIONS, *UNATTENDED, *arguments]
    if question["download_only"]:
        return fetched(question, argv, install, result)
    try:
        if install:
            argv, result["install"] = downloaded(question, argv, install, remove)
        # A job may have started since the plan was made.
        users = question.get("gpu_users", list)() if arguments else ()
        if users:
            return {**result, "error": f"busy: GPUs are in use by {', '.join(users)}, nothing was installed"}
        if result["unhold"]:
            output_of(["apt-mark", "unhold", *result["unhold"]], ANSWER_LIMIT_S)
        if arguments:
            write_names(JOURNAL, {*install, *remove})
            if leave:
                kept = edited(remove)
                patient(lambda: carried_out(argv, question["limit_s"]), question["lock_wait_s"])
                if kept and remove - kept:
                    purge = [*apt, "--purge", "remove", *sorted(remove - kept)]
                    patient(lambda: carried_out(purge, question["limit_s"]), question["lock_wait_s"])
            else:
                note(question["memory"], result["install"].keys() - present.keys())
                with services_left_alone(), settled(question["memory"]):
                    patient(lambda: carried_out(argv, question["limit_s"]), question["lock_wait_s"])
        JOURNAL.unlink(missing_ok=True)
        # A package that changed version has lost its hold.
        loose = [name for name, row in database().items() if not row[2] and matches(name, question["hold"])]
        if loose and not leave:
            output_of(["apt-mark", "hold", *sorted(loose)], ANSWER_LIMIT_S)
    except AptError as error:
        return {**result, "error": f"interrupted: {error}"}
    return {**result, "done": True}


def answered(question):
    """Return the answer; ``error`` is the reason if nothing was done."""
    if not question["simulate"]:
        remove_left_policy()
    for number in SIGNALS:
        # A transaction that began must not be interrupted by a lost connection.
        signal.signal(number, leave_orderly if question["simulate"] else signal.SIG_IGN)
    began = time.time()
    try:
        result = answer(question)
    except (AptError, OSError) as error:
        result = {"install": {}, "remove": [], "hold": [], "done": False, "error": " ".join(str(error).split())}
    if "error" in result and not question["simulate"]:
        result["log"] = compiler_log(began)
    return result
