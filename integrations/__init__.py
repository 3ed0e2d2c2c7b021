"""Bridges from other libraries to `replayinfer`: each an extra, each importing its peer lazily."""
