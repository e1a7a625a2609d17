"""What the software is built to reach, and what was measured: the table of targets, and runs of the benchmarks."""
