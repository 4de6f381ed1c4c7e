"""What those that ask apt have in common: apt in a private folder, with files as they will be.

Standard library alone.
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
OWN = "gpunode-"
"""In the names of all files that the roles put into apt's folders."""
JUDGE_LIMIT_S = 60
OPTIONS = ("--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages")
"""Of ``apt-get install`` everywhere, so that what is told is what is done."""
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LISTS = Path("/var/lib/apt/lists")
PAUSES_S = (3, 10)
"""Between the tries of what may pass by itself."""
PASSES = re.compile(
    r"unexpected size|Mirror sync in progress|Hash Sum mismatch|Could not (resolve|connect)|Temporary failure"
    r"|Connection (reset|failed|timed)|timed? out|Undetermined Error|Bad Gateway|Service Unavailable|  50[0-4] "
)
"""In what apt says of a source: a fault of the network, or a mirror that is just being written."""
FAILED = re.compile(
    r"^[WE]: .*(Failed to fetch|GPG error|is not signed|have a Release file|has a Release file|signature verification"
    r"|is not valid yet|is expired|changed its ')"
)
"""What apt says of a source whose lists it does not take."""
ENVIRONMENT = {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
"""Of all commands, beside what this process has."""

# Everything that apt writes goes to the private folder; hooks of the node's own configuration must not run for it.
# Only what is asked here is fetched: no translations, sources, contents.
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
    """apt did not do what it was asked for; the text says why in one line."""


class StillRunningError(AptError):
    """apt exceeded its time limit, and was not killed."""


def output_of(argv, limit_s, **environment):
    """Standard output of a command; its process group is killed where it does not end in time or we are told to go."""
    code, output, errors = said_by_all(argv, limit_s, **environment)
    if code != 0:
        raise AptError(reason(output, errors, code))
    return output


def said_by_all(argv, limit_s, **environment):
    """(exit status, standard output, standard error) of a command, as ``output_of`` runs it."""
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
    """Run what must not be cut short: dpkg is never killed. Where it does not end in time, StillRunningError is raised.

    Its outputs are files, so that it can write on when we are gone.
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


def refresh(apt_get, limit_s):
    """Fetch the lists of all sources; returned: what apt said of those that it did not take, one line each.

    What may pass by itself is tried again. That a source failed is no error here: it may be one that nothing needs.
    """
    for pause in (*PAUSES_S, None):
        code, output, errors = said_by_all([*apt_get, "update"], limit_s)
        lines = [line for line in [*output.split("\n"), *errors.split("\n")] if FAILED.match(line)]
        why = [line for line in errors.split("\n") if "igning key" in line]
        if code != 0 and not lines:
            raise AptError(reason(output, errors, code))
        if pause is None or not any(PASSES.search(line) for line in lines):
            return [*lines, *why] if lines else []
        time.sleep(pause)
    raise AssertionError


def refuse_failed_sources(failed, apt_cache, versions):
    """Raise what apt said of sources (``refresh``) where a package comes from one of them and from no other."""
    if not failed or not versions:
        return
    offers: dict[str, set[str]] = {}
    for line in output_of([*apt_cache, "madison", *sorted(versions)], JUDGE_LIMIT_S).splitlines():
        name, version, where = (part.strip() for part in line.split("|")[:3])
        if versions.get(name) == version:
            offers.setdefault(name, set()).add(where.split()[0].rstrip("/"))
    for addresses in offers.values():
        said = [[line for line in failed if re.search(re.escape(one) + r"(?=[/ '\"]|$)", line)] for one in addresses]
        if all(said):
            raise AptError("; ".join(dict.fromkeys(line for lines in said for line in lines)))


def reason(output, errors, code):
    """Of all that a command said, the lines that tell why it failed."""
    said = [line for line in [*output.split("\n"), *errors.split("\n")] if line.strip()]
    # Why a signature is not taken, apt says in a warning; which package does not fit or broke, in lines of no kind.
    why = [line for line in said if (line.startswith("W: ") and "GPG error" in line) or "igning key" in line]
    named = [line for line in said if line.startswith("E: ")]
    broken = [line.strip() for line in said if re.match(r" \S+ : |dpkg: error|.*[Nn]o space left", line)]
    chosen = dict.fromkeys([*why[:3], *named[:4], *broken[:4]])
    return "; ".join(chosen or said[-3:]) or f"rc {code}"


def damaged(path, folder):
    """Whether apt cannot read this file, asked of apt with no other file of the node."""
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
        # That apt took too long, or could not run, says nothing of the file.
        if not str(error).startswith("E: "):
            raise
        return True
    return False


def link_own(folder, part, files):
    """Link the node's own files of one of apt's folders, without those of ``files``; returned: damaged ones left out.

    A damaged file of ours stops apt altogether, and the role that has it is about to write it anew.
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
    """Fill the private folder: links to the node's own files, and ``files`` in place of those of the same path.

    ``files`` in none of apt's three folders are keys; the others name them by their paths.
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
    # What was fetched already is asked for changes alone: apt puts its own file in a link's place, or removes the link.
    for path in LISTS.glob("*_*"):
        if path.is_file():
            (folder / "lists" / path.name).symlink_to(path)
    settings = [text for path, text in texts.items() if Path(path).parent.name == SETTINGS]
    # A proxy's password may be among them. apt reads them as root, and tells them to those that fetch through a pipe.
    (folder / "apt.conf").touch(0o600)
    (folder / "apt.conf").write_text("\n".join([CONFIGURATION.format(folder=folder), *settings]), encoding="utf-8")
    read_from(folder, f'Dir::Etc::parts "{folder}/{SETTINGS}/";\n')


@contextmanager
def passing_over_damaged(preferences):
    """apt of the node itself, without damaged files of ours and with some ``preferences`` ({path: text}) as given.

    An empty text is a file that is not to be there.
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
    """Have apt read these settings before all other files, where those of ``-c`` come after them."""
    first = folder / "first.conf"
    first.write_text(settings, encoding="utf-8")
    ENVIRONMENT["APT_CONFIG"] = str(first)


@contextmanager
def private_folder():
    """A folder that is gone afterwards; where apt speaks of a link in it, a person is told where the file lies."""
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
    """Go in an orderly way, once: what is under way is killed and the private folder removed."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
