"""GeoMesh and DiLoCo in all their cadences, on unequal work: what every world must run to the same bits."""

from __future__ import annotations

from dataclasses import replace

from toy import ToyBody

from gossamer.core.cadence import Cadence
from gossamer.core.method import Method
from gossamer.core.plan import Plan
from gossamer.core.schedule import Constant
from gossamer.recipes import Setting, geomesh, streaming_diloco

N = 4
UNEQUAL = Setting(Plan((1, 2, 3, 7), (3, 2, 1, 2), ToyBody.LENGTH), rounds=4, seed=3, schedule=Constant())
CADENCES = {
    "plain": Cadence(),
    "overlap": Cadence(0.3),
    "eager": Cadence(0.6, eager=True),
    "three": Cadence(0.0, fragments=3),
    "streaming": Cadence(0.45, fragments=3),  # of the middle fragment the first phase is over at a boundary, and the second is not
    "eager_streaming": Cadence(0.2, fragments=3, eager=True),
}
METHODS: dict[str, Method] = {"streaming_diloco": streaming_diloco(UNEQUAL, weights="tokens")}
for _name, _cadence in CADENCES.items():
    METHODS[f"gather_{_name}"] = replace(geomesh(UNEQUAL), cadence=_cadence)
    METHODS[f"shard_{_name}"] = replace(geomesh(UNEQUAL, exchange="shard", error_feedback="both"), cadence=_cadence)
