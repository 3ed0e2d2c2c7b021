"""Bridges from other libraries to `replayinfer`; each is its own extra and imports its peer lazily."""
