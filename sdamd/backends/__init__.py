"""The engines that run a checkpoint; `backend.open_backend` is the only door to torch."""
