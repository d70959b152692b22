"""Which GPUs are here, and which software each of them needs. Standard library only."""
