"""Floor 3: what turns a configuration into a run: settings, assembly, metrics, checkpoints, commands."""
