"""Reference models that carry their own FSDP marks."""
