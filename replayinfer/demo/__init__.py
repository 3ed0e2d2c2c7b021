"""The main job: small hybrid models, real text, continuous batching by replay, all checked."""
