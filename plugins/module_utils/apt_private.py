"""Ask apt and dpkg, and run apt in a private folder with planned files: for previews and transactions alike.

Standard library only.
"""

import base64
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

APT = Path("/etc/apt")
SETTINGS, PREFERENCES, SOURCES = PARTS = ("apt.conf.d", "preferences.d", "sources.list.d")
JOURNAL = Path("/var/lib/gpunode/transaction")
"""File with the packages of a transaction, written before it begins and deleted after it succeeded."""
OWN = "gpunode-"
"""Part of the names of all files that the roles write to apt's folders."""
JUDGE_LIMIT_S = 60
ANSWER_LIMIT_S = 120
UPDATE_LIMIT_S = 300
OPTIONS = ("--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages")
"""Options of every ``apt-get install``, so that a simulation matches the real run."""
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LISTS = Path("/var/lib/apt/lists")
NVIDIAS = re.compile(r"\|(NVIDIA CUDA|DOCA-HOST[^|]*)$")
"""End of the lines of NVIDIA's repositories in apt's list, by their labels."""
PAUSES_S = (3, 10)
"""Pauses between the attempts after a temporary error."""
PASSES = re.compile(
    r"unexpected size|Mirror sync in progress|Hash Sum mismatch|Could not (resolve|connect)|Temporary failure"
    r"|Connection (reset|failed|timed)|timed? out|Undetermined Error|Bad Gateway|Service Unavailable|  50[0-4] "
)
"""Messages of apt about a source that may be temporary: a network error, or a mirror that is being updated."""
FAILED = re.compile(
    r"^[WE]: .*(Failed to fetch|GPG error|is not signed|have a Release file|has a Release file|signature verification"
    r"|is not valid yet|is expired|changed its ')"
)
"""Messages of apt about a source with lists that it rejects."""
ENVIRONMENT = {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
"""Environment of all commands, in addition to that of this process."""

# apt writes everything to the private folder; hooks of the node's own configuration must not run.
# Only package lists are fetched: no translations, sources or contents.
CONFIGURATION = """
#clear APT::Update;
#clear Acquire::IndexTargets;
Acquire::IndexTargets::deb::Packages {{
  MetaKey "$(COMPONENT)/binary-$(ARCHITECTURE)/Packages";
  flatMetaKey "Packages";
  ShortDescription "Packages";
  Description "$(RELEASE)/$(COMPONENT) $(ARCHITECTURE) Packages";
  flatDescription "$(RELEASE) Packages";
  Optional "no";
}};
Acquire::Retries "2";
Acquire::http::Timeout "20";
Acquire::https::Timeout "20";
Dir::State::lists "{folder}/lists/";
Dir::Cache "{folder}/cache/";
Dir::Log "{folder}/log/";
Dir::Etc::sourceparts "{folder}/sources.list.d/";
Dir::Etc::preferencesparts "{folder}/preferences.d/";
"""


class AptError(Exception):
    """apt failed; the text is the reason in one line."""


class StillRunningError(AptError):
    """apt exceeded its time limit, and was not killed."""


def output_of(argv, limit_s, **environment):
    """Return the standard output of a command; its process group is killed at the time limit or on a signal."""
    code, output, errors = captured(argv, limit_s, **environment)
    if code != 0:
        raise AptError(reason(output, errors, code))
    return output


def captured(argv, limit_s, **environment):
    """Return (exit status, standard output, standard error) of a command, run as by ``output_of``."""
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT, **environment},
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise AptError(f"{argv[0]} did not end within {limit_s} s") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    return child.returncode, output.decode("utf-8", "replace"), errors.decode("utf-8", "replace")


def carried_out(argv, limit_s):
    """Run a command that must not be interrupted: dpkg is never killed. Raise StillRunningError at the time limit.

    Its outputs are files, so that it can continue to write after this process ends.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        environment = {**os.environ, **ENVIRONMENT}
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=environment, start_new_session=True
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise StillRunningError(
                f"{argv[0]} (pid {child.pid}) did not end within {limit_s} s and is still running: run this again "
                "when it has ended"
            ) from None
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    if code != 0:
        raise AptError(reason(texts[0], texts[1], code))


def names_left():
    """Return the packages of a gpunode transaction that did not end successfully; [] without one."""
    try:
        return JOURNAL.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []


def rows_of_dpkg():
    """Return (name, version, status, selection) of each package that dpkg knows."""
    form = "${Package}\\t${Version}\\t${db:Status-Status}\\t${db:Status-Want}\\n"
    return [line.split("\t") for line in output_of(["dpkg-query", "-W", "-f", form], ANSWER_LIMIT_S).splitlines()]


def installed_versions(names):
    """Return name to version of those packages that are installed."""
    rows = rows_of_dpkg() if names else ()
    return {name: version for name, version, status, _ in rows if status == "installed" and name in names}


def offers(options, names):
    """Return (version, location) of each package that the sources offer, newest first; empty for an unknown one.

    One command for all of them: apt reads its whole cache for each. A name with an architecture has one of its own,
    because apt prints that of the node (``libc6:amd64``) without it.
    """
    by_name: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
    together = [name for name in names if ":" not in name]
    for batch in (together, *([name] for name in names if ":" in name)):
        lines = output_of(["apt-cache", *options, "madison", *batch], ANSWER_LIMIT_S).splitlines() if batch else ()
        for printed, version, location in ([*line.split("|"), ""][:3] for line in lines if line.count("|") >= 1):
            name = printed.strip().partition(":")[0] if batch is together else batch[0]
            if name in by_name:
                by_name[name].append((version.strip(), location.strip()))
    return by_name


def offered(options, names):
    """Return the versions of each package that the sources offer, newest first."""
    return {name: [*dict.fromkeys(version for version, _ in rows)] for name, rows in offers(options, names).items()}


def restored(options, names, installed):
    """Return NAME=VERSION of packages that change from NVIDIA's version to the distribution's.

    ``installed`` is name to version. Examples are dkms from the CUDA repository and rdma-core from the DOCA repository.
    Their epoch or version would keep them above every future version of the distribution.
    """
    present = sorted(installed.keys() & set(names))
    if not present:
        return []
    form = "$(REPO_URI)|$(LABEL)"
    targets = output_of(["apt-get", *options, "indextargets", "--format", form, "Created-By: Packages"], ANSWER_LIMIT_S)
    nvidias = {line.partition("|")[0].rstrip("/") for line in targets.splitlines() if NVIDIAS.search(line)}
    choices = {
        name: [version for version, location in rows if location.split()[0].rstrip("/") not in nvidias]
        for name, rows in offers(options, present).items()
    }
    return [f"{name}={choices[name][0]}" for name in present if choices[name] and installed[name] not in choices[name]]


def simulation(options, arguments):
    """Return (name to version, names) that apt-get would install and remove, as it prints them."""
    output = output_of(["apt-get", *options, "--simulate", "--assume-yes", *OPTIONS, *arguments], ANSWER_LIMIT_S)
    install = dict(re.findall(r"(?m)^Inst (\S+) (?:\[\S+\] )?\((\S+) ", output))
    return install, re.findall(r"(?m)^(?:Remv|Purg) (\S+)", output)


def refresh(apt_get, limit_s):
    """Fetch the lists of all sources; return apt's messages about the sources that it rejected, one line each.

    Temporary errors are retried. A failing source is not an error here: no package may need it.
    """
    for pause in (*PAUSES_S, None):
        code, output, errors = captured([*apt_get, "update"], limit_s)
        lines = [line for line in [*output.split("\n"), *errors.split("\n")] if FAILED.match(line)]
        why = [line for line in errors.split("\n") if "igning key" in line]
        if code != 0 and not lines:
            raise AptError(reason(output, errors, code))
        if pause is None or not any(PASSES.search(line) for line in lines):
            return [*lines, *why] if lines else []
        time.sleep(pause)
    raise AssertionError


def refuse_failed_sources(failed, options, versions):
    """Raise AptError with the messages of ``refresh`` if a package is offered only by sources that failed."""
    if not failed or not versions:
        return
    for name, rows in offers(options, sorted(versions)).items():
        addresses = {location.split()[0].rstrip("/") for version, location in rows if version == versions[name]}
        errors = [[line for line in failed if re.search(re.escape(uri) + r"(?=[/ '\"]|$)", line)] for uri in addresses]
        if addresses and all(errors):
            raise AptError("; ".join(dict.fromkeys(line for lines in errors for line in lines)))


def reason(output, errors, code):
    """Return the lines of a command's output that explain why it failed, in one line."""
    lines = [line for line in [*output.split("\n"), *errors.split("\n")] if line.strip()]
    # apt reports a rejected signature in a warning, and an unfit or broken package in lines without a prefix.
    why = [line for line in lines if (line.startswith("W: ") and "GPG error" in line) or "igning key" in line]
    named = [line for line in lines if line.startswith("E: ")]
    broken = [line.strip() for line in lines if re.match(r" \S+ : |dpkg: error|.*[Nn]o space left", line)]
    chosen = dict.fromkeys([*why[:3], *named[:4], *broken[:4]])
    return "; ".join(chosen or lines[-3:]) or f"rc {code}"


def damaged(path, folder):
    """Return whether apt cannot parse a file; apt reads no other file of the node for it."""
    alone = folder / "alone.conf"
    alone.write_text(f'Dir "{folder}/alone/";\nDir::State::status "/dev/null";\n', encoding="utf-8")
    judges = {
        SETTINGS: ["apt-config", "-c", str(path), "dump"],
        PREFERENCES: ["apt-cache", "-o", f"Dir::Etc::preferences={path}", "policy"],
        SOURCES: ["apt-get", "-o", f"Dir::Etc::sourcelist={path}", "indextargets"],
    }
    try:
        output_of(judges[path.parent.name], JUDGE_LIMIT_S, APT_CONFIG=str(alone))
    except AptError as error:
        # A timeout, or a missing apt, is not an error in the file.
        if not str(error).startswith("E: "):
            raise
        return True
    return False


def link_own(folder, part, files):
    """Link the node's own files of one of apt's folders, except those in ``files``; return the damaged ones left out.

    A damaged file of the roles makes apt fail entirely; the role that owns the file is about to rewrite it.
    """
    (folder / part).mkdir()
    left_out = []
    for path in sorted((APT / part).glob("*")):
        if str(path) in files:
            continue
        if OWN in path.name and damaged(path, folder):
            left_out.append(path)
        else:
            (folder / part / path.name).symlink_to(path)
    return left_out


def lay_over(folder, files):
    """Fill the private folder with links to the node's own files, and with ``files`` in place of the same paths.

    ``files`` outside apt's three folders are keys; the other files refer to them by path.
    """
    texts = {path: text for path, text in files.items() if Path(path).parent in [APT / part for part in PARTS]}
    for path, content in files.items():
        if path not in texts and content:
            key = folder / path.strip("/").replace("/", "-")
            key.write_bytes(base64.b64decode(content["b64"]) if isinstance(content, dict) else content.encode())
            texts = {name: text.replace(path, str(key)) for name, text in texts.items()}
    for part in PARTS:
        link_own(folder, part, files)
    for path, text in texts.items():
        if text and Path(path).parent.name != SETTINGS:
            (folder / Path(path).relative_to(APT)).write_text(text, encoding="utf-8")
    for name in ("lists/partial", "cache/archives/partial", "log"):
        (folder / name).mkdir(parents=True)
    # Lists that exist already are fetched only if they changed: apt replaces the link with its own file or removes it.
    for path in LISTS.glob("*_*"):
        if path.is_file():
            (folder / "lists" / path.name).symlink_to(path)
    settings = [text for path, text in texts.items() if Path(path).parent.name == SETTINGS]
    # They may contain a proxy's password. apt reads them as root and passes them to its fetchers through a pipe.
    (folder / "apt.conf").touch(0o600)
    (folder / "apt.conf").write_text("\n".join([CONFIGURATION.format(folder=folder), *settings]), encoding="utf-8")
    read_from(folder, f'Dir::Etc::parts "{folder}/{SETTINGS}/";\n')


@contextmanager
def passing_over_damaged(preferences):
    """Run apt on the node itself without damaged files of the roles and with given ``preferences`` ({path: text}).

    An empty text means that the file must not exist.
    """
    with private_folder() as folder:
        left_out = [path for part in PARTS for path in link_own(folder, part, preferences)]
        for path, text in preferences.items():
            if text:
                (folder / PREFERENCES / Path(path).name).write_text(text, encoding="utf-8")
        if preferences or left_out:
            folders = {"parts": SETTINGS, "preferencesparts": PREFERENCES, "sourceparts": SOURCES}
            lines = [f'Dir::Etc::{name} "{folder}/{part}/";\n' for name, part in folders.items()]
            read_from(folder, "".join(lines))
        yield


def read_from(folder, settings):
    """Set APT_CONFIG, so that apt reads these settings before all other files; files of ``-c`` come last."""
    first = folder / "first.conf"
    first.write_text(settings, encoding="utf-8")
    ENVIRONMENT["APT_CONFIG"] = str(first)


@contextmanager
def private_apt(files):
    """Yield (folder, options) of apt in a private folder with planned files."""
    with private_folder() as folder:
        lay_over(folder, files)
        yield folder, ["-c", f"{folder}/apt.conf"]


@contextmanager
def private_folder():
    """Yield a temporary folder; paths of its links in the text of an AptError are replaced by the real paths."""
    with tempfile.TemporaryDirectory(prefix="gpunode-apt-") as name:
        Path(name).chmod(0o755)  # apt fetches as a user of its own
        try:
            yield Path(name)
        except AptError as error:
            link = rf"{re.escape(name)}/(?=(sources\.list|preferences|apt\.conf)\.d/)"
            raise AptError(re.sub(link, f"{APT}/", str(error))) from None
        finally:
            ENVIRONMENT.pop("APT_CONFIG", None)


def leave_orderly(number, _frame):
    """Exit on a signal: running commands are killed and the private folder is removed. Further signals are ignored."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
