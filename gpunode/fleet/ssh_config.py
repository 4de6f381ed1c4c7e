"""OpenSSH's settings for a host: its own answer (``ssh -G``), and a refusal of options that cannot be honoured here.

``ssh -G`` applies the command line, ``~/.ssh/config``, ``/etc/ssh/ssh_config``, ``Match`` and ``Include`` in the same
way as ssh, so none of that is parsed a second time here.
"""

import os
import pwd
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from gpunode.errors import UsageError
from gpunode.fleet import process

MAX_JUMPS = 8
_SSH_G_TIMEOUT_S = 20.0

_HONOURED = """
addressfamily checkhostip ciphers connecttimeout globalknownhostsfile hostkeyalgorithms hostkeyalias hostname
identitiesonly identityagent identityfile kexalgorithms macs passwordauthentication port preferredauthentications
proxycommand proxyjump pubkeyacceptedalgorithms pubkeyauthentication requiredrsasize stricthostkeychecking user
userknownhostsfile
"""
# Options that change nothing for a probe, or leave gpunode stricter than ssh would be. Speed and verbosity of a
# connection.
_PERFORMANCE = """
compression controlmaster controlpath controlpersist connectionattempts ipqos loglevel logverbose rekeylimit
serveralivecountmax serveraliveinterval syslogfacility tcpkeepalive versionaddendum warnweakcrypto
obscurekeystroketiming channeltimeout
"""
# What an interactive session shows or forwards; the probe has none.
_INTERACTIVE = """
clearallforwardings dynamicforward enableescapecommandline escapechar exitonforwardfailure
forkafterauthentication forwardagent forwardx11 forwardx11timeout forwardx11trusted gatewayports localforward
permitremoteopen remoteforward requesttty sendenv sessiontype stdinnull streamlocalbindmask
streamlocalbindunlink tunnel tunneldevice visualhostkey xauthlocation fingerprinthash
"""
# Prompts and further login methods; without them a login fails with a message.
_LOGIN = """
addkeystoagent batchmode enablesshkeysign gssapiauthentication gssapidelegatecredentials gssapikexalgorithms
gssapikeyexchange gssapirenewalforcesrekey gssapitrustdns gssapiclientidentity gssapiserveridentity
hostbasedacceptedalgorithms hostbasedauthentication kbdinteractiveauthentication kbdinteractivedevices
numberofpasswordprompts
"""
# Trust in host keys that gpunode does not extend: it stays stricter.
_TRUST = """
canonicaldomains canonicalizefallbacklocal canonicalizehostname canonicalizemaxdots canonicalizepermittedcnames
casignaturealgorithms hashknownhosts nohostauthenticationforlocalhost updatehostkeys verifyhostkeydns
"""
# Only for the configuration file.
_SYNTAX = """
host ignoreunknown tag
"""
HONOURED = frozenset(_HONOURED.split())
"""Options that are applied, as ``ssh -G`` names them."""

WITHOUT_EFFECT = frozenset((_PERFORMANCE + _INTERACTIVE + _LOGIN + _TRUST + _SYNTAX).split())
"""Options that change nothing for a probe, or that leave gpunode stricter than ssh would be."""


@dataclass(frozen=True)
class SshSettings:
    """Everything that one connection needs, as resolved by OpenSSH.

    ``algorithms`` are ssh's lists by its option names: algorithms that ssh would refuse are not offered here either.
    """

    alias: str
    """The requested name; ``hostname`` is what ssh resolves it to."""
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    """Path of the agent's socket, ``none``, or None for ``SSH_AUTH_SOCK``."""
    known_hosts_files: tuple[str, ...] = ()
    strict_host_key_checking: str = "ask"
    """``yes``, ``ask``, ``accept-new`` or ``no``."""
    host_key_alias: str | None = None
    check_host_ip: bool = False
    """The address, too, must not be listed with another key; only if ssh connects directly."""
    least_rsa_bits: int = 1024
    """RequiredRSASize: for host keys and for the user's own."""
    connect_timeout_s: float | None = None
    address_family: str = "any"
    password_allowed: bool = True
    public_key_allowed: bool = True
    proxy_command: str | None = None
    """For ``sh -c``, tokens expanded."""
    jumps: tuple["SshSettings", ...] = ()
    """Jump hosts in the order in which they are passed."""
    algorithms: tuple[tuple[str, tuple[str, ...]], ...] = field(default=())


NEWER_KEX = ("mlkem768x25519-sha256",)
"""Key exchanges that OpenSSH knows from 9.9 on: a user who configured none with an older one did not refuse them."""

Options = Sequence[tuple[str, Sequence[str]]]
"""Arguments for ssh with the name of the variable that each comes from (``ansible_ssh_common_args`` …)."""


def resolve(alias: str, options: Options = (), host: str | None = None) -> SshSettings:
    """Return OpenSSH's settings for ``ssh OPTIONS alias``.

    ``options`` are in the order in which Ansible passes them; ``host`` is the name for messages. Raises UsageError
    for an option that ssh does not know or that gpunode cannot honour, naming host, option and variable.
    """
    return _resolve(alias, options, host or alias, MAX_JUMPS)


def _resolve(alias: str, options: Options, host: str, jumps_left: int) -> SshSettings:
    answer = _ask(alias, options, host)
    _refuse_what_is_not_honoured(host, answer, options)

    def setting(key: str, default: str = "") -> str:
        return answer.get(key, [default])[-1]

    port, user = int(setting("port", "22")), setting("user")
    hostname = setting("hostname", alias)
    tokens = _tokens(alias, hostname, port, user)
    jump, command = setting("proxyjump"), setting("proxycommand")
    agent = setting("identityagent")
    timeout = setting("connecttimeout", "none")
    files = [*shlex.split(setting("userknownhostsfile")), *shlex.split(setting("globalknownhostsfile"))]
    alias_for_key = setting("hostkeyalias")
    preferred = setting("preferredauthentications")
    return SshSettings(
        alias=alias,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=tuple(_path(host, name, tokens) for name in answer.get("identityfile", [])),
        identities_only=_yes(setting("identitiesonly")),
        identity_agent=_agent(host, agent, tokens),
        known_hosts_files=tuple(_path(host, name, tokens) for name in files if name != "none"),
        strict_host_key_checking=_strictness(setting("stricthostkeychecking", "ask")),
        host_key_alias=alias_for_key if alias_for_key not in ("", "none") else None,
        check_host_ip=_yes(setting("checkhostip")),
        least_rsa_bits=int(size) if (size := setting("requiredrsasize")).isdigit() else 1024,
        connect_timeout_s=float(timeout) if timeout.isdigit() and int(timeout) > 0 else None,
        address_family=setting("addressfamily", "any"),
        password_allowed=_yes(setting("passwordauthentication", "yes")) and (not preferred or "password" in preferred),
        public_key_allowed=_yes(setting("pubkeyauthentication", "yes")) and (not preferred or "publickey" in preferred),
        proxy_command=_expand(host, command, tokens) if command not in ("", "none") and not jump else None,
        jumps=_jumps(host, jump, options, jumps_left) if jump not in ("", "none") else (),
        algorithms=tuple(
            (key, _algorithms(key, setting(key)))
            for key in ("ciphers", "macs", "kexalgorithms", "hostkeyalgorithms", "pubkeyacceptedalgorithms")
            if setting(key)
        ),
    )


def _algorithms(option: str, value: str) -> tuple[str, ...]:
    """Return the names of a list; if the user chose no key exchanges, newer ones than this ssh knows come first."""
    names = tuple(value.split(","))
    if option != "kexalgorithms" or [value] != _defaults().get(option):
        return names
    return (*(name for name in NEWER_KEX if name not in names), *names)


def _ask(alias: str, options: Options, host: str) -> dict[str, list[str]]:
    """Return the answer of ``ssh -G``: every option in lower case with its values."""
    argv = ["ssh", "-G", *(argument for _, arguments in options for argument in arguments), "--", alias]
    try:
        done = process.run(argv, timeout_s=_SSH_G_TIMEOUT_S)
    except UsageError:
        raise UsageError(
            "ssh is not installed on this machine, and Ansible needs it too: apt-get install openssh-client"
        ) from None
    if done.rc != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        complaint = next((line for line in lines if not line.startswith("usage")), "no reason reported")
        argument = complaint.rstrip(".").rpartition(" ")[2].strip("\"'")
        raise UsageError(f"host {host}: ssh rejects {_origin(options, argument)}: {complaint}")
    answer: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        answer.setdefault(key.lower(), []).append(value)
    if answer.get("host", [alias])[0].lower() != alias.lower():
        argument = answer["host"][0]
        raise UsageError(f"host {host}: {argument} in {_origin(options, argument)} is not a valid ssh option")
    return answer


def _origin(options: Options, *arguments: str) -> str:
    """Return the variable that contains one of ``arguments``."""
    for variable, words in options:
        if any(argument and argument.lower() in " ".join(words).lower() for argument in arguments):
            return variable
    return "the SSH configuration (~/.ssh/config, /etc/ssh/ssh_config)"


@cache
def _defaults() -> Mapping[str, list[str]]:
    return _ask("defaults", [("gpunode", ["-F", "none"])], "defaults")


def _refuse_what_is_not_honoured(host: str, answer: Mapping[str, list[str]], options: Options) -> None:
    for key, values in answer.items():
        if key in HONOURED or key in WITHOUT_EFFECT or values == _defaults().get(key) or values == ["none"]:
            continue
        raise UsageError(
            f"host {host}: gpunode does not support the SSH option {key} {values[0]!r} from "
            f"{_origin(options, key, values[0])}; remove it there"
        )


def _jumps(host: str, jump: str, options: Options, jumps_left: int) -> tuple[SshSettings, ...]:
    """Return the chain of ProxyJump. A jump host gets its settings as in ssh: only from the configuration files (and
    ``-F``), not from the other options of its target.
    """
    if jumps_left == 0:
        raise UsageError(f"host {host}: more than {MAX_JUMPS} jump hosts, or a loop of ProxyJump ({jump})")
    before, _, last = jump.rpartition(",")
    user, name, port = split_destination(last)
    arguments = [*_config_file(options)]
    if user:
        arguments += ["-l", user]
    if port:
        arguments += ["-p", str(port)]
    if before:
        arguments += ["-J", before]
    hop = _resolve(name, [("ProxyJump", arguments)], f"{host} (jump host {name})", jumps_left - 1)
    return (*hop.jumps, replace(hop, jumps=()))


def _config_file(options: Options) -> list[str]:
    arguments = [argument for _, group in options for argument in group]
    for index, argument in enumerate(arguments):
        if argument == "-F" and index + 1 < len(arguments):
            return ["-F", arguments[index + 1]]
        if argument.startswith("-F") and len(argument) > 2:
            return [argument]
    return []


def split_destination(text: str) -> tuple[str | None, str, int | None]:
    """Parse ``[user@]host[:port]``, ``[user@][v6]:port``, ``ssh://…`` to (user, host, port); raise UsageError for
    others.
    """
    rest = text.removeprefix("ssh://").rstrip("/")
    user, at, rest = rest.rpartition("@") if "@" in rest else ("", "", rest)
    match = re.fullmatch(r"\[(?P<v6>[^\]]+)\](?::(?P<p6>\d+))?|(?P<bare>[^:\s]+)(?::(?P<port>\d+))?", rest)
    if match is None and rest.count(":") > 1 and re.fullmatch(r"[0-9a-fA-F:.]+(%\w+)?", rest):
        return (user or None, rest, None)
    if match is None or (at and not user) or rest.startswith("-"):
        raise UsageError(f"{text!r} is not a valid destination: write HOST, USER@HOST or USER@HOST:PORT")
    port = match["p6"] or match["port"]
    if port and not 0 < int(port) < 65536:
        raise UsageError(f"{text!r}: {port} is not a valid port")
    return (user or None, match["v6"] or match["bare"], int(port) if port else None)


def _yes(value: str) -> bool:
    return value.lower() in ("yes", "true", "unbound", "host-bound")


def _strictness(value: str) -> str:
    return {"true": "yes", "yes": "yes", "false": "no", "no": "no", "off": "no"}.get(value.lower(), value.lower())


def _agent(host: str, value: str, tokens: Mapping[str, str]) -> str | None:
    if value in ("", "SSH_AUTH_SOCK"):
        return None
    if value.startswith("$"):
        return os.environ.get(value.strip("${}"), "none")
    return value if value == "none" else _path(host, value, tokens)


def _path(host: str, value: str, tokens: Mapping[str, str]) -> str:
    text = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), value.strip('"'))
    # As ssh does it: the home of the user database, whatever HOME is.
    return str(Path(re.sub(r"^~(?=/|$)", lambda _: home(), _expand(host, text, tokens))).expanduser())


def home() -> str:
    """Return the user's home directory as ssh has it."""
    return pwd.getpwuid(os.getuid()).pw_dir


def _tokens(alias: str, hostname: str, port: int, user: str) -> dict[str, str]:
    """Return the percent tokens of ssh_config(5), except hashes (%C) and those of host keys (%H, %I, %K, %t, %f)."""
    local = socket.gethostname()
    me = pwd.getpwuid(os.getuid())
    return {
        "%": "%",
        "d": me.pw_dir,
        "h": hostname,
        "i": str(me.pw_uid),
        "k": alias,
        "L": local.partition(".")[0],
        "l": local,
        "n": alias,
        "p": str(port),
        "r": user,
        "u": me.pw_name,
    }


def _expand(host: str, text: str, tokens: Mapping[str, str]) -> str:
    def token(match: re.Match[str]) -> str:
        if match[1] not in tokens:
            raise UsageError(f"host {host}: unknown token {match[0]} in the SSH configuration")
        return tokens[match[1]]

    return re.sub(r"%(.)", token, text)
