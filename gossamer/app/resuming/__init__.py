"""Going on from a checkpoint: an earlier round, other workers, without some."""
