"""The connections between two sites: streams, frames, payload and its pace."""
