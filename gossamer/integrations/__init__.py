"""Gossamer in other people's training loops: transformers' Trainer, Lightning, torchtitan. Each module needs its library."""
