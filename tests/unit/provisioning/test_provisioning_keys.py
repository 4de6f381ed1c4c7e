"""What a node trusts of a repository's key file: the pinned key alone, judged by gpg, apt and rpm, whatever came."""

import base64
import hashlib
import random
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from effort import effort

from gpunode.catalog import load as catalog
from gpunode.provisioning.keys import (
    KeyRefusedError,
    armored,
    key_of_file,
    packets_of,
    public_keys,
    trusted_key,
    without_keys,
)

URL = "https://download.docker.com/linux/debian/gpg"
BEGIN, END = "-----BEGIN PGP PUBLIC KEY BLOCK-----", "-----END PGP PUBLIC KEY BLOCK-----"
needs_gpg = pytest.mark.skipif(shutil.which("gpg") is None, reason="no gpg on this machine: apt-get install gnupg")


def run(*words: object, code: int | None = 0) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, check=False, timeout=120)
    assert code is None or done.returncode == code, done.stderr.decode("utf-8", "replace")
    return (done.stdout + done.stderr).decode("utf-8", "replace")


@dataclass(frozen=True)
class Keys:
    """Keys that gpg made: name to fingerprint and to binary packets."""

    home: Path
    fingerprints: dict[str, str]
    packets: dict[str, bytes]

    def gpg(self, *words: object) -> bytes:
        """The output of gpg with the secret keys."""
        argv = ["gpg", "--homedir", self.home, "--batch", "--quiet", "--yes", "--pinentry-mode", "loopback"]
        argv += ["--passphrase", "", *words]
        return subprocess.run([str(word) for word in argv], check=True, capture_output=True, timeout=60).stdout


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    """The publisher's key with a signing subkey, as Docker's, and a foreign one; and a key of another algorithm."""
    home = tmp_path_factory.mktemp("gnupg")
    home.chmod(0o700)
    made = Keys(home, {}, {})
    for name, kind in (("pinned", "rsa2048"), ("foreign", "rsa2048"), ("curve", "ed25519")):
        made.gpg("--quick-generate-key", f"{name} <{name}@example.com>", kind, "sign", "never")
        listing = made.gpg("--with-colons", "--list-keys", f"{name}@example.com").decode().splitlines()
        made.fingerprints[name] = next(line.split(":")[9] for line in listing if line.startswith("fpr:"))
        if name != "curve":
            made.gpg("--quick-add-key", made.fingerprints[name], "rsa2048", "sign", "never")
        made.packets[name] = made.gpg("--export", made.fingerprints[name])
    yield made
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False, timeout=30)


def block(data: bytes, rng: random.Random, wrapped: int = 64) -> str:
    """An armored block as gpg writes it, or with one of the liberties that some reader takes."""
    body = "\n".join(textwrap.wrap(base64.b64encode(data).decode(), wrapped))
    check = armored(data).splitlines()[-2]
    headers = rng.choice(["", "Version: GnuPG v2.0.22\n", "Comment: a\nVersion: b\n", "Version\n", " \n"])
    begin = BEGIN + rng.choice(["", "", " ", "\t", "  \t", "\r"])
    blank = rng.choice(["\n", "\n", " \n", "\t\n", "\n\n"])
    check = rng.choice([check, check, "", "=AAAA", f"{check}\n{check}"])
    text = f"{begin}\n{headers}{blank}{body}\n{check}\n{END}{rng.choice(['', ' ', 'x'])}\n"
    return rng.choice([text, text, text.replace("\n", "\r\n"), text.replace("-----", "- -----", 1), text[:-40]])


def as_subkey(packets: bytes) -> bytes:
    """A key with its primary key written as a subkey: nobody has signed that it belongs to the key before it."""
    first = next(packets_of(packets))
    return b"\xce\xff" + len(first[2]).to_bytes(4, "big") + first[2] + packets[len(first[1]) :]


def hostile_file(keys: Keys, rng: random.Random) -> bytes:
    """A file with the pinned key and a foreign one, in a form that readers may disagree on."""
    pinned, foreign = keys.packets["pinned"], keys.packets["foreign"]
    subkey = as_subkey(foreign)
    bound = b"".join(whole for tag, whole, body in packets_of(pinned) if tag == 2 and body[1] == 0x18)
    data = [
        pinned,
        foreign,
        pinned + foreign,
        foreign + pinned,
        pinned + subkey,
        pinned + subkey + bound,
        subkey + pinned,
    ]
    binary = rng.choice(data)
    if rng.random() < 0.1:
        return binary
    noise = ["", "", "\n", "junk\n", "Version: 1\n", f"{BEGIN}\n", f"{END}\n", "-----BEGIN PGP SIGNED MESSAGE-----\n\n"]
    noise += ["".join(f"Version{line}\n" for line in block(foreign, rng).splitlines())]
    parts = [rng.choice(noise)]
    for packet in rng.sample([pinned, foreign, binary], rng.randint(1, 3)):
        parts += [block(packet, rng, rng.choice([64, 76, 4000])), rng.choice(noise)]
    text = "".join(parts)
    if rng.random() < 0.2:
        lines = text.splitlines(keepends=True)
        lines.insert(rng.randrange(len(lines)), rng.choice([*noise, *lines]))
        text = "".join(lines)
    return text.encode()


def written(data: bytes, fingerprint: str) -> str | None:
    """What a node gets of a file; None if the file is refused."""
    try:
        return trusted_key(data, URL, [fingerprint])
    except KeyRefusedError:
        return None


@needs_gpg
def test_a_foreign_key_is_never_written_beside_the_pinned_one(keys: Keys, tmp_path: Path) -> None:
    """gpgv is what apt verifies with; it reads the keyring that apt makes of the file."""
    message = tmp_path / "message"
    message.write_text("packages\n")
    foreign = tmp_path / "foreign.sig"
    keys.gpg("--local-user", keys.fingerprints["foreign"], "--output", foreign, "--detach-sign", message)
    # The foreign primary key can be a subkey of the pinned one if a verifier does not look at who bound it.
    primary = tmp_path / "primary.sig"
    keys.gpg("--local-user", f"{keys.fingerprints['foreign']}!", "--output", primary, "--detach-sign", message)
    pinned = tmp_path / "pinned.sig"
    keys.gpg("--local-user", keys.fingerprints["pinned"], "--output", pinned, "--detach-sign", message)
    rng = random.Random(28)  # noqa: S311
    texts = {written(hostile_file(keys, rng), keys.fingerprints["pinned"]) for _ in range(effort(400, 20_000))}
    assert {None} < texts, "the generator makes both files that are refused and files that are reduced"
    expected = trusted_key(keys.packets["pinned"], URL, [keys.fingerprints["pinned"]])
    for text in texts - {None}:
        assert text is not None
        (tmp_path / "key.gpg").write_bytes(base64.b64decode("".join(text.splitlines()[2:-2])))
        gpgv = ("gpgv", "--homedir", tmp_path, "--keyring", tmp_path / "key.gpg")
        for signature, code in ((foreign, 2), (primary, 2), (pinned, 0)):
            run(*gpgv, signature, message, code=code if signature != pinned or text == expected else None)
        listing = run("gpg", "--homedir", tmp_path, "--show-keys", "--with-colons", tmp_path / "key.gpg")
        fingerprints = [line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:")]
        assert fingerprints[0] == keys.fingerprints["pinned"]
        assert set(fingerprints) <= set(_fingerprints(keys, "pinned"))
    assert expected in texts


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A key with packets that have other lengths, are cut off, or are other bytes."""
    packets = list(packets_of(data))
    tag, _, body = packets.pop(at := rng.randrange(len(packets)))
    body = rng.choice([body, body, body + bytes(rng.choice([1, 0xFFFF, 0x10000])), body[: rng.randrange(len(body))]])
    length = rng.choice([len(body), len(body), len(body) + 1, 0, 0xFFFF, 0xFFFFFFFF])
    heads = [bytes([0xC0 | tag, 255]) + length.to_bytes(4, "big"), bytes([0x80 | (tag & 15) << 2 | 3])]
    heads += [bytes([0xC0 | tag, rng.randrange(192, 256)]), bytes([rng.randrange(256)]), b""]
    packets.insert(at, (tag, rng.choice(heads[:1] * 3 + heads[1:]) + body, body))
    whole = b"".join(packet for _, packet, _ in packets)
    return whole[: rng.randrange(len(whole))] if rng.random() < 0.3 else whole


@needs_gpg
def test_damaged_keys_are_refused_or_the_pinned_one(keys: Keys) -> None:
    rng, pinned = random.Random(30), keys.fingerprints["pinned"]  # noqa: S311
    refused = 0
    for _ in range(effort(500, 20_000)):
        data = damaged(keys.packets["pinned"], rng)
        text = written(data, pinned)
        refused += text is None
        assert text is None or [key.fingerprint for key in public_keys(text.encode())] == [pinned]
        with suppress(ValueError, IndexError):
            assert without_keys(keys.packets["foreign"] + data, [pinned]).startswith(keys.packets["foreign"])
    assert refused > 100


@needs_gpg
def test_one_key_leaves_a_keyring_as_gpg_does_it(keys: Keys) -> None:
    everything = b"".join(keys.packets.values())
    for name, packets in keys.packets.items():
        assert without_keys(everything, [keys.fingerprints[name]]) == everything.replace(packets, b"")
    assert without_keys(everything, ["0" * 40]) == everything


def _fingerprints(keys: Keys, name: str) -> list[str]:
    listing = keys.gpg("--with-colons", "--list-keys", keys.fingerprints[name]).decode().splitlines()
    return [line.split(":")[9] for line in listing if line.startswith("fpr:")]


def bypasses(keys: Keys) -> dict[str, bytes]:
    """Files that a node once got as a whole, with the foreign key in them."""
    pinned, foreign = (armored(keys.packets[name]) for name in ("pinned", "foreign"))
    return {
        "a blank behind the second armor line": (pinned + foreign.replace(f"{BEGIN}\n", f"{BEGIN} \n")).encode(),
        "a tab behind the second armor line": (pinned + foreign.replace(f"{BEGIN}\n", f"{BEGIN}\t\n")).encode(),
        "a subkey that nobody bound": armored(keys.packets["pinned"] + as_subkey(keys.packets["foreign"])).encode(),
    }


@needs_gpg
def test_apt_trusts_a_repository_of_the_pinned_key_alone(keys: Keys, tmp_path: Path) -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("no apt-get on this machine")
    trusts = apt_with(keys, tmp_path)
    for name, data in bypasses(keys).items():
        text = written(data, keys.fingerprints["pinned"])
        assert text is not None, name
        assert (trusts(text, "foreign"), trusts(text, "pinned")) == (False, True), name
    # The judge sees the difference: this key is trusted if it is in the file.
    assert trusts(armored(keys.packets["foreign"]), "foreign")


def apt_with(keys: Keys, folder: Path) -> Callable[[str, str], bool]:
    """Return a function that returns whether apt accepts a repository signed by a key, with this text as Signed-By."""
    repository = folder / "repository"
    repository.mkdir()
    packages = b"Package: docker-ce\nVersion: 99\nArchitecture: all\nFilename: ./x.deb\nSize: 1\n"
    (repository / "Packages").write_bytes(packages)
    sums = run("sha256sum", repository / "Packages").split()[0]
    release = f"Suite: x\nDate: {run('date', '-Ru').strip()}\nSHA256:\n {sums} {len(packages)} Packages\n"
    for name in ("state/lists/partial", "cache/archives/partial", "etc", "state/dpkg"):
        (folder / name).mkdir(parents=True)
    (folder / "state/dpkg/status").touch()
    (folder / "apt.conf").write_text(
        f'Dir "{folder}";\nDir::Etc "etc";\nDir::State "state";\nDir::State::status "{folder}/state/dpkg/status";\n'
        'Dir::Cache "cache";\nDir::Etc::sourcelist "sources.list";\nAPT::Sandbox::User "root";\n'
    )
    (folder / "etc/sources.list").write_text(f"deb [signed-by={folder}/key.asc] file:{repository} ./\n")

    def trusts(text: str, name: str) -> bool:
        (repository / "Release").write_text(release)
        user = keys.fingerprints[name]
        keys.gpg("--local-user", user, "--output", repository / "InRelease", "--clear-sign", repository / "Release")
        (folder / "key.asc").write_text(text)
        shutil.rmtree(folder / "state/lists")
        (folder / "state/lists/partial").mkdir(parents=True)
        run("env", f"APT_CONFIG={folder}/apt.conf", "apt-get", "update", code=None)
        # A warning of apt names the folder, and a number of pytest in it may contain 99.
        policy = run("env", "LC_ALL=C", f"APT_CONFIG={folder}/apt.conf", "apt-cache", "policy", "docker-ce")
        return "Candidate: 99\n" in policy

    return trusts


@needs_gpg
def test_rpm_imports_the_pinned_key_alone(keys: Keys, tmp_path: Path) -> None:
    if shutil.which("rpmkeys") is None:
        pytest.skip("no rpmkeys on this machine: apt-get install rpm")

    def imported(name: str, text: bytes) -> list[str]:
        (tmp_path / "key.asc").write_bytes(text)
        base = ("--define", f"_dbpath {tmp_path / name}", "--define", "_keyring rpmdb")
        run("rpmkeys", *base, "--import", tmp_path / "key.asc", code=None)
        return run("rpm", *base, "-qa", "--qf", "%{version}\\n", "gpg-pubkey").split()

    pinned, foreign = (keys.fingerprints[name][-8:].lower() for name in ("pinned", "foreign"))
    for number, data in enumerate(bypasses(keys).values()):
        text = written(data, keys.fingerprints["pinned"])
        assert text is not None
        assert imported(f"ours{number}", text.encode()) == [pinned]
    assert foreign in imported("theirs", armored(keys.packets["foreign"]).encode())


@needs_gpg
def test_subkeys_stay_if_the_pinned_key_has_signed_them(keys: Keys) -> None:
    """Docker's repository is signed by a subkey."""
    pinned = keys.packets["pinned"]
    foreign = keys.packets["foreign"]
    for data in (pinned, pinned + as_subkey(foreign), pinned + foreign, foreign + pinned):
        text = trusted_key(data, URL, [keys.fingerprints["pinned"]])
        assert text == armored(pinned)
        (key,) = public_keys(text.encode())
        assert len(key.subkeys) == 1
    # Each byte of the binding matters.
    (key,) = public_keys(pinned)
    (body, (subkey, binding)) = key.subkeys[0]
    for at in (len(binding) - 1, len(binding) - 200, 20):
        damaged = binding[:at] + bytes([binding[at] ^ 1]) + binding[at + 1 :]
        text = trusted_key(b"".join([*key.packets, subkey, damaged]), URL, [key.fingerprint])
        assert public_keys(text.encode())[0].subkeys == [], at
    assert body in pinned


@dataclass(frozen=True)
class Binding:
    """A key that this test makes itself: each field of the signature that binds its subkey (RFC 4880, 5.2.3)."""

    version: int = 4
    kind: int = 0x18
    algorithm: int = 1
    primary: int = 1
    """The algorithm of the primary key; its numbers are those of RSA."""
    digest: int = 8
    hashed: int = 0
    unhashed: int = 0
    """Sizes of the two lists of subpackets."""
    more_bits: int = 0
    """How many bits more the number of the signature claims to have."""

    def packets(self) -> bytes:
        """Primary key, user id, user attribute, subkey and its binding."""
        secret = secret_key()
        public = secret.public_key().public_numbers()
        main = b"\x04" + bytes(4) + bytes([self.primary]) + number(public.n) + number(public.e)
        sub = b"\x04" + bytes(4) + b"\x01" + number(35) + number(3)
        head = bytes([self.version, self.kind, self.algorithm, self.digest])
        head += self.hashed.to_bytes(2, "big") + bytes(self.hashed)
        signed = b"".join(b"\x99" + len(body).to_bytes(2, "big") + body for body in (main, sub))
        signed += head + b"\x04\xff" + len(head).to_bytes(4, "big")
        value = int.from_bytes(secret.sign(signed, padding.PKCS1v15(), HASHES.get(self.digest, hashes.SHA256())), "big")
        signature = head + self.unhashed.to_bytes(2, "big") + bytes(self.unhashed) + b"\1\2"
        signature += number(value, self.more_bits)
        parts = ((6, main), (13, b"me"), (17, b"\1\1"), (14, sub), (2, signature))
        return b"".join(bytes([0xC0 | tag, 255]) + len(body).to_bytes(4, "big") + body for tag, body in parts)


@cache
def secret_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


HASHES: dict[int, hashes.HashAlgorithm] = {
    2: hashes.SHA1(),  # noqa: S303
    8: hashes.SHA256(),
    9: hashes.SHA384(),
    10: hashes.SHA512(),
    11: hashes.SHA224(),
}
"""By their numbers in OpenPGP (RFC 4880, 9.4)."""


def number(value: int, more_bits: int = 0) -> bytes:
    """A number as OpenPGP writes it (RFC 4880, 3.2)."""
    bits = value.bit_length()
    return (bits + more_bits).to_bytes(2, "big") + value.to_bytes((bits + 7) // 8, "big")


@pytest.mark.parametrize(
    "fields",
    [
        *({"digest": digest} for digest in HASHES),
        {"algorithm": 3, "primary": 3},
        {"primary": 2},
        {"hashed": 300, "unhashed": 7},
        {"hashed": 6, "unhashed": 300},
    ],
)
def test_a_subkey_stays_by_every_signature_of_rsa(fields: dict[str, int]) -> None:
    data = Binding(**fields).packets()
    (key,) = public_keys(data)
    assert trusted_key(data, URL, [key.fingerprint]) == trusted_key(data, URL) == armored(data)


@pytest.mark.parametrize(
    "fields",
    [
        *({"version": version} for version in (3, 5)),
        *({"kind": kind} for kind in (0x10, 0x19, 0x28)),
        *({"digest": digest} for digest in (1, 12)),
        *({"algorithm": algorithm} for algorithm in (0, 17)),
        *({"primary": primary} for primary in (4, 17)),
        {"more_bits": 8},
    ],
)
def test_a_subkey_goes_with_any_other_signature(fields: dict[str, int]) -> None:
    """Each of these is right but for one field."""
    data = Binding(**fields).packets()
    (key,) = public_keys(data)
    assert len(key.subkeys) == 1
    (kept,) = public_keys(trusted_key(data, URL, [key.fingerprint]).encode())
    assert (kept.packets, kept.subkeys) == (key.packets, [])


@needs_gpg
@pytest.mark.parametrize("name", ["pinned", "curve"])
def test_the_fingerprint_is_that_of_gpg(keys: Keys, name: str) -> None:
    fingerprint = keys.fingerprints[name]
    spaced = " ".join(fingerprint[start : start + 4] for start in range(0, 40, 4)).lower()
    text = armored(keys.packets[name])
    assert trusted_key(text.replace("\n", "\r\n").encode(), URL, [spaced]) == trusted_key(
        keys.packets[name], URL, [fingerprint]
    )
    assert text == keys.gpg("--armor", "--export", fingerprint).decode(), "the armor is that of gpg"
    assert trusted_key(text.encode(), "/etc/site.asc") == text, "a site's own key stays as a whole"


@needs_gpg
def test_another_key_is_refused_with_both_fingerprints(keys: Keys) -> None:
    with pytest.raises(KeyRefusedError) as raised:
        trusted_key(keys.packets["curve"], URL, [keys.fingerprints["pinned"]])
    assert all(keys.fingerprints[name] in str(raised.value) for name in ("curve", "pinned"))


@pytest.mark.parametrize("data", [b"", b"<html>proxy</html>", f"{BEGIN}\n\n!!\n".encode(), b"\x99\x02\x00\x04"])
@pytest.mark.parametrize("fingerprints", [(), ("0" * 40,)])
def test_what_is_not_a_key_is_refused(data: bytes, fingerprints: tuple[str, ...]) -> None:
    with pytest.raises(KeyRefusedError, match="no OpenPGP key"):
        trusted_key(data, URL, fingerprints)


def test_an_html_page_is_named() -> None:
    with pytest.raises(KeyRefusedError, match=f"{URL} contains no OpenPGP key but an HTML page"):
        trusted_key(b"\n<!DOCTYPE html><html>Please log in</html>", URL, ("0" * 40,))


def test_by_its_checksum_a_file_is_trusted_without_its_version_line_and_nothing_more() -> None:
    key = Binding().packets()
    text = armored(key)
    known = hashlib.sha256(text.encode()).hexdigest()
    for header in ("", "Version: GnuPG v2.0.22\n", "Version: a\nVersion: b\n"):
        data = text.replace("\n\n", f"\n{header}\n", 1).encode()
        assert trusted_key(data, URL, sha256=known) == text
    below = text.replace(f"\n{END}", f"\nVersion{armored(key[:-4]).splitlines()[2]}\n{END}")
    for data in (key, below.encode(), (text + text).encode(), text.replace("\n\n", "\nComment: a\n\n", 1).encode()):
        with pytest.raises(KeyRefusedError, match=r"has the checksum|contains no OpenPGP key:"):
            trusted_key(data, URL, sha256=known)


@pytest.mark.parametrize(("name", "why"), [("missing.asc", "No such file"), ("", "Is a directory")])
def test_a_key_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(KeyRefusedError, match=f"{tmp_path / name}: {why}.*set it to a file on the controller"):
        key_of_file(str(tmp_path / name))


def test_the_catalog_names_the_keys_of_both_repositories() -> None:
    toolkit = next(iter(catalog().container_toolkit.values()))
    docker = catalog().container_engines["docker"]
    fingerprints = [*docker.fingerprints, *docker.rpm_fingerprints, *toolkit.fingerprints]
    assert len(fingerprints) == 3
    assert all(len(name) == 40 for name in fingerprints)


def lengths_of(number: int, size: int) -> Iterator[bytes]:
    """Every way to write the head of a packet (RFC 4880, 4.2.1 and 4.2.2)."""
    new = bytes([0xC0 | number])
    if size < 192:
        yield new + bytes([size])
    if 192 <= size < 8384:
        yield new + bytes([(size - 192 >> 8) + 192, (size - 192) & 0xFF])
    yield new + b"\xff" + size.to_bytes(4, "big")
    yield from (
        bytes([0x80 | number << 2 | kind]) + size.to_bytes(1 << kind, "big")
        for kind in (0, 1, 2)
        if size < 1 << (8 << kind)
    )


@pytest.mark.parametrize("size", [0, 1, 191, 192, 255, 256, 447, 448, 8383, 8384, 70_000])
def test_packets_of_every_form_are_distinguished(size: int) -> None:
    body = bytes(number % 251 for number in range(size))
    for head in lengths_of(14, size):
        packet = head + body
        assert list(packets_of(packet + b"\xcd\x01x")) == [(14, packet, body), (13, b"\xcd\x01x", b"x")]
        if body:
            with pytest.raises(ValueError, match="cut short"):
                list(packets_of(packet[:-1]))


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (b"\xcd\xe0", "partial length"),
        (b"\xcd\xfe", "partial length"),
        (b"\x8f\x00", "indeterminate length"),
        (b"\x00\x00", "not OpenPGP"),
    ],
)
def test_packets_without_a_length_are_refused(first: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(packets_of(first + bytes(1 << 16)))


def test_packets_of_no_key_and_of_other_kinds_are_left_out() -> None:
    name, trust, key = b"\xcd\x01x", b"\xcc\x01\x00", b"\xc6\x01\x04"
    (public,) = public_keys(name + trust + key + trust + name)
    assert (public.packets, public.subkeys) == ([key, name], [])
