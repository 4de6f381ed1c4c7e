"""A minimal script with only Fabric: ``plain_fabric.py SSH_CONFIG COMMAND HOST...``, 32 hosts at a time."""

import sys
from concurrent.futures import ThreadPoolExecutor

from fabric import Config, Connection


def answer(connection: Connection, command: str) -> str:
    """Return the output of one host."""
    with connection:
        output: str = connection.run(command, hide=True, in_stream=False).stdout
        return output


def main() -> None:
    path, command, *hosts = sys.argv[1:]
    config = Config(runtime_ssh_path=path)
    # As Fabric's groups do: a Config that several threads read at once loses its keys.
    connections = [Connection(host, config=config) for host in hosts]
    with ThreadPoolExecutor(max_workers=32) as pool:
        for output in pool.map(lambda connection: answer(connection, command), connections):
            sys.stdout.write(output)


if __name__ == "__main__":
    main()
