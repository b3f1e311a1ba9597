"""Slurm, Kubernetes and spot machines: what the examples start is what the command line takes."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_docs import check_command
from torch.distributed.run import get_args_parser

from gossamer.app.grids.engines import engine_named
from gossamer.app.grids.grid import axis
from gossamer.wan.trust.certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE, REVOKED_FILE

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `gossamer ...` in a script, its comments included."""
    for line in re.sub(r"\\\n#?\s*", " ", text).splitlines():
        if match := re.search(r"(?:^#?\s*|[/ ])gossamer ((?:wan|train|compare) [^`>;]*)", line):
            yield [re.sub(r"\$\{?\w+\}?|\$\(\w+\)|%i", "x", word) for word in shlex.split(match[1], comments=True)]


@pytest.mark.parametrize(
    "file", [p for f in ("slurm", "kubernetes", "spot") for p in sorted((EXAMPLES / f).iterdir())], ids=lambda p: p.name
)
def test_commands_exist(file: Path) -> None:
    text = file.read_text()
    if file.suffix == ".py":
        compile(text, str(file), "exec")
    elif file.suffix in (".sh", ".sbatch"):
        subprocess.run(["bash", "-n", str(file)], check=True)
    for arguments in commands(text):
        if "..." not in arguments:
            check_command(arguments)


# ---- Slurm

STUBS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; else echo "$@" >> "$LOG.scontrol"; fi',
    "srun": 'shift; exec "$@"',  # one option, then the command
    "torchrun": 'printf "%s\\n" "$@" > "$LOG"; exit "$CODE"',
}


def sbatch(folder: Path, code: int) -> tuple[int, list[str], str]:
    """Runs the batch script with stand-ins for Slurm and torchrun: its exit code, torchrun's arguments, what scontrol was told."""
    for name, body in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    log = folder / "log"
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), "CODE": str(code), "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "node-[a-b]",
    }  # fmt: skip
    done = subprocess.run(["bash", str(EXAMPLES / "slurm" / "gossamer.sbatch")], env=env, cwd=folder, check=False, timeout=60)
    told = folder / "log.scontrol"
    return done.returncode, log.read_text().splitlines(), told.read_text() if told.exists() else ""


def check_torchrun(arguments: list[str]) -> dict[str, Any]:
    given = get_args_parser().parse_args(arguments)
    assert (given.nnodes, given.node_rank, given.nproc_per_node, given.master_addr) == ("2", 1, "1", "node-a")
    assert given.module and given.training_script == "gossamer"
    return check_command(given.training_script_args)


def test_a_slurm_job_begins_goes_on_and_comes_again(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "17"
    code, arguments, told = sbatch(tmp_path, 143)
    params = check_torchrun(arguments)
    assert params["configs"] == [Path("job.toml")] and params["out"] == Path("runs/17") and params["resume"] is None
    assert code == 143 and told == "requeue 17\n", "it left when it was told to, and is to come again"
    run.mkdir(parents=True)  # begun, and no checkpoint yet
    code, arguments, _ = sbatch(tmp_path, 1)
    assert check_torchrun(arguments)["out"] == Path("runs/17") and (tmp_path / "runs" / "17.without-checkpoint-0").is_dir()
    (run / "checkpoints" / "round-000004").mkdir(parents=True)
    (run / "checkpoints" / "round-000004" / "manifest.json").touch()
    (tmp_path / "log.scontrol").unlink()
    code, arguments, told = sbatch(tmp_path, 2)
    params = check_torchrun(arguments)
    assert params["resume"] == Path("runs/17") and not params["configs"] and params["out"] is None
    assert code == 2 and told == "", "what cannot work does not come again"
    (run / "summary.json").touch()
    assert sbatch(tmp_path, 0)[::2] == (0, "")


def test_what_slurm_is_asked_for_exists() -> None:
    text = (EXAMPLES / "slurm" / "gossamer.sbatch").read_text()
    asked = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", text, re.M)
    assert len(asked) == text.count("\n#SBATCH") and set(asked) <= {
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue", "open-mode", "output",
    }  # fmt: skip
    warned_s = int(re.search(r"--signal=TERM@(\d+)", text)[1])  # type: ignore[index]
    assert int(re.search(r"SHUTDOWN_TIMEOUT=(\d+)", text)[1]) < warned_s  # type: ignore[index]


def test_the_grid_is_one_and_its_options_are_known(tmp_path: Path) -> None:
    (arguments,) = list(commands((EXAMPLES / "slurm" / "grid.sh").read_text()))
    params = check_command(arguments)
    assert [len(axis(text).values) for text in params["grid"]] == [3, 2] and params["engine"] == "slurm"
    engine_named("slurm", ["cluster=debug", *params["engine_options"]], params["jobs"], tmp_path)


# ---- Kubernetes


def pods(file: str) -> Iterator[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """(object, its pods' specification, all services of the file)."""
    objects = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / file).read_text()))
    services = [o for o in objects if o["kind"] == "Service"]
    for o in objects:
        if o["kind"] != "Service":
            yield o, o["spec"]["template"]["spec"], services


@pytest.mark.parametrize("file", ["sites.yaml", "job.yaml"])
def test_pods_hang_together(file: str) -> None:
    seen = 0
    for o, pod, services in pods(file):
        labels = o["spec"]["template"]["metadata"]["labels"]
        reaching = [s for s in services if s["spec"]["selector"].items() <= labels.items()]
        assert len(reaching) == 1 and reaching[0]["metadata"]["name"] == o["spec"].get("serviceName", pod.get("subdomain"))
        volumes = {v["name"] for v in [*pod["volumes"], *(c["metadata"] for c in o["spec"].get("volumeClaimTemplates", []))]}
        containers = [*pod.get("initContainers", []), *pod["containers"]]
        assert {m["name"] for c in containers for m in c["volumeMounts"]} == volumes
        for c in pod["containers"]:
            args, ports = c["args"], {p["containerPort"] for p in c.get("ports", [])}
            if args[0] == "wan":
                params = check_command([re.sub(r"\$\(SITE\)", "site-0", a) for a in args])
                assert ports == {int(params["bind"].split(":")[1])} == {p["port"] for p in reaching[0]["spec"]["ports"]}
                mounted = {m["mountPath"] for m in c["volumeMounts"]}
                named = [params["identity"], params.get("out") or params["state"], *(params.get("configs") or [])]
                assert all(any(Path(path).is_relative_to(m) for m in mounted) for path in named)
            else:
                assert len(list(commands(args[0]))) == 2, "one that begins, one that goes on"
            seen += 1
    assert seen == {"sites.yaml": 2, "job.yaml": 1}[file]


def test_every_site_has_its_keys() -> None:
    site, pod, _ = next(found for found in pods("sites.yaml") if found[0]["metadata"]["name"] == "site")
    sources = next(v for v in pod["volumes"] if v["name"] == "given")["projected"]["sources"]
    assert [s["secret"]["name"] for s in sources] == [f"keys-site-{k}" for k in range(site["spec"]["replicas"])]
    for k, source in enumerate(sources):
        kept = {i["key"]: i["path"] for i in source["secret"]["items"]}
        assert kept == {name: f"site-{k}/{name}" for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE, REVOKED_FILE)}


def test_a_job_has_as_many_workers_as_it_says() -> None:
    (job, pod, services), = pods("job.yaml")  # fmt: skip
    env = {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(env["WORLD_SIZE"]) and "RANK" in env
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{services[0]['metadata']['name']}"


# ---- spot machines

LEAVES = 'trap "echo left >> $0; exit 143" TERM; echo began >> $0; while :; do sleep 0.05; done'


def spot(notice: Path, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(EXAMPLES / "spot" / "spot.py"), "--notice", str(notice), "--every", "0.05", "--", *command],
        stderr=subprocess.DEVNULL,
    )


def test_a_notice_is_a_clean_leave(tmp_path: Path) -> None:
    notice, said = tmp_path / "preempted", tmp_path / "said"
    with spot(notice, "bash", "-c", LEAVES, str(said)) as running:
        while not said.exists():
            assert running.poll() is None
            time.sleep(0.02)
        notice.touch()
        assert running.wait(60) == 143
    assert said.read_text() == "began\nleft\n", "told once, and waited for"


def test_without_a_notice_the_command_is_left_alone(tmp_path: Path) -> None:
    with spot(tmp_path / "preempted", "bash", "-c", "sleep 0.2; exit 7") as running:
        assert running.wait(60) == 7
    with spot(tmp_path / "preempted") as running:
        assert running.wait(60) == 2, "no command"


def test_an_address_that_answers_nonsense_is_no_notice() -> None:
    noticed = runpy.run_path(str(EXAMPLES / "spot" / "spot.py"))["noticed"]

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as link:
            link.recv(4096)
            link.sendall(b"nothing here\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = threading.Thread(target=answer, args=(listener,))
        other.start()
        assert not noticed(f"http://127.0.0.1:{listener.getsockname()[1]}/", [], "")
        other.join()
