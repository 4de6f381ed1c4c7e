"""Paramiko's transport, within the limits of OpenSSH."""

import socket
import struct

import paramiko
import pytest

from gpunode.fleet.connection import _limit_packets


@pytest.mark.parametrize("size", [(1 << 18) + 2052, (1 << 24) + 4, (1 << 31) + 4, (1 << 32) - 4])
def test_a_packet_larger_than_sshs_is_refused_before_it_is_read(size: int) -> None:
    local_end, remote_end = socket.socketpair()
    with local_end, remote_end:
        remote_end.sendall(b"SSH-2.0-node\r\n" + struct.pack(">I", size) + b"\x04\x14\x00\x00" + bytes(1 << 16))
        transport = paramiko.Transport(local_end)
        _limit_packets(transport)
        try:
            with pytest.raises(paramiko.SSHException, match="bytes announced"):
                transport.start_client(timeout=20)
        finally:
            transport.close()
