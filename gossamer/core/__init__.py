"""Floor 0: tensors and numbers. No IO, clock, logging, process group or global random state."""
