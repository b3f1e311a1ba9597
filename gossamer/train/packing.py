"""A state as tensors by name and plain data, as checkpoints have it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from gossamer.core.members import Roll
from gossamer.core.plan import Plan
from gossamer.core.replan import Planned
from gossamer.core.tree import Tree
from gossamer.worker.packet import Header, Packet, unseal
from gossamer.worker.state import Met, Pending, State, Stream


def pack_state(state: State, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Moves the tensors of `state` into `tensors`; returns the rest. Names are listed, since the order of a tree matters."""

    def tree(prefix: str, t: Tree) -> list[str]:
        tensors.update({f"{prefix}/{name}": value for name, value in t.items()})
        return list(t)

    packed: dict[str, Any] = {"round": state.round, "tokens": state.tokens, "x": tree("x", state.x)}
    packed["planned"] = asdict(state.planned)
    packed["outer"] = {name: tree(f"outer/{name}", t) for name, t in state.outer.items()}
    for name in ("residual", "mean_residual", "said", "memory", "others", "local"):
        kept: Tree | None = getattr(state, name)
        packed[name] = None if kept is None else tree(name, kept)
    packed["roll"] = [[since, sorted(absent)] for since, absent in state.roll.epochs]
    packed["streams"] = [_pack_stream(stream, str(p), tensors) for p, stream in enumerate(state.streams)]
    return packed


def _pack_stream(stream: Stream, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    packed: dict[str, Any] = {"norms": stream.norms, "tokens": stream.tokens, "pending": None}

    def packet(at: str, p: Packet) -> dict[str, Any]:
        if p.data is not None:
            tensors[at] = p.data
        return {"header": list(p.header), "nbytes": p.nbytes}

    if (pending := stream.pending) is not None:
        tensors.update({f"y/{k}": v for k, v in pending.y.items()})  # the tensors of fragments are not the same
        own = {str(s): packet(f"own/{name}/{s}", p) for s, p in pending.own.items()}
        packed["pending"] = {"round": pending.round, "y": list(pending.y), "own": own, "met": None}
        if met := pending.met:
            by_worker = {"weights": list(met.weights.items()), "step_s": list(met.step_s.items())}
            mean = None if met.mean is None else packet(f"mean/{name}", met.mean)
            handed = [packet(f"handed/{name}/{k}", p) for k, p in enumerate(met.handed)]
            packed["pending"]["met"] = {"mean": mean, "refused": list(met.refused), "handed": handed, **by_worker}
    return packed


def unpack_state(packed: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> State:
    """Of what `pack_state` gave, with its tensors on `device`."""

    def tree(prefix: str, names: list[str]) -> Tree:
        return {name: tensors[f"{prefix}/{name}"].to(device) for name in names}

    def optional(name: str) -> Tree | None:
        return None if packed[name] is None else tree(name, packed[name])

    return State(
        x=tree("x", packed["x"]),
        round=packed["round"],
        tokens=packed["tokens"],
        outer={name: tree(f"outer/{name}", names) for name, names in packed["outer"].items()},
        residual=optional("residual"),
        mean_residual=optional("mean_residual"),
        said=tree("said", packed.get("said", [])),
        memory=tree("memory", packed.get("memory", [])),
        others=tree("others", packed["others"]),
        local=tree("local", packed["local"]),
        streams=[_unpack_stream(stream, str(p), tensors, device) for p, stream in enumerate(packed["streams"])],
        planned=_unpack_planned(packed.get("planned", {})),
        roll=Roll([(since, frozenset(absent)) for since, absent in packed.get("roll", [])]),
    )


def _unpack_stream(packed: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor], device: torch.device) -> Stream:
    def packet(at: str, about: Mapping[str, Any]) -> Packet:
        data = tensors.get(at)
        return Packet(Header(*about["header"]), about["nbytes"], None) if data is None else unseal(data)

    pending, met = None, None
    if p := packed["pending"]:
        own = {int(s): packet(f"own/{name}/{s}", about) for s, about in p["own"].items()}
        if m := p["met"]:
            mean = None if m["mean"] is None else packet(f"mean/{name}", m["mean"])
            handed = tuple(packet(f"handed/{name}/{k}", about) for k, about in enumerate(m.get("handed", ())))
            met = Met(mean, dict(m["weights"]), tuple(m["refused"]), dict(m["step_s"]), handed)
        pending = Pending(p["round"], own, {k: tensors[f"y/{k}"].to(device) for k in p["y"]}, met)
    return Stream(packed["norms"], packed["tokens"], pending)


def _unpack_planned(packed: Mapping[str, Any]) -> Planned:
    def plan(kept: Mapping[str, Any] | None) -> Plan | None:
        return None if kept is None else Plan(tuple(kept["steps"]), tuple(kept["batch"]), kept["sequence"], tuple(kept.get("exact", ())))

    if not packed:  # written by a release that did not plan anew
        return Planned()
    return Planned(
        packed["version"], packed["since"], plan(packed["plan"]), plan(packed["previous"]), tuple(packed["step_s"]), packed["insisted"]
    )
