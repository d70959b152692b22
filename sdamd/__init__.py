"""sdamd: Stable Diffusion for people who own a Radeon."""

__version__ = "0.1.0"
