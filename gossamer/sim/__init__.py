"""Floor 2: the virtual-clock world. The same programs as in the real worlds, answered by an event queue and models of time."""
