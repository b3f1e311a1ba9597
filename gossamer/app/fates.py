"""What a configuration says of deaths, checked."""

from __future__ import annotations

from gossamer.app.settings import Config
from gossamer.core.errors import BadInput
from gossamer.core.method import Method


def check_fates(config: Config, method: Method) -> None:
    """Checks clock.kill, clock.back and run.on_death.

    Raises:
        BadInput: they name what is not there, or ask for what the method cannot do.
    """
    clock = config.clock
    if config.run.on_death == "continue" and not method.outlives and not method.tiers:
        raise BadInput(
            f'run.on_death = "continue", but {method.name} cannot go on without a worker: its mean is over all, or whom a worker hears is '
            'not who hears it. Set run.on_death = "stop", or use gossip over one_peer, two_peer or ring (gasloc, noloco, dadam), or halos'
        )
    for key, pairs in (("kill", clock.kill), ("back", clock.back)):
        for pair in pairs:
            if len(pair) != 2 or not 0 <= pair[0] < method.n or not (key == "back") <= pair[1] < method.rounds:
                raise BadInput(
                    f"clock.{key} has the entry {pair}: expected [worker, round] with a worker from 0 to {method.n - 1} and a round from 1 "
                    f"to {method.rounds - 1}, such as [[{method.n - 1}, 1]]"
                )
        if len({pair[0] for pair in pairs}) < len(pairs):
            raise BadInput(f"clock.{key} names a worker twice: give each once")
    if not clock.kill and not clock.back:
        return
    kills = {pair[0]: pair[1] for pair in clock.kill}
    for worker, round in clock.back:
        if worker not in kills or round <= kills[worker] or not method.outlives:
            raise BadInput(
                f"clock.back = [[{worker}, {round}]]: only who has died can come back, later than it died, and to a method that goes on "
                "without it (gossip): name it in clock.kill with an earlier round"
            )
    if len(kills) < method.n:
        return
    if not clock.back:
        raise BadInput("clock.kill names all workers: leave at least one of them")
    back = {pair[0]: pair[1] for pair in clock.back}
    for last in kills.values():  # whoever comes back is received by another one, a round later
        if all(kills[i] <= last <= back.get(i, method.rounds) + 1 for i in kills):
            raise BadInput(
                f"clock.kill and clock.back leave no worker alive at round {last}, and nobody can come back to nobody: let one die later, "
                "or come back two rounds before the last one dies"
            )
