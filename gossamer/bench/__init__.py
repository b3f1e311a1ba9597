"""Reproductions: the rows of a published table, tuned with equal trials, run as cached cells, and set beside the published numbers."""
