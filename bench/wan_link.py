"""What one pair of sites gets out of an emulated line: two processes in network namespaces of this machine.

    python -m bench.wan_link --emulator PATH [--seconds 10] [--channels 4]

`--emulator` (or the variable WAN_EMULATOR) is a command that knows `gen N MBIT ONE_WAY_MS JITTER_MS LOSS_PCT QUEUE_MS` (prints a
configuration of N nodes), `up FILE`, `exec NODE COMMAND...` and `down`, with node i at 10.77.0.(i+1). It needs root and Linux; where that
is not to be had, this says so and measures nothing.

Figures, at 100 Mbit/s and 40 ms round trip, each the payload of 20 MB messages that arrived between 30 % of the time and its end:

    clean  = share of the line that a link with all its channels fills
    lossy  = the same at 0.1 % loss with cubic, to one plain TCP connection, and to a link of one channel
    note   = round trip of a small message of the notes wire meanwhile, median and worst

Writes results/wan_link.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from bench.common import command, machine, median, write

MBPS, ONE_WAY_MS, QUEUE_MS, LOSS_PCT = 100, 20, 100, 0.1
MESSAGE_BYTES = 20_000_000
PORT = 7411
SETTLE = 0.3
"""Share of the time that is not counted, at the start."""
_CONTROL = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def receive_plain(seconds: float) -> dict[str, Any]:
    with socket.create_server(("10.77.0.1", PORT)) as server:
        peer, _ = server.accept()
        begin_s, got, marks = time.monotonic(), 0, []
        with peer:
            while data := peer.recv(1 << 20):
                got += len(data)
                marks.append((time.monotonic() - begin_s, got))
    return {"mbps": rate(marks, seconds)}


def send_plain(seconds: float) -> None:
    data = bytes(1 << 18)
    for _ in range(100):
        with suppress(ConnectionRefusedError), socket.create_connection(("10.77.0.1", PORT)) as peer:
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                peer.sendall(data)
            return
        time.sleep(0.05)


def rate(marks: list[tuple[float, int]], seconds: float) -> float:
    """Mbit/s between SETTLE of the time and its end."""
    inside = [m for m in marks if SETTLE * seconds <= m[0] <= seconds]
    if len(inside) < 2:
        return 0.0
    (t0, n0), (t1, n1) = inside[0], inside[-1]
    return 8e-6 * (n1 - n0) / (t1 - t0)


def over_link(me: int, channels: int, seconds: float) -> dict[str, Any]:
    """Site 1 sends, site 0 receives and answers notes."""
    from gossamer.wan.links.wire import LinkDown, Links, LinkSettings, Peer

    links = Links(me, 2, "bench", bind=f"10.77.0.{me + 1}:{PORT}", settings=LinkSettings(channels=channels))
    links.connect({1 - me: Peer(f"10.77.0.{2 - me}:{PORT}")}, 20)
    data, notes = links.wire("data"), links.wire("notes")
    begin_s = time.monotonic()
    until_s = begin_s + seconds
    rounds_s: list[float] = []

    def talk() -> None:
        with suppress(LinkDown):
            while True:
                slip = torch.zeros(12, dtype=torch.uint8)
                if me == 1:
                    time.sleep(0.1)
                    sent_s = time.monotonic()
                    notes.send(slip, 0, 0)
                notes.recv(slip, 1 - me, 0).wait()
                if me == 0:
                    notes.send(slip, 1, 0)
                else:
                    rounds_s.append(time.monotonic() - sent_s)

    threading.Thread(target=talk, daemon=True).start()
    marks: list[tuple[float, int]] = []

    def look() -> None:
        while time.monotonic() < until_s:
            time.sleep(0.05)
            marks.append((time.monotonic() - begin_s, links.traffic()[1 - me].payload_received_bytes))

    if me == 0:
        threading.Thread(target=look, daemon=True).start()
    buffers = [torch.zeros(MESSAGE_BYTES, dtype=torch.uint8) for _ in range(2)]
    with suppress(LinkDown):
        works = [(data.recv if me == 0 else data.send)(b, 1 - me, 8) for b in buffers]
        i = 0
        while time.monotonic() < until_s:
            works[i].wait()
            works[i] = (data.recv if me == 0 else data.send)(buffers[i], 1 - me, 8)
            i = 1 - i
    time.sleep(0.3)
    traffic = links.traffic()[1 - me]
    links.close()
    if me == 0:
        return {"mbps": rate(marks, seconds), "sessions": traffic.sessions}
    settled = sorted(rounds_s[len(rounds_s) // 4 :])
    return {"note_ms": 1e3 * median(settled), "worst_note_ms": 1e3 * settled[-1]} if settled else {}


def site(me: int, mode: str, seconds: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    if mode != "plain":
        return over_link(me, int(mode), seconds)
    if me == 0:
        return receive_plain(seconds)
    send_plain(seconds)
    return {}


@contextmanager
def line(emulator: str, loss_pct: float, control: str) -> Iterator[None]:
    """The line is up, with this congestion control at both ends."""
    allowed = _CONTROL.read_text().split()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "line.cfg"
        numbers = [str(x) for x in (2, MBPS, ONE_WAY_MS, 0, loss_pct, QUEUE_MS)]
        config.write_text(subprocess.run([emulator, "gen", *numbers], check=True, capture_output=True, text=True).stdout)
        if control not in allowed:  # of namespaces, and only while this runs
            _CONTROL.write_text(" ".join([*allowed, control]))
        try:
            subprocess.run([emulator, "up", str(config)], check=True, stdout=subprocess.DEVNULL)
            try:
                for node in "01":
                    set_to = f"net.ipv4.tcp_congestion_control={control}"
                    subprocess.run([emulator, "exec", node, "sysctl", "-qw", set_to], check=True)
                yield
            finally:
                subprocess.run([emulator, "down"], check=True, stdout=subprocess.DEVNULL)
        finally:
            _CONTROL.write_text(" ".join(allowed))


def measure(emulator: str, mode: str, seconds: float) -> dict[str, Any]:
    """Both sites of one measurement."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "bench.wan_link", "--seconds", str(seconds), "--mode", mode]
    sites = [
        subprocess.Popen([emulator, "exec", str(i), *argv, "--site", str(i)], env=env, stdout=subprocess.PIPE, text=True) for i in range(2)
    ]
    found: dict[str, Any] = {}
    try:
        for process in sites:
            out, _ = process.communicate(timeout=seconds + 60)
            if process.returncode:
                raise RuntimeError(f"a site ended with exit code {process.returncode}")
            found |= json.loads(out.splitlines()[-1])
    finally:
        for process in sites:
            process.kill()
    return {k: float(f"{v:.4g}") for k, v in found.items()}


def why_not(emulator: str | None) -> str | None:
    """Why there can be no line here."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if emulator is None or shutil.which(emulator) is None:
        return f"there is no emulator ({emulator}): give --emulator or WAN_EMULATOR"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulator", default=os.environ.get("WAN_EMULATOR"))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--only", choices=["clean", "lossy"])
    parser.add_argument("--site", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.site is not None:
        print(json.dumps(site(args.site, args.mode, args.seconds)))
        return 0
    if why := why_not(args.emulator):
        print(f"skipped: {why}")
        return 0
    before, found = machine(), {}
    for name, loss_pct, control in (("clean", 0.0, "cubic"), ("lossy", LOSS_PCT, "cubic")):
        if args.only in (None, name):
            with line(args.emulator, loss_pct, control):
                modes = [str(args.channels)] if name == "clean" else ["plain", "1", str(args.channels)]
                found[name] = {mode: measure(args.emulator, mode, args.seconds) for mode in modes}
            print(name, json.dumps(found[name]), flush=True)
    if args.only is None:
        many = found["lossy"][str(args.channels)]["mbps"]
        figures = {
            "clean_share": median([found["clean"][str(args.channels)]["mbps"] / MBPS]),
            "lossy_to_one_connection": median([many / found["lossy"]["plain"]["mbps"]]),
            "lossy_to_one_channel": median([many / found["lossy"]["1"]["mbps"]]),
        }
        print(json.dumps(figures))
        shape = {"mbps": MBPS, "rtt_ms": 2 * ONE_WAY_MS, "queue_ms": QUEUE_MS, "loss_pct": LOSS_PCT, "control": "cubic"}
        write("wan_link", {"command": command("bench.wan_link"), "machine": before, "line": shape, **figures, "runs": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
