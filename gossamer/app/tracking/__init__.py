"""Metrics as other tools take them."""
