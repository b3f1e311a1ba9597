"""`gossamer`, in a process that the kernel kills after so many seconds of its own processor time: in Python or out of it, whatever it does.

python -m killed SECONDS train --resume RUN
"""

from __future__ import annotations

import runpy
import signal
import sys

if __name__ == "__main__":
    if (seconds := float(sys.argv.pop(1))) > 0:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends a process at once, as SIGKILL does
        signal.setitimer(signal.ITIMER_PROF, seconds)
    runpy.run_module("gossamer", run_name="__main__", alter_sys=True)
