"""``gpunode parse``: convert one raw tool output to JSON."""

import json
import sys
from pathlib import Path

import click

from gpunode.catalog import load
from gpunode.cli.options import verbose_option
from gpunode.errors import UsageError
from gpunode.facts.errors import ParseError
from gpunode.facts.parsers.kinds import KINDS, decoded, parsed
from gpunode.facts.parsers.nvrm import XidMeaning
from gpunode.text import unknown


@click.command("parse")
@click.argument("kind", metavar="KIND")
@click.argument("file", metavar="FILE|-")
@verbose_option("Print the size and kind of the input on stderr.")
def command(*, kind: str, file: str, verbose: bool) -> int:
    """Parse the raw output of one tool (FILE, or - for stdin) and print it as one JSON document.

    Unknown values are null, keys contain the units. A failure reported by the tool is a result ({"error": ...}, exit
    0); truncated text or text of another kind is rejected (exit 2).

    \b
    Kinds:
      nvidia-smi-xml     nvidia-smi -q -x, drivers from 375 on
      nvidia-smi-q       nvidia-smi -q, also with -d, drivers 270 to 620
      nvidia-smi-table   nvidia-smi
      nvidia-smi-query   nvidia-smi --query-gpu=… --format=csv and the other queries
      nvidia-smi-topo    nvidia-smi topo -m
      nvidia-smi-nvlink  nvidia-smi nvlink --status, -e
      nvidia-smi-list    nvidia-smi -L
      nccl-tests         any *_perf of nccl-tests
      nvbandwidth        nvbandwidth, text or JSON
      bandwidth-test     CUDA sample bandwidthTest
      p2p-bandwidth      CUDA sample p2pBandwidthLatencyTest
      dcgm-diag          dcgmi diag, JSON of DCGM 2 to 4 or the table
      dmesg              dmesg, /dev/kmsg, syslog, journalctl
      lspci              lspci, with -nn and -vv
      ibstat             ibstat, ibstatus
      numactl            numactl --hardware
      lscpu              LC_ALL=C lscpu, lscpu -J
      driver-version     /proc/driver/nvidia/version

    \b
    Examples:
      nvidia-smi -q -x | gpunode parse nvidia-smi-xml - | jq '.gpus[].temperature_c'
      gpunode parse nccl-tests all_reduce.log
    """
    if kind not in KINDS:
        raise UsageError(unknown("kind", kind, KINDS))
    name = "standard input" if file == "-" else file
    data = _read(file)
    if verbose:
        click.echo(f"gpunode: {name}: {len(data)} bytes read as {kind}", err=True)
    try:
        answer = parsed(kind, decoded(data), _xids() if kind == "dmesg" else None)
    except ParseError as err:
        raise UsageError(f"{name}: not valid as {kind}: {err}") from None
    click.echo(json.dumps(answer, indent=1, allow_nan=False))
    return 0


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as err:
        raise UsageError(f"{file}: cannot be read: {err.strerror}") from None


def _xids() -> dict[int, XidMeaning]:
    """Return the catalog's meanings of Xids."""
    return {xid.number: xid for xid in load().xids.values() if xid.severity != "unused"}
