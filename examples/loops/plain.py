"""A plain loop: torchrun --nproc-per-node 2 examples/loops/plain.py OUT. Lines that end in `# +` are Gossamer's."""

from __future__ import annotations

import sys
from pathlib import Path

import own

import gossamer  # +


def main(out: Path) -> None:
    workers = gossamer.connect()  # +
    model = own.model()
    optimizer = own.optimizer(model)
    amount = {"steps": own.STEPS, "batch": own.BATCH, "sequence": own.SEQUENCE, "rounds": own.ROUNDS}  # +
    outer = gossamer.join(model, optimizer, "diloco", **amount, workers=workers)  # +
    outer.scheduler()  # +
    for batch in own.batches(workers.me):
        loss = own.mean_loss(model(input_ids=batch[:, :-1], use_cache=False).logits, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record = outer.step(tokens=batch[:, 1:].numel(), loss=loss)  # +
        if record.completed and outer.worker == 0:  # +
            print(f"round {record.round}: loss {record.metrics['loss']:.3f}, {record.bytes} bytes, waited {record.waited_s:.3f} s")  # +
        if record.over:  # +
            break  # +
    outer.close()  # +
    own.save(model, out, "plain", workers.me)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
