"""Mounts of S3 as the role storage writes them into fstab, by rclone and s3fs, from a real server on loopback (moto).

A mount helper is run as mount(8) runs it: with source, folder and the options of fstab that are not systemd's, and
without the environment. The files are read cold and hot by the payload, and staged.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import run_program

from gpunode.cli import run as gpunode
from gpunode.provisioning.storage_mounts import Remote, remote_mount
from gpunode.workload.payload import pipeline

SERVER = os.environ.get("GPUNODE_MOTO_PYTHON")
MISSING = [name for name in ("rclone", "s3fs", "fusermount3", "findmnt") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(SERVER is None, reason="GPUNODE_MOTO_PYTHON names no Python with the S3 server moto"),
    pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="no FUSE here"),
    pytest.mark.timeout(300),
]
KEYS = ("test-key-id", "test-secret")
FILES = 30
SIZE = 200_000
UPLOAD = """\
import boto3, random, sys
client = boto3.client("s3", endpoint_url=sys.argv[1], region_name="us-east-1",
    aws_access_key_id=sys.argv[2], aws_secret_access_key=sys.argv[3])
client.create_bucket(Bucket="train")
for number in range(int(sys.argv[4])):
    body = random.Random(number).randbytes(int(sys.argv[5]))
    client.put_object(Bucket="train", Key=f"set/{number}.bin", Body=body)
"""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a bucket; its requests are in a log."""
    port = free_port()
    log = tmp_path_factory.mktemp("s3") / "log"
    with log.open("wb") as output:
        argv = [str(SERVER), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        url = f"http://127.0.0.1:{port}"
        done = run_program([SERVER, "-c", UPLOAD, url, *KEYS, str(FILES), str(SIZE)], limit_s=120)
        assert done.returncode == 0, done.stderr
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@pytest.fixture(params=["rclone", "s3fs"])
def mounted(request: pytest.FixtureRequest, endpoint: str, tmp_path: Path) -> Iterator[Path]:
    """The bucket, mounted by the helper with the line that the role writes."""
    kind = request.param
    folder, cache = tmp_path / "mount", tmp_path / "cache"
    folder.mkdir()
    cache.mkdir(mode=0o700)
    if kind == "rclone":
        config = tmp_path / "rclone.conf"
        config.write_text(
            f"[s3]\ntype = s3\nprovider = Other\nenv_auth = false\naccess_key_id = {KEYS[0]}\n"
            f"secret_access_key = {KEYS[1]}\nendpoint = {endpoint}\nregion = us-east-1\n"
        )
        config.chmod(0o600)
        options, source, more = ["ro", f"config={config}"], "s3:train/set", {"cache_gib": 1}
        helper = tmp_path / "mount.rclone"
        helper.symlink_to(str(shutil.which("rclone")))
    else:
        secret = tmp_path / "passwd-s3fs"
        secret.write_text(":".join(KEYS))
        secret.chmod(0o600)
        options = ["ro", f"passwd_file={secret}", f"url={endpoint}", "use_path_request_style"]
        source, more, helper = "train:/set", {}, Path(str(shutil.which("s3fs")))
    remote = Remote.model_validate(
        {"path": "/data", "type": kind, "source": source, "options": options, "cache": "/scratch/cache", **more}
    )
    line = remote_mount(remote, None)
    # The paths of this test in place of those of a node, and without what systemd and mount(8) keep for themselves.
    kept = [word.replace("/scratch/cache", str(cache)) for word in line.options if not word.startswith("x-systemd.")]
    words = ",".join(word for word in kept if word not in ("nofail", "_netdev"))
    argv = [helper, line.source, folder, "-o", words]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(word) for word in argv], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and not folder.is_mount():
            time.sleep(0.2)
        assert folder.is_mount(), (tmp_path / "log").read_text()
        yield folder
    finally:
        run_program(["fusermount3", "-u", "-z", folder], limit_s=30)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def test_a_bucket_is_read_cold_and_hot_and_staged(mounted: Path, tmp_path: Path) -> None:
    paths = sorted(mounted.glob("*.bin"))
    assert len(paths) == FILES
    with pytest.raises(OSError, match="Read-only"):
        (mounted / "new").write_text("x")
    values = pipeline.run(str(mounted), None, 0, 1.0)
    assert values["remote"] is True
    assert values["filesystem"] in ("fuse.rclone", "fuse.s3fs")
    assert (values["files"], values["read_files"]) == (FILES, FILES)
    assert values["failed"] == 0
    rates = {(row["state"], row["threads"]): row["gb_per_s"] for row in values["reads"]}
    assert rates[("hot", 16)] > 0

    # The cache of the client is on this disk: later reads ask the server for nothing.
    cached = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert cached >= FILES * SIZE

    assert gpunode(["stage", "-q", str(mounted), str(tmp_path / "local"), "--name", "set"]) == 0
    for path in paths:
        assert (tmp_path / "local" / "set" / path.name).read_bytes() == path.read_bytes()
