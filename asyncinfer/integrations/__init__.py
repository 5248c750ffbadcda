"""Frameworks on an engine in this process; each module needs its framework, and nothing else."""
