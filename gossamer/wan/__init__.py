"""The real world on gRPC: sites on the open internet, with mutual TLS, a small coordinator and members that come and go.

gRPC's own log is switched off unless GRPC_VERBOSITY says otherwise: it writes a line for every stranger that knocks. What matters is said
by Python's `logging`, below the name `gossamer.wan`, once for each peer and reason.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is first imported
