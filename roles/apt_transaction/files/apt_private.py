"""What the scripts that ask apt in a folder of their own have in common.

Stands in front of such a script, as one program: ``python3 -I -c "THIS TEXT\\nTHE SCRIPT"``. Standard library alone.
"""

import base64
import os
import re
import signal
import subprocess
import sys
import tempfile
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


def output_of(argv, limit_s, **environment):
    """Standard output of a command; its process group is killed where it does not end in time or we are told to go."""
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
    if child.returncode != 0:
        raise AptError(reason(output.decode("utf-8", "replace"), errors.decode("utf-8", "replace"), child.returncode))
    return output.decode("utf-8", "replace")


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


# The script behind this text imports from a module of this name, which is no file on the node.
sys.modules["apt_private"] = sys.modules[__name__]
