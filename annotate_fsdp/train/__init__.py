"""The training job of the command line: byte-level language models on the standard library's sources."""
