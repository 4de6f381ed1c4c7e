"""One dnf transaction on this node, simulated or carried out: the backend of ``package_engine.py`` for dnf.

Requires a Python with the bindings of dnf 4.
"""

import configparser
import contextlib
import fnmatch
import functools
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils import dnf_state, file_access
from ansible_collections.gpunode.node.plugins.module_utils.commands import run
from ansible_collections.gpunode.node.plugins.module_utils.package_record import matches, note, owned, settle

try:
    import dnf
    import dnf.module.module_base
except ImportError:
    dnf = None  # this Python lacks dnf's bindings


LOCKLIST = "/etc/dnf/plugins/versionlock.list"
SHARED_MARK = "gpunode"
"""Mark of the section of transactions without one of their own."""
STOP_LIMIT_S = 120


class TransactionRefusedError(Exception):
    """The reason why nothing was done, in one line."""


def out_of_time(*_):
    """Raise TransactionRefusedError on SIGALRM."""
    raise TransactionRefusedError("did not end within its time limit")


def split_locks(path, mark):
    """Return the plugin's list as three lists: lines before our section, our section, lines after it.

    Our section is between ``# BEGIN MARK`` and ``# END MARK``. Without one of these lines, nothing is distinguished.
    """
    try:
        lines = file_access.text(str(path)).split("\n")
    except FileNotFoundError:
        return [], [], []
    marks = [f"# BEGIN {mark}", f"# END {mark}"]
    if lines[-1] == "":
        lines.pop()
    existing = [line for line in lines if line in marks]
    if not existing:
        return lines, [], []
    begin = lines.index(existing[0])
    end = lines.index(existing[-1])
    if existing != marks or any(line.startswith("# BEGIN ") for line in lines[begin + 1 : end]):
        raise TransactionRefusedError(
            f"{path}: expected one line '{marks[0]}' and below it one line '{marks[1]}': restore these marks around "
            "the lines that gpunode wrote, or remove those lines and the marks"
        )
    return lines[:begin], lines[begin + 1 : end], lines[end + 1 :]


def foreign_locks(path, mark, ignored):
    """Return the lines of the plugin's list outside our section, without the ignored ones."""
    before, _, after = split_locks(path, mark)
    return [line for line in (*before, *after) if line.strip() not in ignored]


def repositories_of(files):
    """Return the repositories in planned files (path to text), with their first URLs. Their keys may not exist yet."""
    repositories = []
    for path, text in sorted(files.items()):
        if path.startswith("/etc/yum.repos.d/") and isinstance(text, str):
            parser = configparser.ConfigParser(interpolation=None, strict=False)
            try:
                parser.read_string(text)
            except configparser.Error as err:
                # Not the error's text, which quotes a line that may have a password.
                raise TransactionRefusedError(f"{path} cannot be parsed ({type(err).__name__})") from None
            for name in parser.sections():
                url = re.split(r"[\s,]+", parser[name].get("baseurl", "").strip())[0]
                known = {"url": url, "proxy": parser[name].get("proxy")}
                repositories.append({"id": name, **{key: value for key, value in known.items() if value is not None}})
    return repositories


def configured(question, folder):
    """Return a base with the node's own configuration, plugins and repositories, without our own locks."""
    base = dnf.Base()
    base.conf.read()
    base.conf.substitutions.update_from_etc("/")
    base.conf.best = True
    base.conf.clean_requirements_on_remove = False
    base.conf.module_stream_switch = True
    base.conf.assumeyes = True  # the keys that the repositories' files name
    locks = foreign_locks(LOCKLIST, question["lock_mark"], question["ignore_locks"])
    own_list = Path(folder, "list")
    own_list.write_text("".join(line + "\n" for line in locks), encoding="utf-8")
    Path(folder, "versionlock.conf").write_text(f"[main]\nenabled=1\nlocklist={own_list}\n", encoding="utf-8")
    base.conf.pluginconfpath = [*base.conf.pluginconfpath, folder]
    # The plugin show-leaves fails without a command line.
    base.init_plugins(disabled_glob=["show_leaves", "show-leaves"])
    base.pre_configure_plugins()
    base.read_all_repos()
    base.configure_plugins()
    for wanted in [
        *question["repositories"],
        *(repositories_of(question["files"]) if question["simulate"] else ()),
    ]:
        # add_new_repo substitutes the variables in the URL.
        fresh = dnf.repodict.RepoDict().add_new_repo(wanted["id"], base.conf, baseurl=[wanted["url"]], gpgcheck=True)
        if wanted["id"] not in base.repos:
            base.repos.add(fresh)
        repository = base.repos[wanted["id"]]
        repository.baseurl = fresh.baseurl
        if "proxy" in wanted:
            repository.proxy = wanted["proxy"]
        # Read the current metadata instead of the cached ones.
        repository.metadata_expire = 0
    base.fill_sack(load_system_repo=True, load_available_repos=bool(base.repos) and needs_repositories(question))
    return base


def needs_repositories(question):
    """Return whether the transaction installs packages; a removal works without reachable repositories."""
    return bool(question["bound"] or question["install"])


def newest_first(base, releases):
    """Return releases in the order of rpm's version comparison, newest first."""
    return sorted(releases, key=functools.cmp_to_key(base.sack.evr_cmp), reverse=True)


def bound_names(question):
    """Return the names of the bound packages; raise TransactionRefusedError for a pattern, which only apt supports."""
    if any("=" in name for name in question["bound"]):
        raise TransactionRefusedError(f"bound: dnf takes names without patterns, not {', '.join(question['bound'])}")
    return question["bound"]


def release_for(base, question):
    """Return (the newest matching release that all of bound have, releases by name, releases that all have)."""
    by_name = {
        name: {package.version for package in base.sack.query().available().filter(name=name)}
        for name in bound_names(question)
    }
    every = newest_first(base, set.intersection(*by_name.values()) if by_name else set())
    fitting = [release for release in every if fnmatch.fnmatch(release, question["constraint"])]
    return (fitting[0] if fitting else None), {k: newest_first(base, v) for k, v in by_name.items()}, every


def at(base, name, release):
    """Return the newest build of a package at a release for this architecture; None without one."""
    query = base.sack.query().available().filter(name=name, version=release, arch__neq="src")
    packages = sorted(query, reverse=True)
    native = [package for package in packages if package.arch in (base.conf.arch, "noarch")]
    return native[0] if native else None


def in_line(name, line):
    """Return whether a package belongs to the line: its version is the driver's release."""
    return matches(name, line["names"]) and not matches(name, line["except"])


def bind_line(base, question, target):
    """Hide other releases of each package of the line: a dependency without a version would install the newest.

    A package without a build at the target stays visible; the caller refuses it if the transaction needs it.
    """
    available = base.sack.query().available()
    for name in sorted({package.name for package in available.filter(name__glob=question["line"]["names"])}):
        builds = available.filter(name=name)
        bound = builds.filter(version=target)
        if in_line(name, question["line"]) and bound:
            base.sack.add_excludes(builds.difference(bound))


def elsewhere(base, question, target):
    """Return the packages of the line that would be installed at another release than the target: name to releases."""
    names = {package.name for package in base.transaction.install_set if package.version != target}
    return {
        name: newest_first(base, {package.version for package in base.sack.query().available().filter(name=name)})
        for name in sorted(names)
        if target is not None and in_line(name, question["line"])
    }


def best_of(base, entry):
    """Return the newest package that ``NAME`` or ``NAME=PATTERN`` allows; None if an installed one matches.

    Without a pattern, a name may be any that dnf takes, such as ``kernel-devel-5.14.0-427.el9``.
    """
    name, _, pattern = entry.partition("=")
    named = base.sack.query().filter(name=name)
    query = named if named or pattern else dnf.subject.Subject(name).get_best_query(base.sack)

    def fits(package):
        return fnmatch.fnmatchcase(package.evr, pattern or "*")

    if any(fits(package) for package in query.installed()):
        return None
    offered = sorted(query.available().filter(arch__neq="src"), reverse=True)
    names = sorted({package.name for package in offered})
    if len(names) > 1:
        raise TransactionRefusedError(f"{entry} may be {', '.join(names[:8])}: name one of them")
    native = [package for package in offered if package.arch in (base.conf.arch, "noarch")]
    for package in native:
        if fits(package):
            return package
    have = ", ".join(dict.fromkeys(package.evr for package in native[:8])) or "no package of that name"
    raise TransactionRefusedError(
        f"the node's repositories do not have {f'{name} {pattern}'.strip()}; they have {have}"
    )


def mark(base, question, target):
    """Add the requested changes to dnf's solver."""
    installed = base.sack.query().installed()
    for package in filter(None, [best_of(base, entry) for entry in question["install"]]):
        base.package_install(package)
    bound = bound_names(question)
    for name in bound:
        package = at(base, name, target)
        if package is None:
            raise TransactionRefusedError(f"{name} {target} exists only for another architecture")
        base.package_install(package)
    for name in set(question["closure"]) - set(bound) if target else ():
        existing = list(installed.filter(name=name))
        package = at(base, name, target) if existing else None
        if package is not None:
            base.package_install(package)
        else:
            for build in existing:
                base.package_remove(build)
    for name in question["remove"]:
        for existing in installed.filter(name=name):
            base.package_remove(existing)


def streams(base, question):
    """Enable or reset a module's stream; return the new stream, empty after a reset, None without a change."""
    modules = dnf.module.module_base.ModuleBase(base)
    if question["reset"]:
        if base._moduleContainer.getEnabledStream(question["reset"]):
            modules.reset([question["reset"]])
            return ""
        return None
    if not question["stream"]:
        return None
    name, stream = question["stream"].split(":", 1)
    if not modules.get_modules(question["stream"])[0]:
        raise TransactionRefusedError(f"module-stream: no repository has the stream {question['stream']}")
    before = base._moduleContainer.getEnabledStream(name)
    if before != stream:
        modules.enable([question["stream"]])
        return question["stream"]
    return None


def orphans(base, question):
    """Return the dependencies of removed packages that nothing else needs, without packages installed before."""
    added = own_packages(base, question)
    if question["state"] != "absent" or not question["remove"] or not added:
        return []
    base.conf.clean_requirements_on_remove = True
    # Base.remove obeys that setting, Base.package_remove does not.
    for name in question["remove"]:
        if base.sack.query().installed().filter(name=name):
            base.remove(name)
    base.resolve(allow_erasing=True)
    going = {package.name for package in base.transaction.remove_set}
    base.conf.clean_requirements_on_remove = False
    base.reset(goal=True)
    return sorted(name for name in (going & added) - set(question["remove"]) if not matches(name, question["never"]))


def own_packages(base, question):
    """Return the installed packages that the role's transactions installed."""
    times = {package.name: package.installtime for package in base.sack.query().installed()}
    return owned(question["memory"], times, times.get)


def going_of(base, question):
    """Return the names of the installed packages to remove, by the patterns of the question."""
    versions = {package.name: package.evr for package in base.sack.query().installed()}
    going = {name for name in versions if matches(name, question["remove"])}
    if question["state"] == "absent":
        added = own_packages(base, question)
        locked = {line.strip() for part in split_locks(LOCKLIST, question["lock_mark"]) for line in part}
        held = {name for name in added if matches(name, question["hold"]) and lock_line(name, versions[name]) in locked}
        going |= {name for name in added if matches(name, question["remove_new"])} | held
    return sorted(going)


def resolved(base, question):
    """Resolve the transaction and return it in the form of the answer."""
    question = {**question, "remove": going_of(base, question)}
    question = {**question, "remove": [*question["remove"], *orphans(base, question)]}
    stream = streams(base, question)
    target, by_name, every = release_for(base, question)
    if question["bound"] and target is None:
        return {"lacking": by_name, "common": every, "constraint": question["constraint"]}
    if target is not None:
        bind_line(base, question, target)
    mark(base, question, target)
    base.resolve(allow_erasing=True)
    astray = elsewhere(base, question, target)
    if astray:
        common = [release for release in every if all(release in releases for releases in astray.values())]
        return {"lacking": astray, "common": common, "constraint": target}
    coming = {package.name: package.evr for package in base.transaction.install_set}
    going = sorted({package.name for package in base.transaction.remove_set} - set(coming))
    known = set(question["remove"]) | set(question["closure"])
    others = [name for name in going if name not in known and not matches(name, question["expendable"])]
    if others:
        raise TransactionRefusedError(f"would-remove: dnf would remove {', '.join(others[:5])}")
    never = sorted(name for name in {*coming, *going} if matches(name, question["never"]))
    if never:
        raise TransactionRefusedError(f"it would also touch {', '.join(never[:5])}, which this role does not manage")
    # In check mode: what an earlier role would have done already.
    done = question["planned"].get("packages", {})
    coming = {name: release for name, release in sorted(coming.items()) if done.get(name) != release}
    going = [name for name in going if name not in question["planned"].get("purge", [])]
    return {"target": target, "install": coming, "remove": going, "stream": stream}


def fetch(base):
    """Download the packages to install and verify every signature. Nothing is installed."""
    packages = list(base.transaction.install_set)
    base.download_packages(packages)
    for package in packages:
        result, problem = base.package_signature_check(package)
        if result == 1:
            try:
                base.package_import_key(package)
            except (dnf.exceptions.Error, ValueError) as err:
                problem = " ".join(str(err).split())
            else:
                result, problem = base.package_signature_check(package)
        if result != 0:
            raise TransactionRefusedError(f"repository-unsigned: not signed as required: {problem or package}")


def change_locks(path, mark, lock, drop_locks, *, write):
    """Return (lines that our section of the list lacks, lines to remove); ``write``: change them in the file.

    ``lock`` is our section afterwards, None: as it is; ``drop_locks`` are foreign lines to remove.
    """
    before, body, after = split_locks(path, mark)
    wanted = body if lock is None else lock
    dropped = [line for line in (*before, *after) if line.strip() in drop_locks]
    new, old = [line for line in wanted if line not in body], [line for line in body if line not in wanted] + dropped
    if write and (new or old):
        section = [f"# BEGIN {mark}", *wanted, f"# END {mark}"] if wanted else []
        lines = [
            *(line for line in before if line not in dropped),
            *section,
            *(line for line in after if line not in dropped),
        ]
        file_access.write(str(path), "".join(f"{line}\n" for line in lines).encode(), 0o644, file_access.own_ids())
    return new, old


def lock_line(name, version):
    """Return the line that locks a package at its version, for any architecture."""
    return f"{name}-{version if ':' in version else '0:' + version}.*"


def lines_of_holds(base, question, answer):
    """Return the lock lines for packages that match ``hold``, at their versions after the transaction.

    After a removal the role's own section has none; None without ``hold``: the lines are not changed.
    """
    absent = question["state"] == "absent"
    if not question["hold"] and (not absent or question["lock_mark"] == SHARED_MARK):
        return None
    if absent:
        return []
    versions = {package.name: package.evr for package in base.sack.query().installed()}
    for name in answer["remove"]:
        versions.pop(name, None)
    versions.update(answer["install"])
    return [lock_line(name, version) for name, version in sorted(versions.items()) if matches(name, question["hold"])]


def units_of(packages):
    """Return the paths of the systemd units in packages."""
    return {file for package in packages for file in package.files if "/systemd/system/" in file}


def end_units(units, folder="/etc/systemd/system"):
    """Stop units with removed files and remove the links that enabled them: not every package does so itself."""
    gone = {Path(unit).name for unit in units if not Path(unit).exists()}
    if not gone:
        return
    run(["systemctl", "stop", *sorted(gone)], STOP_LIMIT_S)
    for kind in ("wants", "requires"):
        for link in Path(folder).glob(f"*.{kind}/*"):
            if link.name in gone and link.is_symlink():
                link.unlink()
    run(["systemctl", "daemon-reload"], STOP_LIMIT_S)


def carried_out(question):
    """Return the answer to a question, after the transaction unless it is simulated."""
    with tempfile.TemporaryDirectory(prefix="gpunode-dnf-") as folder:
        end = time.monotonic() + question["lock_wait_s"]
        while True:
            try:
                base = configured(question, folder)
                break
            except dnf.exceptions.LockError as err:
                if time.monotonic() > end:
                    raise TransactionRefusedError(f"package-lock: {err}") from None
                time.sleep(2)
        with base:
            answer = resolved(base, question)
            if "lacking" in answer:
                return answer
            lock = lines_of_holds(base, question, answer)
            changes = answer["install"] or answer["remove"] or answer["stream"] is not None
            if changes and not question["simulate"]:
                fetch(base)
            if question["download_only"]:
                return {**answer, "remove": [], "stream": None}
            if changes and not question["simulate"]:
                # A job may have started since the plan was made.
                users = question.get("gpu_users", list)()
                if users:
                    raise TransactionRefusedError(f"busy: GPUs are in use by {', '.join(users)}, nothing was installed")
                signal.alarm(0)
                before = {package.name for package in base.sack.query().installed()}
                if question["state"] != "absent":
                    settle(question["memory"], before)
                    note(question["memory"], answer["install"].keys() - before)
                units = units_of(base.transaction.remove_set)
                try:
                    base.do_transaction()
                except dnf.exceptions.TransactionCheckError:
                    settle(question["memory"], before)
                    raise
                except dnf.exceptions.Error as err:
                    with contextlib.suppress(OSError):
                        settle(question["memory"], dnf_state.packages()["installed"])
                    return {**answer, "done": False, "error": " ".join(str(err).split())}
                end_units(units)
                answer["done"] = True
        section = question["lock_mark"], lock, question["drop_locks"]
        answer["hold"], answer["unhold"] = change_locks(LOCKLIST, *section, write=not question["simulate"])
        return answer


def answered(question):
    """Return the answer; ``error`` is the reason if nothing was done."""
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(int(question["limit_s"]))
    if not question["simulate"]:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            # A transaction that began must not be interrupted by a lost connection.
            signal.signal(number, signal.SIG_IGN)
    # dnf and its plugins write to standard output.
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        return carried_out(question)
    except (TransactionRefusedError, dnf.exceptions.Error, OSError) as err:
        return {"error": " ".join(str(err).split())}
    finally:
        signal.alarm(0)
        sys.stdout = stdout
