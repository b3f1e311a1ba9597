"""Model, data, inner steps, evaluation and checkpoints of one worker. Knows core and worker, and no world."""
