"""Measurements of Gossamer against plain PyTorch on this machine. `python -m bench` runs them all; each file is a script of its own."""
