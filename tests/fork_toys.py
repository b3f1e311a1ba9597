"""A worker without torch, for the tests of forking: `python -m fork_toys JOB FOLDER`; and, with a number after that, its launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

LOADED_BY = os.getpid()


def main(job: str, folder: Path) -> int:
    rank = os.environ["RANK"]
    print(f"worker {rank} speaks", flush=True)
    import fork_toys

    said = {"pid": os.getpid(), "loaded_by": fork_toys.LOADED_BY, "said": os.environ.get("SAID"), "stdin": os.read(0, 1).decode()}
    (folder / f"{rank}.part").write_text(json.dumps(said))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    if job == "wait":
        time.sleep(100)
    if job == "die" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return 7 if job == "fail" and rank == "1" else 0


def launcher(job: str, folder: Path, n: int) -> int:
    from gossamer.net import launch

    os.environ["SAID"] = "after the first process was forked"
    argv = [sys.executable, "-m", "fork_toys", job, str(folder)]
    code = launch(
        n, argv, folder, env={"SAID": "to workers"}, say=lambda text: print(text, flush=True), grace_s=1.0, modules=("fork_toys",)
    )
    print(f"code {code}")
    return 0


if __name__ == "__main__":
    sys.exit(launcher(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 3 else main(sys.argv[1], Path(sys.argv[2])))
