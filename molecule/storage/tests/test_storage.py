"""A refusal left nothing behind."""

from testinfra.host import Host


def test_a_refusal_left_nothing_behind(host: Host) -> None:
    with host.sudo():
        assert host.run("cmp /etc/fstab /root/fstab-before").rc == 0
        for path in ("/etc/gpunode/storage.json", "/var/lib/gpunode/storage", "/data", "/scratch"):
            assert not host.file(path).exists
        assert not host.package("nfs-common").is_installed
