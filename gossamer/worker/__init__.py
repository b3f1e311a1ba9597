"""Floor 1: the worker programs. They ask for what they need and never touch a clock, a socket or a process group."""
