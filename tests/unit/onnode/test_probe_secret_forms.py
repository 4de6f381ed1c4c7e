"""Secrets in every form and container: a grammar of both, of which no word survives and the settings around them do."""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpunode.onnode import probe as script

sys.path.append(str(Path(__file__).parents[2]))

from effort import effort

NAMES = ["password", "db_password", "DB_PASS", "token", "api_key", "wifi.psk", "client_secret", "private_key", "auth"]
KEY_KINDS = ["RSA ", "EC ", "OPENSSH ", "ENCRYPTED ", "DSA ", "", "SSH2 ENCRYPTED ", "PGP "]


def word(chance: random.Random) -> str:
    """One word of a secret: every one contains CANARY."""
    rest = "".join(chance.choices("aZ09+/=_.,-~!@%^*", k=chance.randint(0, 20)))
    return f"x{rest}CANARY{chance.randint(0, 99)}"


def words(chance: random.Random, most: int = 4) -> list[str]:
    return [word(chance) for _ in range(chance.randint(1, most))]


def private_key(chance: random.Random) -> list[str]:
    """The lines of a private key, at times with headers and dashes, at times cut off."""
    kind = chance.choice(KEY_KINDS)
    dashes, blank = ("----", " ") if "SSH2" in kind else ("-----", "")
    block = " BLOCK" if kind == "PGP " else ""
    headers = {
        "PGP ": ["Version: GnuPG v2 - CANARY", "Comment: a-b --- CANARY", ""],
        "RSA ": ["Proc-Type: 4,ENCRYPTED", "DEK-Info: AES-128-CBC,CANARY-1", ""],
    }
    body = ["CANARY" + "".join(chance.choices("aZ09+/=", k=58)) for _ in range(chance.randint(1, 5))]
    lines = [f"{dashes}{blank}BEGIN {kind}PRIVATE KEY{block}{blank}{dashes}"]
    lines += chance.choice([[], headers.get(kind, [])]) + body + (["=CANA", "=CANARY"] if block else [])
    return [*lines, f"{dashes}{blank}END {kind}PRIVATE KEY{block}{blank}{dashes}"]


def putty(_chance: random.Random) -> list[str]:
    head = ["PuTTY-User-Key-File-3: ssh-ed25519", "Encryption: none", "Comment: x", "Public-Lines: 1", "AAAA"]
    return [*head, "Private-Lines: 2", "CANARY", "CANARY", "Private-MAC: 0123CANARY"]


def toml_folded(name: str, chance: random.Random) -> str:
    return f'{name} = """\\\n    ' + " \\\n    ".join(words(chance)) + '"""'


def yaml_block(name: str, chance: random.Random) -> str:
    mark = chance.choice(["|", ">", "|-", ">+", "|2", "| "])
    lines = [f"{' ' * chance.choice([0, 0, 2])}{' '.join(words(chance))}" for _ in range(chance.randint(1, 3))]
    return f"{name}: {mark}\n" + chance.choice(["\n", "\n\n"]).join("  " + line for line in lines)


# Containers: text of one setting, from a name.
CONTAINERS: dict[str, Callable[[str, random.Random], str]] = {
    "one word": lambda name, chance: (
        f"{name}{chance.choice(['=', ' = ', ': ', ' : ', chr(9) + '=' + chr(9)])}{word(chance)}"
    ),
    "several words": lambda name, chance: f"{name}{chance.choice([' = ', ': '])}{' '.join(words(chance))}",
    "continued line": lambda name, chance: f"{name}={word(chance)}\\\n{word(chance)}\\\n{word(chance)}",
    "continued after the sign": lambda name, chance: f"{name} = \\\n  {' '.join(words(chance))}",
    "indented lines": lambda name, chance: f"{name} = {word(chance)}\n  " + "\n  ".join(words(chance)),
    "lines of their own": lambda name, chance: f"{name}:\n    " + "\n    ".join(words(chance)),
    "double quotes": lambda name, chance: f'{name} = "{" ".join(words(chance))} \\" {word(chance)}"',
    "single quotes": lambda name, chance: f"{name}: '{' '.join(words(chance))}'",
    "quotes over lines": lambda name, chance: f'{name}="' + "\n".join(words(chance)) + '"',
    "TOML lines": lambda name, chance: (
        f'{name} = """' + chance.choice(["", "\n"]) + '\n"" '.join(words(chance)) + '"""'
    ),
    "TOML literal lines": lambda name, chance: f"{name} = '''\n" + "\n' ".join(words(chance)) + "\n'''",
    "TOML folded": toml_folded,
    "TOML without an end": lambda name, chance: f'{name} = """\n' + "\n".join(words(chance)),
    "TOML list": lambda name, chance: f"{name} = [\n" + "".join(f"    '{each}',\n" for each in words(chance)) + "]",
    "YAML block": yaml_block,
    "YAML list": lambda name, chance: f"{name}:\n" + "\n".join(f"- {each}" for each in words(chance)),
    "YAML indented list": lambda name, chance: f"{name}:\n" + "\n".join(f"  - {each}" for each in words(chance)),
    "YAML table": lambda name, chance: f"{name}:\n  first: {word(chance)}\n  second:\n    third: {word(chance)}",
    "shell": lambda name, chance: f"export {name}='{' '.join(words(chance))}'\"'\"'{word(chance)} x'",
    "shell, escaped": lambda name, chance: f"{name}='{word(chance)}'\\''{word(chance)} {word(chance)}'",
    "shell, C quotes": lambda name, chance: f"{name}=$'{' '.join(words(chance))}'",
    "quotes around both": lambda name, chance: f'Environment="{name}={" ".join(words(chance))}"',
    "single quotes around both": lambda name, chance: f"run -e '{name}={' '.join(words(chance))}' image",
    "JSON": lambda name, chance: json.dumps(
        {name: " ".join(words(chance))}, separators=chance.choice([(",", ":"), None])
    ),
    "JSON text in lines": lambda name, chance: json.dumps({name: "\n".join(words(chance))}),
    "JSON, indented": lambda name, chance: json.dumps(
        {"a": {name: words(chance), "x": 1}}, indent=chance.choice([1, 4, 8])
    ),
    "JSON, value below": lambda name, chance: f'{{"{name}":\n      "{" ".join(words(chance))}"}}',
    "arguments": lambda name, chance: (
        f"tool --{name} {chance.choice([chr(34), chr(39)]).join(['', ' '.join(words(chance)), ''])}"
    ),
    "argument": lambda name, chance: f"tool --{chance.choice(['', 'x-', 'my_'])}{name} {word(chance)}",
    "list of arguments": lambda name, chance: json.dumps(
        ["x", f"--{name}", " ".join(words(chance))], indent=chance.choice([None, 6])
    ),
    "one argument": lambda name, chance: json.dumps(["x", f"--{name}={' '.join(words(chance))}"]),
    "apt": lambda name, chance: f'Acquire::{name} "{" ".join(words(chance))}";',
}
SETTINGS = {"TOML without an end"}
"""Containers after which nothing is left."""


def around(chance: random.Random, lines: str, *, kept: bool) -> str:
    """The text between other settings: indented as a whole, in lines that end with a carriage return, in a comment."""
    blank = chance.choice(["", "", "  ", "\t", "      "])
    text = "".join(f"{blank}{line}\n" for line in ["before = kept-1", *lines.split("\n"), *(["after = kept-2"] * kept)])
    return text.replace("\n", "\r\n") if chance.random() < 0.3 else text


@pytest.mark.parametrize("container", CONTAINERS)
def test_no_word_of_a_named_secret_survives(container: str) -> None:
    chance = random.Random(container)  # noqa: S311
    ends = container in SETTINGS
    for _ in range(effort(40, 4000)):
        text = around(chance, CONTAINERS[container](chance.choice(NAMES), chance), kept=not ends)
        covered = script.scrub(text)
        assert "CANARY" in text
        assert "CANARY" not in covered, text
        assert "***" in covered
        assert "before = kept-1" in covered
        assert ends or "after = kept-2" in covered, text
        assert script.scrub(covered) == covered


@pytest.mark.parametrize(
    "wrap",
    [
        "\n".join,
        "\r\n".join,
        lambda lines: "\n".join("    " + line for line in lines),
        lambda lines: "\n".join("# " + line for line in lines),
        lambda lines: "data: |\n" + "\n".join("  " + line for line in lines),
        lambda lines: "x = '''\n" + "\n".join(lines) + "'''",
        lambda lines: json.dumps({"data": "\n".join(lines)}),
        lambda lines: json.dumps({"data": lines}, indent=2),
        lambda lines: 'K="' + "\\n".join(lines) + '"',
        lambda lines: "x" + " ".join(lines),
    ],
)
@pytest.mark.parametrize("form", [private_key, putty])
def test_no_line_of_a_private_key_survives(
    form: Callable[[random.Random], list[str]], wrap: Callable[[list[str]], str]
) -> None:
    chance = random.Random(1)  # noqa: S311
    for _ in range(effort(30, 2000)):
        lines = form(chance)
        cut = chance.random() < 0.2
        lines = lines[: chance.randint(2, len(lines) - 1)] if cut else lines
        text = around(chance, wrap(lines), kept=True)
        covered = script.scrub(text)
        assert "CANARY" not in covered, text
        assert "***" in covered
        assert "before = kept-1" in covered
        assert cut or "after = kept-2" in covered, text
        assert script.scrub(covered) == covered


@pytest.mark.timeout(120)
def test_covering_takes_linear_time_on_rubbish_of_several_lines() -> None:
    for unit in (
        'password="""',
        "password='''\n",
        "password: |\n ",
        "password:\n",
        "password:\n  ",
        "password:\n- ",
        "password = x\n  ",
        "password = x\\\n",
        "password='x'\\'",
        '"password=x ',
        "password=$'",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n",
        "PuTTY-User-Key-File-2:",
        "password: |\n" + " x\n" * 50,
    ):
        text = unit * (50_000 // len(unit))
        started = time.process_time()
        script.scrub(text)
        assert time.process_time() - started < 2, unit
