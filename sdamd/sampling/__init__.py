"""From a decided job to pixels: conditioning, schedulers, noise and the sampling loop."""
