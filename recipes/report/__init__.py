"""Reports of runs and benchmarks, on the screen and as a page."""
