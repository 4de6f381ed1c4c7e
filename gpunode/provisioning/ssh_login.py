"""Whether a login passes the settings of an SSH daemon, and contradictions in its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from fnmatch import fnmatchcase

from gpunode.provisioning.state import Account, PublicKey, effective_values

REPEATABLE = frozenset(
    {"port", "hostkey", "acceptenv", "allowusers", "allowgroups", "denyusers", "denygroups", "subsystem"}
)
NO_SHELL = ("nologin", "false")
MAIN = "/etc/ssh/sshd_config"
KEY_SIGNATURES = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")}


def obstacles(account: Account | None, name: str, address: str, effective: str) -> Iterator[str]:
    """Yield why a user could not log in with a key, given what ``sshd -T -C`` prints for this user."""
    values = effective_values(effective)
    if account is None:
        yield f"the node has no account {name} with a login shell"
        return
    if account.shell.rpartition("/")[2] in NO_SHELL:
        yield f"{name} has the shell {account.shell}"
    groups = {account.group, *account.groups}
    allow, deny = (" ".join(values.get(key, ())).split() for key in ("allowusers", "denyusers"))
    if allow and not any(_user_fits(pattern, name, address) for pattern in allow):
        yield f"{name} is not in AllowUsers ({' '.join(allow)})"
    if any(_user_fits(pattern, name, address) for pattern in deny):
        yield f"{name} is in DenyUsers"
    allow, deny = (" ".join(values.get(key, ())).split() for key in ("allowgroups", "denygroups"))
    if allow and not any(fnmatchcase(group, pattern) for group in groups for pattern in allow):
        yield f"{name} is in no group of AllowGroups ({' '.join(allow)})"
    if any(fnmatchcase(group, pattern) for group in groups for pattern in deny):
        yield f"{name} is in a group of DenyGroups"
    if account.uid == 0 and values.get("permitrootlogin", ("no",))[0] not in (
        "yes",
        "without-password",
        "prohibit-password",
    ):
        yield "root may not log in (ssh_hardening_root)"
    if _without_key(account, values):
        return
    if values.get("pubkeyauthentication") == ("no",):
        yield f"PubkeyAuthentication is off for {name}"
    methods = " ".join(values.get("authenticationmethods", ("any",))).split()
    if not {"any", "publickey"} & set(methods):
        yield f"{name} needs more than a key (AuthenticationMethods {' '.join(methods)})"
    yield from _key_obstacles(account, values)


def keys_elsewhere(values: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether sshd accepts keys that no file of the user has: those of a directory (SSSD) or an authority."""
    return any(values.get(name, ("none",))[0] != "none" for name in ("authorizedkeyscommand", "trustedusercakeys"))


def _without_key(account: Account, values: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether a user of a directory can log in without a key: by password (PAM asks SSSD) or Kerberos.

    The node has no password of such a user, so its state is unknown. A local user with one is judged by the keys: the
    controller logs in with a key.
    """
    if account.password != "unknown" or values.get("usepam") != ("yes",):  # noqa: S105
        return False
    methods = set(" ".join(values.get("authenticationmethods", ("any",))).split())
    offered = {
        "password": "passwordauthentication",
        "keyboard-interactive": "kbdinteractiveauthentication",
        "gssapi-with-mic": "gssapiauthentication",
    }
    return any(values.get(key) == ("yes",) and methods & {"any", name} for name, key in offered.items())


def _key_obstacles(account: Account, values: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    if keys_elsewhere(values):
        return
    if account.keys_problem and not account.keys_problem.endswith("lines that are not keys"):
        yield account.keys_problem
    if not account.keys:
        yield f"{account.name} has no key in authorized_keys"
    elif not any(accepted(key, values) for key in account.keys):
        kinds = ", ".join(sorted({f"{key.type} of {key.bits} bits" if key.bits else key.type for key in account.keys}))
        yield f"sshd would accept no key of {account.name} ({kinds})"


def accepted(key: PublicKey, values: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether the daemon accepts a user's key."""
    algorithms = set(",".join(values.get("pubkeyacceptedalgorithms", ())).split(","))
    least = values.get("requiredrsasize", ("0",))[0]
    if key.type == "ssh-rsa" and least.isdigit() and key.bits < int(least):
        return False
    return bool(algorithms & set(KEY_SIGNATURES.get(key.type, (key.type,))))


def forced_command(effective: str) -> str | None:
    """Return the command that runs in place of the login's own; None if there is none."""
    command = effective_values(effective).get("forcecommand", ("none",))[0]
    return None if command == "none" else command


def _user_fits(pattern: str, name: str, address: str) -> bool:
    user, at, host = pattern.partition("@")
    return fnmatchcase(name, user) and (not at or "/" in host or fnmatchcase(address, host))


def setting_lines(contents: Mapping[str, str | None]) -> Iterator[tuple[str, int, str, str, bool]]:
    """Yield (path, line number, setting in lower case, value, inside a Match block) of each line of each file."""
    for path, text in contents.items():
        matching = False
        for number, line in enumerate((text or "").splitlines(), start=1):
            name, _, value = line.strip().replace("=", " ", 1).partition(" ")
            if not name or name.startswith("#"):
                continue
            if name.lower() == "match":
                matching = value.strip().lower() != "all"
            else:
                yield path, number, name.lower(), value.strip(), matching


def has_include(contents: Mapping[str, str | None]) -> bool:
    """Return whether the main file includes the folder of drop-ins outside of a Match block."""
    return any(
        name == "include" and not matching and "sshd_config.d/" in value
        for path, _, name, value, matching in setting_lines(contents)
        if path == MAIN
    )


def contradictions(
    rows: list[tuple[str, str]],
    effective: str,
    contents: Mapping[str, str | None],
    drop_in: str,
    options: Set[str] = frozenset(),
) -> Iterator[str]:
    """Yield settings without effect, each with the line that is read before the drop-in.

    ``options`` are names of the site's settings, in lower case. sshd prints a value such as ``2m`` in another form: for
    them, another file's line must have the effective value.
    """
    values = effective_values(effective)
    others = [line for line in setting_lines(contents) if line[0] != drop_in and not line[4]]
    for name, value in rows:
        key = name.lower()
        now = values.get(key)
        if key in REPEATABLE or now is None or _same(key, value, now[0]):
            continue
        if key in options and not any(other == key and _same(key, text, now[0]) for _, _, other, text, _ in others):
            continue
        where = next((f"{path} line {number}" for path, number, other, _, _ in others if other == key), "another file")
        yield f"{name} {value} has no effect: {where} is read first and sets {now[0] or 'nothing'}"


def _same(key: str, requested: str, now: str) -> bool:
    if now.lower() == requested.lower() or set(now.split(",")) == set(requested.split(",")):
        return True
    return (key, requested, now) == ("permitrootlogin", "prohibit-password", "without-password")


def overridden(rows: list[tuple[str, str]], contents: Mapping[str, str | None], drop_in: str) -> Iterator[str]:
    """Yield lines of other files with another value: without effect, or effective in a Match block."""
    requested = {name.lower(): value for name, value in rows if name.lower() not in REPEATABLE}
    for path, number, name, value, matching in setting_lines(contents):
        if path == drop_in or name not in requested or value.lower() == requested[name].lower():
            continue
        if matching:
            yield f"{path} line {number}: {name} {value} remains effective inside its Match block"
        else:
            yield f"{path} line {number}: {name} {value} has no effect any more, the role sets {requested[name]}"
