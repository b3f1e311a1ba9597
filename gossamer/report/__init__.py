"""Reads run folders; writes tables, figures, one HTML page, and traces for Perfetto. Knows nothing of how a run is made."""
