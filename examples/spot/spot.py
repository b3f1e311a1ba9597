"""Runs a command on a machine that may be taken away, and has it leave cleanly when that is announced.

    python spot.py --notice http://169.254.169.254/latest/meta-data/spot/instance-action -- gossamer wan join job.toml --site lyon ...

It asks for the notice every few seconds: a file that comes into being, or an address that begins to answer (with a text that contains
--says, where it answers always). Then it sends the command SIGTERM, once: `gossamer wan join` and `gossamer train` stop at the end of their
round and write a checkpoint; the other sites go on. Its exit code is the command's, so a service manager can tell a clean leave (143, 130)
from the end of the run (0). It needs Python alone.

    AWS      --notice http://169.254.169.254/latest/meta-data/spot/instance-action
    Google   --notice http://metadata.google.internal/computeMetadata/v1/instance/preempted --header "Metadata-Flavor: Google" --says TRUE
    Azure    --notice "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01" --header "Metadata: true" --says Preempt
    a file   --notice /run/preempted
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable

AWS = "http://169.254.169.254/latest/"


def noticed(notice: str, headers: list[str], says: str) -> bool:
    """Whether the machine is to be taken away. An address that does not answer says no."""
    if "://" not in notice:
        return os.path.exists(notice)
    asked = dict(tuple(part.strip() for part in header.split(":", 1)) for header in headers)
    try:
        if notice.startswith(AWS):
            token = urllib.request.Request(AWS + "api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
            with urllib.request.urlopen(token, timeout=2) as answer:
                asked["X-aws-ec2-metadata-token"] = answer.read().decode()
        with urllib.request.urlopen(urllib.request.Request(notice, headers=asked), timeout=2) as answer:
            return says in answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return False


def run(command: list[str], announced: Callable[[], bool], every_s: float) -> int:
    """Runs the command to its end, telling it of the first announcement and of signals. Returns its exit code."""
    child = subprocess.Popen(command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    told = False
    while True:
        try:
            code = child.wait(timeout=None if told else every_s)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            if announced():
                told = True
                print(f"spot: this machine is to be taken away: {command[0]} is told to leave", file=sys.stderr, flush=True)
                child.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a command, and sends it SIGTERM when the machine is to be taken away.")
    parser.add_argument("--notice", required=True, metavar="FILE|URL", help="what tells that it is")
    parser.add_argument("--header", action="append", default=[], metavar="NAME: VALUE", help="of the request; may be repeated")
    parser.add_argument("--says", default="", metavar="TEXT", help="what the answer must contain")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between two looks")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("give the command after --")
    if bad := [header for header in given.header if ":" not in header]:
        parser.error(f"--header {bad[0]}: expected NAME: VALUE")
    began_s = time.monotonic()
    code = run(command, lambda: noticed(given.notice, given.header, given.says), given.every)
    print(f"spot: {command[0]} ended with {code} after {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
